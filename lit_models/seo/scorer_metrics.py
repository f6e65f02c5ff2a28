"""How well a head predicts, from all predictions of a split at once, exact over ranks.

Shapes: N labelled texts, P predictions of a text, L labels.

Predictions are gathered, put in the order of the sample ids and measured in float64, so that any
number of devices gives the same number. Each measure agrees with scikit-learn or scipy. Where one
is undefined, the value is that of someone who knows nothing, and a warning says so: 0 for a
correlation or a kappa of constant values, 0.5 for the AUROC of a single class, 0 for the F1 of a
class that is neither there nor predicted. Without any label there is no such value: NaN, said too.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torchmetrics import Metric

CALIBRATION_BINS = 15
NAMES = {
    "regression": ("spearman", "pearson", "rmse", "mae"),
    "ordinal": ("kappa", "spearman", "mae"),
    "binary": ("auroc", "f1", "calibration_error", "log_loss"),
    "multiclass": ("macro_f1", "accuracy", "calibration_error", "log_loss"),
    "multilabel": ("macro_f1", "macro_auroc"),
}
# What a constant prediction can be judged by.
BASELINE_NAMES = {
    "regression": ("rmse", "mae"),
    "ordinal": ("mae",),
    "binary": ("f1", "log_loss"),
    "multiclass": ("macro_f1", "accuracy", "log_loss"),
    "multilabel": ("macro_f1",),
}
Say = Callable[[str, str], None]  # measure, why it is undefined
log = logging.getLogger(__name__)


def measures(
    kind: str, prediction: Tensor, target: Tensor, say: Say = lambda name, why: None
) -> dict[str, Tensor]:
    """Return every measure of a kind, [] float64 each.

    Args:
        kind: of the head.
        prediction: [N, P] float64, from `Head.prediction`.
        target: [N, L] float64; NaN = missing, which only a multilabel head may have.
        say: takes what is undefined.
    """
    if not len(target):
        for name in NAMES[kind]:
            say(name, "no text of the split has a label")
        return {name: target.new_full((), torch.nan) for name in NAMES[kind]}
    if kind == "multilabel":
        return _multilabel(prediction, target, say)
    column = target[:, 0]
    if kind == "regression":
        value = prediction[:, 0]
        return {
            "spearman": spearman(value, column, say),
            "pearson": pearson(value, column, say, "pearson"),
            "rmse": ((value - column) ** 2).mean().sqrt(),
            "mae": (value - column).abs().mean(),
        }
    if kind == "ordinal":
        expected = prediction @ torch.arange(prediction.shape[1], dtype=torch.float64)
        level = (expected + 0.5).floor()
        return {
            "kappa": quadratic_kappa(level, column, say),
            "spearman": spearman(expected, column, say),
            "mae": (level - column).abs().mean(),
        }
    if kind == "binary":
        positive = prediction[:, 0]
        both = torch.stack([1 - positive, positive], 1)
        return {
            "auroc": auroc(positive, column, say, "auroc"),
            "f1": f1(positive >= 0.5, column == 1, say, "f1"),
            "calibration_error": calibration_error(positive, column),
            "log_loss": log_loss(both, column),
        }
    confidence, chosen = prediction.max(1)
    present = torch.cat([chosen, column.long()]).unique()
    of_classes = [f1(chosen == c, column == c, say, "macro_f1") for c in present.tolist()]
    return {
        "macro_f1": torch.stack(of_classes).mean(),
        "accuracy": (chosen == column).double().mean(),
        "calibration_error": calibration_error(confidence, (chosen == column).double()),
        "log_loss": log_loss(prediction, column),
    }


def pearson(a: Tensor, b: Tensor, say: Say, name: str) -> Tensor:
    """Return the correlation of [N] and [N], 0 where one of them is constant."""
    a, b = a - a.mean(), b - b.mean()
    scale = (a @ a).sqrt() * (b @ b).sqrt()
    if scale <= 1e-12 * max(1, len(a)) or len(a) < 2:
        say(name, "predictions or labels are all the same")
        return torch.zeros_like(scale)
    return a @ b / scale


def spearman(a: Tensor, b: Tensor, say: Say) -> Tensor:
    """Return the correlation of ranks."""
    return pearson(ranks(a), ranks(b), say, "spearman")


def ranks(values: Tensor) -> Tensor:
    """Return ranks from 1, [N] float64; equal values share the mean of theirs."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() - 1) / 2)[inverse]


