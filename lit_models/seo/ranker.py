"""Cross-encoder that ranks candidates, as a LightningModule. Batch: RankingBatch."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from datamodules.core.batches import RankingBatch
from datamodules.search.datamodule import TERM
from datamodules.text.encoding import TextEncoding
from lit_models.seo.base import EncodedTextModule
from lit_models.seo.encoders import TextEncoder
from lit_models.seo.metrics import (
    DEFAULT_METRICS,
    GatheredRows,
    QueryTable,
    QueryValues,
    first_relevant,
    log_means,
    rank_queries,
    values_per_query,
)
from lit_models.seo.networks import CrossEncoder, RankingLoss
from lit_models.training.dropout import keyed_texts, keys_in
from lit_models.training.metrics import LossSum, SampleResult, SumCount, evaluating, texts_for

SYSTEMS = ("ranker", "first", "bm25")


class LitRanker(EncodedTextModule):
    """Scores the candidates of a query; trained on groups of candidates.

    Args:
        loss: over a group.
        prior: add the first stage's score times a learned weight, so that training starts with the
            first stage's order.
        pairs_per_forward: number of pairs per pass in evaluation and prediction, to bound memory.
        shared: optimizer, encoder and more, see `EncodedTextModule`.

    Raises:
        ValueError: in `setup`, `prior` is set and the data have no first stage's scores.
    """

    monitor = "val/ndcg@10"
    monitor_mode = "max"
    tables_of = ("test",)

    def __init__(
        self,
        loss: RankingLoss = RankingLoss(),  # noqa: B008 - frozen
        prior: bool = False,
        pairs_per_forward: int = 256,
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        self.loss, self.adds_prior = loss, prior
        self.pairs_per_forward = pairs_per_forward

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if self.adds_prior and not self.trainer.datamodule.scores_first:
            raise ValueError(
                "model.prior needs a first stage's score of every candidate; leave "
                "data.bm25 as it is, or set model.prior to false."
            )

    def make_network(self, encoder: TextEncoder) -> nn.Module:
        self.mean_loss = SumCount()
        self.of_systems = nn.ModuleDict({name: GatheredRows(*DEFAULT_METRICS) for name in SYSTEMS})
        return CrossEncoder(encoder, self.adds_prior, self.loss.kind == "bce")

    def own_callbacks(self) -> list[Callback]:
        return [*super().own_callbacks(), QueryTable()]

    def forward(self, batch: RankingBatch, pairs_per_forward: int | None = None) -> Tensor:
        """Return the scores of all candidates [B, K], -inf for missing ones."""
        index, lengths = batch["pair_index"], batch["pair_lengths"]
        number = 1  # keyed dropout masks belong to one call, which the backward pass may repeat
        if pairs_per_forward is not None:
            number = -(-len(lengths) // pairs_per_forward)
        elif keys_in(self.network) is None:
            number = batch["num_parts"]
        rows = (batch["input_ids"], batch["attention_mask"], batch["segment_ids"])
        # Missing candidates map to one extra row, so that nothing synchronizes with the device.
        row = index.where(index >= 0, len(lengths)).flatten()
        place = index.new_zeros(len(lengths) + 1)
        place[row] = torch.arange(len(row), device=index.device)
        query, candidate = place[:-1] // index.shape[1], place[:-1] % index.shape[1]
        with keyed_texts(self.network, query, candidate):
            pairs = self.network(*rows, lengths, number)
        return self.network.candidates(pairs, index, batch["prior"])

    def training_terms(self, batch: RankingBatch) -> dict[str, LossSum]:
        scores = self(batch)
        return {TERM: LossSum.of(self.loss(scores, batch["relevance"].to(scores)), batch["weight"])}

    def validation_step(self, batch: RankingBatch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: RankingBatch, batch_idx: int) -> SampleResult:
        return self._evaluate("test", batch)

    def on_validation_epoch_end(self) -> None:
        self._log_means("val")

    def on_test_epoch_end(self) -> None:
        self._log_means("test")

    def query_values(self, split: str) -> QueryValues | None:
        """Return the values of a test for `QueryTable`; `None` for a validation."""
        if split != "test":
            return None
        queries = self.trainer.datamodule.datasets["test"].queries
        names = [queries[place].id for place in self.queries]
        return QueryValues(names, self.values, f"{len(names)} queries")

    def in_words(self, answers: dict[str, list[float]]) -> dict[str, str]:
        return {name: f"rank {rank:g}" if rank else "none" for name, (rank,) in answers.items()}

    def predict_step(self, batch: RankingBatch, batch_idx: int) -> dict[str, Tensor]:
        return {"score": self(batch, self.pairs_per_forward)}

    def rank(
        self, query: str, documents: Sequence[str], prior: Sequence[float] | None = None
    ) -> Tensor:
        """Return the scores of documents for a query [n], higher is better.

        Args:
            documents: their texts; a title goes before the text, on a line of its own.
            prior: scores of the first stage, if the model was trained with `prior`.

        Raises:
            ValueError: there are no documents, or the number of prior scores is wrong.
        """
        num_priors = 0 if prior is None else len(prior)
        if not len(documents) or num_priors != len(documents) * self.adds_prior:
            raise ValueError(
                f"rank was given {len(documents)} documents and {num_priors} prior scores; give at "
                f"least one document, and {'one score each' if self.adds_prior else 'no score'}, "
                f"since the ranker was trained with prior={self.adds_prior}."
            )
        texts, size = texts_for(self, documents), len(documents)
        encoding = TextEncoding(self.recipe)
        rows = encoding.rows(encoding.ids_of(texts), [encoding.ids(query)] * size)
        known = [0.0] * size if prior is None else [*map(float, prior)]
        first = torch.tensor(known, device=self.device)
        deviation = first.std(correction=0)
        first = (first - first.mean()) / torch.where(deviation > 0, deviation, 1.0)
        batch: Any = {name: row.to(self.device) for name, row in rows.items()}
        batch["pair_lengths"] = rows["attention_mask"].sum(1).numpy()
        batch |= {"pair_index": torch.arange(size, device=self.device)[None], "prior": first[None]}
        with evaluating(self), torch.no_grad():
            return self(batch, self.pairs_per_forward)[0]

    def _evaluate(self, split: str, batch: RankingBatch) -> SampleResult:
        scores = self(batch, self.pairs_per_forward)
        of_query = self.loss(scores, batch["relevance"].to(scores))
        self.mean_loss.update(of_query * batch["weight"], batch["weight"])
        self.log(f"{split}/loss", self.mean_loss)
        candidates = (batch["relevance"], batch["pair_index"] >= 0, batch["all_relevance"])
        ranked = {
            system: rank_queries(own, *candidates)
            for system, own in {"ranker": scores, **batch.get("baselines", {})}.items()
        }
        for system, own in ranked.items():
            columns = {"id": batch["sample_id"], **values_per_query(own)}
            self.of_systems[system].update(batch["weight"] > 0, **columns)
        first = first_relevant(ranked["ranker"])
        return SampleResult(of_query, {"first relevant": first}, is_wrong=first != 1)

    def _log_means(self, split: str) -> None:
        self.values: dict[str, dict[str, Tensor]] = {}  # system -> metric -> of each query
        for system, gathered in self.of_systems.items():
            if gathered.update_called:  # only a test has baselines
                rows = gathered.take()
                self.queries = rows.id.tolist()
                self.values[system] = {name: getattr(rows, name) for name in DEFAULT_METRICS}
        means = {f"{split}/{name}": own.mean() for name, own in self.values["ranker"].items()}
        log_means(self, means)
