"""The bi-encoder that finds documents, as a LightningModule. Batches: RetrievalBatch to train,
EncodeBatch else."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from datamodules.core.batches import EncodeBatch, RetrievalBatch
from datamodules.search.datamodule import TERM
from datamodules.search.queries import NO_DOCUMENT
from datamodules.search.retrieval import EncodedCollection
from datamodules.text.encoding import TextEncoding
from lit_models.blocks import layer_depths
from lit_models.seo.base import EncodedTextModule
from lit_models.seo.encoders import Pooling, TextEncoder
from lit_models.seo.losses import TemperatureOptions, in_batch_loss
from lit_models.seo.metrics import measure
from lit_models.seo.networks import BiEncoder, Towers
from lit_models.seo.search import (
    CHOSEN_WEIGHT,
    DEFAULT_METRICS,
    Feedback,
    Found,
    Fusion,
    RetrievalEvaluation,
    Vectors,
    best_weight,
    deepest,
    searched,
    weight_of,
)
from lit_models.seo.tables import RetrievalTable, write_run
from lit_models.training.exact import LossSum


class LitRetriever(EncodedTextModule):
    """Encodes queries and documents by themselves; what lies close belongs together.

    Logs val/METRIC of the encoder alone, and val/bm25_METRIC and val/fused_METRIC beside it.

    Args:
        towers: one encoder for both, or one each.
        pooling: how a text becomes one vector.
        dimensions: of the vectors, by a projection; none keeps the encoder's width.
        temperature: of the loss.
        encode_chunk: texts of a training step whose activations are in memory at a time, for
            steps that are larger than the memory; about a third more time.
        fusion: how BM25's scores are added in evaluation and in the run of a prediction; none
            leaves them apart.
        feedback: how queries are moved towards what they found before they search, in evaluation
            and in the run of a prediction; none leaves them.
        metrics: with the number of ranks that each looks at; the first one chooses the weight of
            the fusion.
        shared: optimizer, encoder and more, see `EncodedTextModule`.

    Raises:
        ValueError: a size below 1, or a metric that is unknown or looks at all ranks.
    """

    learnt_facts = (CHOSEN_WEIGHT,)
    monitor = "val/ndcg@10"
    monitor_mode = "max"
    tables_of = ("validate", "test")
    may_accumulate = False  # every query of a step is compared with all of its documents

    def __init__(
        self,
        towers: Towers = "shared",
        pooling: Pooling = "mean",
        dimensions: int | None = None,
        temperature: TemperatureOptions = TemperatureOptions(),  # noqa: B008 - frozen
        encode_chunk: int | None = None,
        fusion: Fusion | None = None,
        feedback: Feedback | None = None,
        metrics: Sequence[str] = DEFAULT_METRICS,
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        for name, value in (("dimensions", dimensions), ("encode_chunk", encode_chunk)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}; leave it out for none.")
        if "ndcg@10" not in metrics:
            raise ValueError(
                f"metrics must name ndcg@10, by which the best checkpoint is told, got "
                f"{', '.join(metrics)}; add it."
            )
        self.metric_names, self.depth = tuple(metrics), deepest(metrics)
        self.choosing_metric, *_ = (measure(name, "linear", 0.0) for name in metrics)
        self.encode_chunk, self.fusion, self.feedback = encode_chunk, fusion, feedback
        self.built = (towers, pooling, dimensions, temperature)

    def make_network(self, encoder: TextEncoder) -> nn.Module:
        self.val_evaluation = RetrievalEvaluation(self.metric_names, self.depth)
        self.test_evaluation = RetrievalEvaluation(self.metric_names, self.depth)
        return BiEncoder(encoder, *self.built)

    def blocks(self) -> list[nn.Module]:
        return [block for tower in self.network.towers() for block in tower.blocks()]

    def depths(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for tower in self.network.towers():
            found |= layer_depths(self, tower)
        return found

    def own_callbacks(self) -> list[Callback]:
        return [*super().own_callbacks(), RetrievalTable()]

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if self.fusion is not None and self.trainer.datamodule.bm25 is None:
            raise ValueError(
                "model.fusion adds BM25's scores, and data.bm25 is none; give its options, or "
                "leave the fusion out."
            )
        if stage == "predict":
            self.trainer.datamodule.search_encoded = self.write_run

    def forward(self, batch: EncodeBatch) -> Tensor:
        """Return unit vectors [B, W]."""
        return self.network.encode_mixed(
            batch["input_ids"], batch["attention_mask"], batch["is_query"]
        )

    def training_terms(self, batch: RetrievalBatch) -> dict[str, LossSum]:
        size, weight = len(batch["weight"]), batch["weight"]
        options = (size, self.encode_chunk)
        encode = self.network.encode_samples
        queries = encode(batch["query_ids"], batch["query_mask"], True, *options)
        documents = encode(batch["document_ids"], batch["document_mask"], False, *options)
        temperature = self.network.temperature()
        per_sample = len(documents) // size
        is_filler = weight.repeat_interleave(per_sample) == 0
        number = batch["document"].masked_fill(is_filler, NO_DOCUMENT)
        gathered = self.all_gather(documents, sync_grads=True).flatten(0, -2)
        loss = in_batch_loss(
            queries,
            documents[::per_sample],
            gathered,
            self.all_gather(number).flatten(),
            batch["known"],
            temperature,
            weight,
        )
        told = LossSum(temperature.detach() * loss.count, loss.count)  # a mean over the samples
        return {TERM: loss, "temperature": told}

    def term_weights(self) -> dict[str, float]:
        return {"temperature": 0.0}

    def validation_step(self, batch: EncodeBatch, batch_idx: int) -> None:
        self.val_evaluation.encoded.update(self(batch), batch)

    def on_validation_epoch_end(self) -> None:
        self._evaluate("val")

    def test_step(self, batch: EncodeBatch, batch_idx: int) -> None:
        self.test_evaluation.encoded.update(self(batch), batch)

    def on_test_epoch_end(self) -> None:
        self._evaluate("test")

    def predict_step(self, batch: EncodeBatch, batch_idx: int) -> dict[str, Tensor]:
        return {"vector": self(batch).float()}

    @torch.no_grad()
    def encode(self, texts: Sequence[str], is_query: bool) -> Tensor:
        """Return unit vectors [n, W] of texts, in their order, on the device of the module; of
        a document, its title and its text with a line break between them."""
        encoding = TextEncoding(self.recipe)
        return self.network.encode_texts(texts, is_query, encoding, self.device)

    def search(self, queries: Sequence[str], documents: Vectors, k: int) -> Found:
        """Return the k best rows of encoded documents [D, W] for each query."""
        vectors = self.encode(queries, True)
        return searched(vectors, documents, k, self.device, self.feedback)

    def write_run(self, encoded: EncodedCollection) -> None:
        """Search encoded texts with their queries and write the run beside them."""
        weight = self.fusion_weight()
        write_run(encoded, self.trainer.datamodule, weight, self.device, self.feedback)

    @property
    def fusion_is_open(self) -> bool:
        """Whether the weight is chosen on the validation queries, while fitting."""
        return self.fusion is not None and self.fusion.weight is None

    def fusion_weight(self) -> float | None:
        """Return the weight of BM25; none without a fusion."""
        return None if self.fusion is None else weight_of(self.fusion, self.recipe)

    def _evaluate(self, split: str) -> None:
        evaluation = getattr(self, f"{split}_evaluation")
        rankings = evaluation.rankings(self.feedback)
        if self.trainer.state.fn == "fit" and self.fusion_is_open:
            self.recipe[CHOSEN_WEIGHT] = best_weight(rankings, self.choosing_metric)
        for name, metric in evaluation.measure(rankings, self.fusion_weight()).items():
            self.log(f"{split}/{name}", metric, on_step=False, on_epoch=True)