def quadratic_kappa(level: Tensor, target: Tensor, say: Say) -> Tensor:
    """Return Cohen's kappa with quadratic weights (Cohen 1968) of levels [N]."""
    observed = ((level - target) ** 2).mean()
    by_chance = (
        level.var(correction=0) + target.var(correction=0) + (level.mean() - target.mean()) ** 2
    )
    if by_chance == 0:
        say("kappa", "predictions and labels are all one level")
        return torch.zeros_like(observed)
    return 1 - observed / by_chance


def auroc(score: Tensor, target: Tensor, say: Say, name: str) -> Tensor:
    """Return the chance that a positive has a higher score than a negative, ties a half."""
    is_positive = target == 1
    positives = is_positive.double().sum()
    negatives = len(target) - positives
    if positives == 0 or negatives == 0:
        say(name, "the labels are of a single class")
        return torch.full_like(positives, 0.5)
    above = ranks(score)[is_positive].sum() - positives * (positives + 1) / 2
    return above / (positives * negatives)


def f1(predicted: Tensor, is_true: Tensor, say: Say, name: str) -> Tensor:
    """Return the F1 of a class, [N] bool each."""
    both = (predicted & is_true).double().sum()
    total = predicted.double().sum() + is_true.double().sum()
    if total == 0:
        say(name, "a class is neither there nor predicted")
    return 2 * both / total.clamp(min=1)


def calibration_error(confidence: Tensor, is_hit: Tensor) -> Tensor:
    """Return the mean distance of confidence from the share of hits over equal bins, weighted by
    their counts (Guo et al. 2017)."""
    bins = (confidence * CALIBRATION_BINS).long().clamp(0, CALIBRATION_BINS - 1)
    distance = torch.zeros(CALIBRATION_BINS, dtype=torch.float64)
    distance.index_add_(0, bins, confidence - is_hit)
    return distance.abs().sum() / len(confidence)


def log_loss(probabilities: Tensor, target: Tensor) -> Tensor:
    """Return the mean nats of the true class; a probability of 0 counts as the smallest number."""
    chosen = probabilities.gather(1, target.long()[:, None])
    return -chosen.clamp(min=torch.finfo(torch.float64).tiny).log().mean()


