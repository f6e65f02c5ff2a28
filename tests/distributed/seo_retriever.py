"""A retriever whose whole run takes a second, in every way that it can compute."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from datamodules import RetrievalDataModule, TokenizerOptions
from datamodules.core.plan import PlanOptions
from datamodules.core.planned import LoaderOptions, PlannedDataModule
from datamodules.search.candidates import HardNegatives
from datamodules.search.collection import CollectionRequest
from datamodules.search.retrieval import TrainingMix
from datamodules.text.encoding import TextLimits
from lit_models import LitRetriever, LitSparseRetriever
from lit_models.seo.nearest import ExactSearch, Feedback, ShardedSearch
from lit_models.seo.networks import TemperatureOptions
from lit_models.seo.retriever import Fusion
from lit_models.seo.sparse import Penalty
from lit_models.training import ExactDropout
from lit_models.training.exact import ExactModule
from tests.seo.small_collection import adamw, small_encoder

SparseRetriever = partial(
    LitSparseRetriever,
    penalty=Penalty(0.01, 0.01, steps=4),
    temperature=TemperatureOptions(0.9, learns=False),
    num_kept=8,
)


def assert_sharded_search_is_exact(rank: int, num_ranks: int) -> None:
    """Assert exact search where few distinct numbers make ties, and one rank lacks documents."""
    generator = torch.Generator().manual_seed(0)
    for number in (60, 7, num_ranks - 1):
        documents, queries = (
            torch.randint(-1, 2, (rows, 4), generator=generator).double() for rows in (number, 5)
        )
        ids = torch.arange(number) * 3 + 1  # their ids within a larger collection
        own = slice(rank, None, num_ranks)
        sharded = ShardedSearch(ids[own], documents[own])
        assert torch.equal(sharded.all_ids, ids)
        for feedback in (None, Feedback(documents=3)):
            expected = ExactSearch(documents).search(queries, 9, feedback)
            found = sharded.search(queries, 9, feedback)
            assert torch.equal(found.documents, ids[expected.documents])
            assert torch.equal(found.scores, expected.scores)
            assert found.documents.shape == (5, min(9, number))
        assert sharded.search(queries[:0], 9).documents.shape == (0, min(9, number))


class CheckedRetriever(LitRetriever):
    """Tests the search of documents on several ranks during its own test stage."""

    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        assert_sharded_search_is_exact(self.trainer.global_rank, self.trainer.world_size)


class WithoutGradients(LitRetriever):
    """A mutant: documents of other devices are constants without gradients."""

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        gathered = super().all_gather(data, group)
        if data.is_floating_point() and gathered.dim() > data.dim():
            mine = self.trainer.global_rank
            return torch.cat([gathered[:mine], data[None], gathered[mine + 1 :]])
        return gathered


class WithExactDropout(LitRetriever):
    """Its dropout masks depend on the texts."""

    def own_callbacks(self) -> list[Callback]:
        return [*super().own_callbacks(), ExactDropout()]


def retriever(
    folder: Path,
    options: dict[str, Any],
    module_class: type[LitRetriever] = LitRetriever,
    dropout: float = 0.0,
    **model: Any,
) -> tuple[ExactModule, PlannedDataModule]:
    """Return the module and its data, the collection beside a job's folder."""
    data = RetrievalDataModule(
        collection=CollectionRequest(str(folder.parent / "collection")),
        mix=TrainingMix(judged=1, titles=1),
        negatives=HardNegatives(1, "bm25", depth=8),
        predict_output=str(folder / "coded.encoded"),
        tokenizer=TokenizerOptions("words"),
        text=TextLimits(max_length=24, max_query_length=8),
        loader=LoaderOptions(num_workers=0),
        plan=PlanOptions(seed=0),  # independent of a seed that another test left in the environment
        **{"global_batch_size": 16, **options},
    )
    encoder = partial(small_encoder, dropout=dropout)
    module = module_class(optimizer=adamw, encoder=encoder, fusion=Fusion(), **model)
    return module, data


WAYS = {
    "retriever_chunked": partial(retriever, module_class=CheckedRetriever, encode_chunk=5),
    "retriever_dropout": partial(retriever, module_class=WithExactDropout, dropout=0.3),
    "retriever_dropout_chunked": partial(
        retriever, module_class=WithExactDropout, dropout=0.3, encode_chunk=5
    ),
    "retriever_sizes": partial(retriever, sizes=[4, 16], size=8),
    "sparse_retriever": partial(retriever, module_class=SparseRetriever),
    "retriever_mutant": partial(retriever, module_class=WithoutGradients),
}
