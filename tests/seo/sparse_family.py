"""A sparse retriever for the jobs of several processes."""

from functools import partial

from lit_models import LitSparseRetriever
from lit_models.seo.networks import TemperatureOptions
from lit_models.seo.sparse import Penalty

SparseRetriever = partial(
    LitSparseRetriever,
    penalty=Penalty(0.01, 0.01, steps=4),
    temperature=TemperatureOptions(0.9, learns=False),
    num_kept=8,
)