class HeadOutputs(Metric):
    """Predictions and labels of one head over a split, and every measure of them.

    Args:
        kind: of the head.
        label: name of the head in warnings; none says nothing.
    """

    full_state_update = False
    sample_id: list[Tensor]
    prediction: list[Tensor]
    target: list[Tensor]

    def __init__(self, kind: str, label: str | None = None) -> None:
        super().__init__()
        self.kind, self.label = kind, label
        for name in ("sample_id", "prediction", "target"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def set_dtype(self, dst_type: torch.dtype | str) -> "HeadOutputs":
        """Keep float64 whatever the precision of the module."""
        return self

    def update(
        self, prediction: Tensor, target: Tensor, is_labelled: Tensor, batch: dict[str, Any]
    ) -> None:
        """Add a batch: predictions [B, P], labels [B] or [B, L], which of them are there, and
        `sample_id` and `weight` of the batch. A batch without any still adds an empty row set, so
        that a rank which never had one takes part in the gathering."""
        target, is_labelled = target.reshape(len(target), -1), is_labelled.reshape(len(target), -1)
        kept = is_labelled.any(1) & (batch["weight"] > 0)
        self.sample_id.append(batch["sample_id"][kept])
        self.prediction.append(prediction.detach().double()[kept])
        self.target.append(target.double().masked_fill(~is_labelled, torch.nan)[kept])

    def compute(self) -> dict[str, Tensor]:
        """Return each measure, [] float64."""
        order = _joined(self.sample_id).cpu().argsort()
        prediction, target = _joined(self.prediction).cpu(), _joined(self.target).cpu()
        found = measures(self.kind, prediction[order], target[order], self._say)
        return {name: value.to(self.device) for name, value in found.items()}

    def _say(self, name: str, why: str) -> None:
        if self.label is not None:
            _warn(f"{self.label}_{name} is undefined: {why}.")


class Figure(Metric):
    """One measure of a head's outputs, as Lightning logs single numbers."""

    full_state_update = False

    def __init__(self, outputs: HeadOutputs, name: str) -> None:
        super().__init__()
        self._outputs, self._name = [outputs], name  # in a list: it is no part of this metric

    def update(self) -> None:
        """Nothing: the outputs are updated."""

    def compute(self) -> Tensor:
        """Return the measure, [] float64."""
        return self._outputs[0].compute()[self._name]

    def reset(self) -> None:
        """Forget the outputs, too."""
        super().reset()
        for outputs in getattr(self, "_outputs", []):
            outputs.reset()


class HeadMetrics(nn.Module):
    """The measures of one head over a split.

    Args:
        kind: of the head.
        label: how it is called in warnings; none says nothing.
        names: measures that are logged; none is all of the kind.
    """

    def __init__(
        self, kind: str, label: str | None = None, names: tuple[str, ...] | None = None
    ) -> None:
        super().__init__()
        self.outputs = HeadOutputs(kind, label)
        wanted = NAMES[kind] if names is None else names
        self.figures = nn.ModuleDict({name: Figure(self.outputs, name) for name in wanted})

    def update(
        self, prediction: Tensor, target: Tensor, is_labelled: Tensor, batch: dict[str, Any]
    ) -> None:
        """Add a batch, see `HeadOutputs.update`."""
        self.outputs.update(prediction, target, is_labelled, batch)
        for figure in self.figures.values():
            figure.update()


class WeightedLoss(Metric):
    """The sum of the heads' mean losses times their weights, as training adds them up."""

    full_state_update = False
    totals: Tensor
    counts: Tensor

    def __init__(self, weights: dict[str, float]) -> None:
        super().__init__()
        self.weights = weights
        zeros = torch.zeros(len(weights), dtype=torch.float64)
        self.add_state("totals", zeros, dist_reduce_fx="sum")
        self.add_state("counts", zeros.clone(), dist_reduce_fx="sum")

    def set_dtype(self, dst_type: torch.dtype | str) -> "WeightedLoss":
        """Keep float64 whatever the precision of the module."""
        return self

    def update(self, terms: dict[str, Any]) -> None:
        """Add a batch: head -> LossSum, in the order of the weights."""
        self.totals = self.totals + torch.stack([terms[n].total.double() for n in self.weights])
        self.counts = self.counts + torch.stack([terms[n].count.double() for n in self.weights])

    def compute(self) -> Tensor:
        """Return the loss, [] float64; a head without labels adds 0."""
        weights = torch.tensor(list(self.weights.values())).to(self.totals)
        return (weights * self.totals / self.counts.clamp(min=1)).sum()


def _multilabel(prediction: Tensor, target: Tensor, say: Say) -> dict[str, Tensor]:
    scores, areas = [], []
    for label in range(target.shape[1]):
        known = ~target[:, label].isnan()
        chance, truth = prediction[known, label], target[known, label]
        scores.append(f1(chance >= 0.5, truth == 1, say, "macro_f1"))
        if truth.unique().numel() == 2:
            areas.append(auroc(chance, truth, say, "macro_auroc"))
        else:
            say("macro_auroc", f"label {label} is of a single class and left out")
    area = torch.stack(areas).mean() if areas else target.new_full((), 0.5)
    return {"macro_f1": torch.stack(scores).mean(), "macro_auroc": area}


def _joined(parts: Any) -> Tensor:
    return parts if isinstance(parts, Tensor) else torch.cat(parts)


@rank_zero_only
def _warn(message: str) -> None:
    log.warning(message)
