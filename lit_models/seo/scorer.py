"""Text scorer with any number of heads on one encoder, as a LightningModule.

Batch: ScoredTextBatch. Shapes: B texts.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from datamodules.core.batches import ScoredTextBatch
from datamodules.scored.datamodule import ChunkOptions
from datamodules.scored.store import scores_of
from datamodules.text.encoding import TextEncoding
from lit_models.seo.base import TEXTS_AT_ONCE, EncodedTextModule
from lit_models.seo.encoders import TextEncoder
from lit_models.seo.metrics import HeadMetrics, log_means
from lit_models.seo.networks import PREFIX, Head, HeadOptions, TextScorer, baseline
from lit_models.training.metrics import (
    LossSum,
    SampleResult,
    evaluating,
    in_float32,
    texts_for,
)


class LitTextScorer(EncodedTextModule):
    """Any number of heads on one text encoder. Logs each head's loss and measures, and in the test
    those of a baseline that knows only the training labels (`test/baseline_…`).

    Args:
        heads: name -> loss and weight, if they differ from the defaults of the head's kind; the
            data define which heads there are.
        task_weights: `fixed`, or `uncertainty`: loss x exp(-s) + s / 2 with a trained s per head,
            with the loss of `mse` halved (Kendall, Gal, Cipolla 2018), times the fixed weights.
            `val/loss` is always the sum with the fixed weights.
        shared: optimizer, encoder and more, see `EncodedTextModule`.
    """

    monitor: ClassVar[str] = "val/loss"
    uneven_steps: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        heads: dict[str, HeadOptions] | None = None,
        task_weights: Literal["fixed", "uncertainty"] = "fixed",
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        self.head_options, self.task_weights = heads or {}, task_weights

    def meanings(self, recipe: dict[str, Any]) -> dict[str, Any]:
        heads = {n: [facts["kind"], facts["classes"]] for n, facts in recipe["heads"].items()}
        return {**super().meanings(recipe), "heads": heads}

    def make_network(self, encoder: TextEncoder) -> nn.Module:
        declared = self.recipe["heads"]
        if unknown := [name for name in self.head_options if name not in declared]:
            raise ValueError(
                f'model.heads names "{unknown[0]}"; the data has the heads {", ".join(declared)}.'
            )
        self.options = {name: self.head_options.get(name, HeadOptions()) for name in declared}
        metrics = {PREFIX + n: HeadMetrics(facts["kind"]) for n, facts in declared.items()}
        self.metrics = nn.ModuleDict(metrics)  # of the split that is evaluated
        heads = {
            name: Head(facts, self.options[name].loss_of(name, facts["kind"]), encoder.width)
            for name, facts in declared.items()
        }
        return TextScorer(encoder, heads, self.task_weights == "uncertainty")

    def is_same_head(self, name: str, trained: dict[str, Any]) -> bool:
        head = name.split(".")[2].removeprefix(PREFIX)  # network.heads.head_a.output.weight
        here, there = self.recipe["heads"].get(head), trained["heads"].get(head)
        return here and there and all(here[n] == there[n] for n in ("kind", "classes"))

    def forward(self, batch: ScoredTextBatch) -> dict[str, Tensor]:
        """Return head -> outputs [B, P]."""
        return self.network(batch)

    def training_terms(self, batch: ScoredTextBatch) -> dict[str, LossSum]:
        terms = self._terms(self(batch), batch)
        if self.task_weights == "fixed":
            return terms
        for name, (total, count) in terms.items():
            log_variance = in_float32(self.network.log_variances[PREFIX + name][0])
            factor = 0.5 if self._head(name).loss_name == "mse" else 1.0
            total = factor * torch.exp(-log_variance) * total + log_variance / 2 * count
            terms[name] = LossSum(total, count)
        return terms

    def term_weights(self) -> dict[str, float]:
        return {name: options.weight for name, options in self.options.items()}

    def validation_step(self, batch: ScoredTextBatch, batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: ScoredTextBatch, batch_idx: int) -> SampleResult:
        return self._evaluate("test", batch)

    def on_validation_epoch_end(self) -> None:
        self._log_measures("val")

    def on_test_epoch_end(self) -> None:
        self._log_measures("test")

    def in_words(self, answers: dict[str, list[float]]) -> dict[str, str]:
        """As in ExactModule; the columns of a scored file."""
        columns: dict[str, list[Any]] = {}
        for name, values in answers.items():
            columns |= scores_of(name, self.recipe["heads"][name], np.array([values]))
        return {name: str(value) for name, (value,) in columns.items()}

    def predict_step(self, batch: ScoredTextBatch, batch_idx: int) -> dict[str, Tensor]:
        return {n: self._head(n).prediction(values) for n, values in self(batch).items()}

    def score(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Return head -> predictions of texts, float64, as in `Head.prediction`: a number [n, 1],
        or probabilities [n, P] of the classes in `recipe["heads"]`."""
        results, texts = [], texts_for(self, texts)
        encoding, chunks = TextEncoding(self.recipe), ChunkOptions(**self.recipe["chunks"])
        with evaluating(self), torch.no_grad():
            for start in range(0, len(texts), TEXTS_AT_ONCE):
                ids = encoding.ids_of(texts[start : start + TEXTS_AT_ONCE])
                batch: Any = encoding.chunk_rows(ids, chunks.stride, chunks.most)
                batch["weight"] = torch.ones(len(ids))
                batch = self.transfer_batch_to_device(batch, self.device, 0)
                results.append(self.predict_step(batch, 0))
        names = results[0] if results else ()  # without texts, the result is {}
        return {name: torch.cat([each[name].cpu() for each in results]) for name in names}

    def _head(self, name: str) -> Any:
        return self.network.heads[PREFIX + name]

    def _terms(self, outputs: dict[str, Tensor], batch: ScoredTextBatch) -> dict[str, LossSum]:
        targets, known, weight = batch["targets"], batch["is_labelled"], batch["weight"]
        return {
            name: self._head(name).loss(values, targets[name], known[name], weight)
            for name, values in outputs.items()
        }

    def _evaluate(self, split: str, batch: ScoredTextBatch) -> SampleResult:
        outputs, predictions, weighted = self(batch), {}, []
        terms = self._terms(outputs, batch)
        for name, values in outputs.items():
            head, metrics = self._head(name), self.metrics[PREFIX + name]
            metrics.loss.update(*terms[name])
            self.log(f"{split}/loss_{name}", metrics.loss)
            predictions[name] = head.prediction(values)
            target, known = batch["targets"][name], batch["is_labelled"][name]
            of_texts = head.loss_of_texts(values, target, known)
            weighted.append(of_texts * self.options[name].weight)
            metrics.update(predictions[name], target, known, batch)
        return SampleResult(torch.stack(weighted).sum(0), predictions)

    def _log_measures(self, split: str) -> None:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for name, facts in self.recipe["heads"].items():
            metrics: Any = self.metrics[PREFIX + name]
            expected = baseline(facts) if split == "test" else None
            log_means(self, metrics.measure(split, name, expected))
            if metrics.has_labels:  # on any rank; heads without labels do not count
                total = total + self.options[name].weight * metrics.loss.compute()
        log_means(self, {f"{split}/loss": total})
