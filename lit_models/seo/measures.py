"""How well predictions of a head fit its labels: pure functions, in float64.

Shapes: N labelled texts, P predictions of a text, L labels.

Each measure agrees with scikit-learn or scipy. Where one is undefined, the value is that of someone
who knows nothing, and `say` is told: 0 for a correlation or a kappa of constant values, 0.5 for the
AUROC of a single class, 0 for the F1 of a class that is neither there nor predicted. Without any
label there is no such value: NaN, told too.
"""

from collections.abc import Callable

import torch
from torch import Tensor

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
    return _OF_KIND[kind](prediction, target, say)


def _regression(prediction: Tensor, target: Tensor, say: Say) -> dict[str, Tensor]:
    value, column = prediction[:, 0], target[:, 0]
    return {
        "spearman": spearman(value, column, say),
        "pearson": pearson(value, column, say, "pearson"),
        "rmse": ((value - column) ** 2).mean().sqrt(),
        "mae": (value - column).abs().mean(),
    }


def _ordinal(prediction: Tensor, target: Tensor, say: Say) -> dict[str, Tensor]:
    column = target[:, 0]
    expected = prediction @ torch.arange(prediction.shape[1], dtype=torch.float64)
    level = (expected + 0.5).floor()  # the nearest, which makes the quadratic error least
    return {
        "kappa": quadratic_kappa(level, column, say),
        "spearman": spearman(expected, column, say),
        "mae": (level - column).abs().mean(),
    }


def _binary(prediction: Tensor, target: Tensor, say: Say) -> dict[str, Tensor]:
    positive, column = prediction[:, 0], target[:, 0]
    both = torch.stack([1 - positive, positive], 1)
    return {
        "auroc": auroc(positive, column, say, "auroc"),
        "f1": f1(positive >= 0.5, column == 1, say, "f1"),
        "calibration_error": calibration_error(positive, column),
        "log_loss": log_loss(both, column),
    }


def _multiclass(prediction: Tensor, target: Tensor, say: Say) -> dict[str, Tensor]:
    (confidence, chosen), column = prediction.max(1), target[:, 0]
    present = torch.cat([chosen, column.long()]).unique()
    of_classes = [f1(chosen == c, column == c, say, "macro_f1") for c in present.tolist()]
    return {
        "macro_f1": torch.stack(of_classes).mean(),
        "accuracy": (chosen == column).double().mean(),
        "calibration_error": calibration_error(confidence, (chosen == column).double()),
        "log_loss": log_loss(prediction, column),
    }


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


_OF_KIND = {
    "regression": _regression,
    "ordinal": _ordinal,
    "binary": _binary,
    "multiclass": _multiclass,
    "multilabel": _multilabel,
}


def pearson(a: Tensor, b: Tensor, say: Say, name: str) -> Tensor:
    """Return the correlation of [N] and [N], 0 where one of them is constant."""
    a, b = _centred(a), _centred(b)
    scale = a.norm() * b.norm()
    if scale == 0:
        say(name, "predictions or labels are all the same")
        return torch.zeros_like(scale)
    return a @ b / scale


def _centred(values: Tensor) -> Tensor:
    """Return values less their mean, the largest 1 in size; all 0 where they differ by no more
    than rounding."""
    largest = values.abs().max()
    values = values / torch.where(largest > 0, largest, 1.0)  # no unit is too small or too large
    values = values - values.mean()
    spread = values.abs().max()
    return values / spread if spread > 1e-12 else torch.zeros_like(values)


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
