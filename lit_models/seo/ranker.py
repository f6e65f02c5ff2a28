"""The cross-encoder that puts candidates in order, as a LightningModule. Batch: RankingBatch."""

from typing import Any

import torch
from torch import Tensor, nn

from datamodules.batches import RankingBatch
from datamodules.relevance.ranking import TERM
from lit_models.seo.base import EncodedTextModule
from lit_models.seo.encoders import Pooling, TextEncoder, pooled
from lit_models.seo.losses import listwise_softmax
from lit_models.seo.ranking_metrics import RankingMetrics, rank_queries
from lit_models.training.exact import LossSum
from lit_models.training.metrics import SumCount


class CrossEncoder(nn.Module):
    """A query and a document in one row, to one score.

    Args:
        encoder: of the rows.
        pooling: how a row becomes one vector.
    """

    def __init__(self, encoder: TextEncoder, pooling: Pooling) -> None:
        super().__init__()
        self.encoder, self.pooling = encoder, pooling
        self.score = nn.Linear(encoder.width, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> Tensor:
        """Return scores [P] of rows [P, T]."""
        hidden = self.encoder(input_ids, attention_mask, segment_ids)
        return self.score(pooled(hidden, attention_mask, self.pooling)).squeeze(-1)


class LitRanker(EncodedTextModule):
    """Scores candidates of a query together.

    Args:
        pooling: how a pair becomes one vector.
        shared: optimizer, encoder and more, see `EncodedTextModule`.
    """

    monitor = "val/ndcg@10"
    monitor_mode = "max"

    def __init__(self, pooling: Pooling = "mean", **shared: Any) -> None:
        super().__init__(**shared)
        self.pooling = pooling

    def make_network(self, encoder: TextEncoder) -> nn.Module:
        self.val_metrics, self.test_metrics = RankingMetrics(), RankingMetrics()
        self.val_loss, self.test_loss = SumCount(), SumCount()
        return CrossEncoder(encoder, self.pooling)

    def forward(self, batch: RankingBatch) -> Tensor:
        """Return the scores of all candidates [B, K]; -inf where there is none."""
        pairs = self.network(batch["input_ids"], batch["attention_mask"], batch["segment_ids"])
        index = batch["pair_index"]
        return pairs[index.clamp(min=0)].masked_fill(index < 0, -torch.inf)

    def training_terms(self, batch: RankingBatch) -> dict[str, LossSum]:
        return {TERM: listwise_softmax(self(batch), batch["relevance"], batch["weight"])}

    def validation_step(self, batch: RankingBatch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: RankingBatch, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: RankingBatch, batch_idx: int) -> dict[str, Tensor]:
        return {"score": self(batch)}

    def _evaluate(self, split: str, batch: RankingBatch) -> None:
        scores = self(batch)
        metrics, loss = getattr(self, f"{split}_metrics"), getattr(self, f"{split}_loss")
        loss.update(*listwise_softmax(scores, batch["relevance"], batch["weight"]))
        ranked = rank_queries(
            scores,
            batch["relevance"],
            batch["pair_index"] >= 0,
            batch["all_relevance"],
            batch["document"],
        )
        metrics.update(ranked, batch["weight"])
        self.log(f"{split}/loss", loss, on_step=False, on_epoch=True)
        for name, metric in metrics.items():
            self.log(f"{split}/{name}", metric, on_step=False, on_epoch=True)
