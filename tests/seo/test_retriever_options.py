"""Options of a retriever and of its data that cannot be, each refused where it enters."""

import pytest

from datamodules import RetrievalDataModule
from lit_models import LitRetriever
from tests.distributed.seo_retriever import adamw


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encode_chunk": 0}, r"encode_chunk must be at least 1, got 0"),
        ({"dimensions": -2}, r"dimensions must be at least 1, got -2"),
        ({"metrics": ["mrr@10"]}, r"metrics must name ndcg@10"),
        ({"metrics": ["ndcg@10", "map"]}, r"'map' looks at every rank.*map@100"),
        ({"metrics": ["ndcg@10", "x@3"]}, r"'x@3' is unknown"),
    ],
)
def test_wrong_options_of_the_module_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        LitRetriever(optimizer=adamw, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bm25_depth": 0}, r"bm25_depth must be at least 1, got 0"),
        ({"num_others": -1}, r"num_others must be 0 or more, got -1"),
    ],
)
def test_wrong_options_of_the_data_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        RetrievalDataModule(**options)
