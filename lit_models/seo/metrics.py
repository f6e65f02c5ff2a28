"""Metrics of rankings, per query and as means, and of scored texts, exact over ranks.

Shapes: B queries or texts, K candidates of a query, J judged documents of a query, P predictions,
L labels. Definitions of rankings are those of trec_eval 9 (NDCG of Järvelin & Kekäläinen 2002, with
log2(rank + 1) as the discount of every rank):

- A candidate without a judgement counts as not relevant, and so does a grade of 0 or below.
- The ideal ranking and the number of relevant documents are those of **all** judged documents, so
  that a relevant document that no candidate is lowers NDCG, MAP and recall.
- precision@k divides by k, also where there are fewer candidates.
- A query that has judgements but no relevant document scores 0; one without judgements is not
  evaluated at all.
- Ties: equal scores are ordered by the document's index, the smaller first (by the candidate's
  position where no index is given). That depends on nothing but the query, and so is equal on any
  number of devices and in any order of candidates. (trec_eval takes the larger identifier first.)
- A query with a score that is no number has the value NaN: it cannot pass for a good ranking.

Scores agree with scikit-learn and scipy. Where one is undefined, the value is that of someone who
knows nothing, and `say` is told: 0 for a correlation or a kappa of constant values, 0.5 for the
AUROC of a single class, 0 for the F1 of a class that is neither there nor predicted. Without any
label there is no such value: NaN, told too. Predictions are gathered, put in the order of the
sample ids and measured in float64, so that any number of devices gives the same number.
"""

import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from lit_models.training.metrics import SumCount

Gain = Literal["linear", "exponential"]
DEFAULT_METRICS = ("ndcg@1", "ndcg@5", "ndcg@10", "mrr@10", "map", "recall@100")
BOOTSTRAP_ROWS = 4_000_000  # numbers drawn at once: 32 MB


class RankedQueries(NamedTuple):
    """Queries whose candidates are in the order of their scores."""

    relevance: Tensor  # [B, K] float64, grade at each rank; 0 = not relevant, unjudged or none
    ideal: Tensor  # [B, J] float64, grades of all judged documents, descending, at least 0
    is_evaluated: Tensor  # [B] bool, the query has judgements


def rank_queries(
    scores: Tensor,
    relevance: Tensor,
    is_candidate: Tensor,
    all_relevance: Tensor,
    document: Tensor | None = None,
) -> RankedQueries:
    """Put the candidates of each query in order.

    Args:
        scores: [B, K], the higher the better.
        relevance: [B, K] grades; nan = unjudged.
        is_candidate: [B, K] bool, false where a query has fewer candidates.
        all_relevance: [B, J] grades of every judged document, whether it is a candidate or not;
            nan or below 0 = none, so that a judgement below 0 is given as 0.
        document: [B, K] int64, what decides ties; the candidate's position where not given.
    """
    scores = scores.detach().double()
    order = ranking(scores, is_candidate, document)
    grades = relevance.double().nan_to_num(nan=0.0).clamp(min=0).masked_fill(~is_candidate, 0)
    is_wrong = (scores.isnan() & is_candidate).any(1, keepdim=True)
    judged = all_relevance.double()
    return RankedQueries(
        relevance=grades.gather(1, order).masked_fill(is_wrong, torch.nan),
        ideal=judged.nan_to_num(nan=0.0).clamp(min=0).sort(dim=1, descending=True).values,
        is_evaluated=(judged >= 0).any(1),
    )


def ranking(scores: Tensor, is_candidate: Tensor, document: Tensor | None = None) -> Tensor:
    """Return the candidates of each query, the best first and those that are none last.

    Args:
        scores, is_candidate, document: as for `rank_queries`.

    Returns:
        [B, K] int64, positions in `scores`.
    """
    if document is None:
        order = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
    else:
        order = document.argsort(dim=1, stable=True)
    # Sorts that keep the order of equals, the least important first.
    order = order.gather(1, scores.gather(1, order).argsort(dim=1, descending=True, stable=True))
    is_none = (~is_candidate).gather(1, order).byte()
    return order.gather(1, is_none.argsort(dim=1, stable=True))


def ndcg(ranked: RankedQueries, k: int | None = None, gain: Gain = "linear") -> Tensor:
    """Return the discounted gain of the first k over that of the ideal ranking, [B] float64.

    Args:
        ranked: queries in order.
        k: ranks that count; all where not given.
        gain: of grade g: g, or 2**g - 1 (Burges et al. 2005).
    """
    gained, best = _discounted(ranked.relevance, k, gain), _discounted(ranked.ideal, k, gain)
    return _ratio(gained, best)


def reciprocal_rank(
    ranked: RankedQueries, k: int | None = None, relevant_above: float = 0.0
) -> Tensor:
    """Return 1 / rank of the first relevant document, 0 where none is in the first k; [B] float64.

    Args:
        ranked: queries in order.
        k: ranks that count; all where not given.
        relevant_above: grades above it are relevant.
    """
    hits = _hits(ranked.relevance, k, relevant_above)
    if hits.shape[1] == 0:
        return hits.sum(1)
    return (hits / _ranks(hits)).amax(1)


def first_relevant(ranked: RankedQueries, relevant_above: float = 0.0) -> Tensor:
    """Return the rank of the first relevant document from 1, 0 where none is ranked; [B] int64."""
    hits = _hits(ranked.relevance, None, relevant_above) > 0
    if hits.shape[1] == 0:
        return hits.sum(1)
    return torch.where(hits.any(1), hits.byte().argmax(1) + 1, 0)


def average_precision(
    ranked: RankedQueries, k: int | None = None, relevant_above: float = 0.0
) -> Tensor:
    """Return the precision at each relevant document, summed, over the number of all relevant
    documents, [B] float64. Arguments as for `reciprocal_rank`."""
    hits = _hits(ranked.relevance, k, relevant_above)
    precisions = hits.cumsum(1) / _ranks(hits)
    return _ratio((precisions * hits).sum(1), _num_relevant(ranked, relevant_above))


def recall(ranked: RankedQueries, k: int | None = None, relevant_above: float = 0.0) -> Tensor:
    """Return the share of all relevant documents that is among the first k, [B] float64.

    Arguments as for `reciprocal_rank`."""
    found = _hits(ranked.relevance, k, relevant_above).sum(1)
    return _ratio(found, _num_relevant(ranked, relevant_above))


def precision(ranked: RankedQueries, k: int, relevant_above: float = 0.0) -> Tensor:
    """Return the share of relevant documents in the first k ranks, [B] float64.

    Arguments as for `reciprocal_rank`."""
    return _hits(ranked.relevance, k, relevant_above).sum(1) / k


class RankingMetrics(nn.ModuleDict):
    """Means over queries; every entry is a SumCount that is logged under its name.

    Args:
        names: `ndcg`, `mrr`, `map`, `recall`, `precision`, each with `@k` where only k ranks count.
        gain: of NDCG.
        relevant_above: grades above it are relevant, for all but NDCG.

    Raises:
        ValueError: a name that is none of these.
    """

    def __init__(
        self,
        names: Sequence[str] = DEFAULT_METRICS,
        gain: Gain = "linear",
        relevant_above: float = 0.0,
    ) -> None:
        super().__init__()
        self._measures = {name: measure(name, gain, relevant_above) for name in names}
        for name in names:
            self[name] = SumCount()

    def update(self, ranked: RankedQueries, weight: Tensor) -> None:
        """Add a batch.

        Args:
            ranked: its queries in order.
            weight: [B], 0 for a filler.
        """
        counted = weight.double() * ranked.is_evaluated
        for name, values in self.per_query(ranked).items():
            # Zero times a value that is no number would be one that is none.
            self[name].update(values.where(counted > 0, 0.0) * counted, counted)

    def per_query(self, ranked: RankedQueries) -> dict[str, Tensor]:
        """Return each metric of each query, [B] float64; without meaning where it is not
        evaluated."""
        return {name: measured(ranked) for name, measured in self._measures.items()}


def measure(name: str, gain: Gain, relevant_above: float) -> Callable[[RankedQueries], Tensor]:
    """Return the function that a name such as `ndcg@10` stands for.

    Raises:
        ValueError: there is none of that name, or its ranks are not a number above 0.
    """
    parts = re.fullmatch(r"(ndcg|mrr|map|recall|precision)(?:@([1-9]\d*))?", name)
    if parts is None or (parts[1] == "precision" and parts[2] is None):
        raise ValueError(
            f"metric {name!r} is unknown; write ndcg, mrr, map, recall or precision, with @ and a "
            "number of ranks above 0 (precision always), such as ndcg@10."
        )
    kind, k = parts[1], None if parts[2] is None else int(parts[2])
    if kind == "ndcg":
        return partial(ndcg, k=k, gain=gain)  # which `ddp_spawn` can send, unlike a lambda
    if k is not None and kind == "precision":
        return partial(precision, k=k, relevant_above=relevant_above)
    of_hits = {"mrr": reciprocal_rank, "map": average_precision, "recall": recall}
    return partial(of_hits[kind], k=k, relevant_above=relevant_above)


def paired_bootstrap(
    a: np.ndarray, b: np.ndarray, seed: int, num: int = 10_000, confidence: float = 0.95
) -> tuple[float, float, float]:
    """Return the mean of a - b over queries and its percentile interval (low, high).

    Queries are drawn with replacement, both systems' values of a query together (Sakai 2006). The
    same seed gives the same interval.

    Args:
        a, b: [Q] values of the same queries in the same order.
        seed: of the drawing.
        num: samples drawn.
        confidence: share of the samples inside the interval.

    Raises:
        ValueError: the values are not of the same queries, none, or not finite.
    """
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or not a.size:
        raise ValueError(
            f"values of shapes {a.shape} and {b.shape} cannot be paired; give one value per query "
            "for both systems, and at least one query."
        )
    difference = a - b
    if not np.isfinite(difference).all():
        wrong = int(np.flatnonzero(~np.isfinite(difference))[0])
        raise ValueError(
            f"query {wrong} has the values {a[wrong]} and {b[wrong]}, which must be finite; leave "
            "queries out that were not evaluated."
        )
    generator, size = np.random.default_rng(seed), difference.size
    rows = max(1, BOOTSTRAP_ROWS // size)
    means = [
        difference[generator.integers(size, size=(min(rows, num - start), size))].mean(1)
        for start in range(0, num, rows)
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(difference.mean()), float(low), float(high)


def _discounted(grades: Tensor, k: int | None, gain: Gain) -> Tensor:
    grades = grades[:, :k]
    gains = grades if gain == "linear" else grades.exp2() - 1
    return (gains / (_ranks(grades) + 1).log2()).sum(1)


def _hits(grades: Tensor, k: int | None, relevant_above: float) -> Tensor:
    grades = grades[:, :k]
    return (grades > relevant_above).double().where(~grades.isnan(), torch.nan)


def _num_relevant(ranked: RankedQueries, relevant_above: float) -> Tensor:
    return (ranked.ideal > relevant_above).double().sum(1)


def _ranks(grades: Tensor) -> Tensor:
    return torch.arange(1, grades.shape[1] + 1, dtype=torch.float64, device=grades.device)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, 0 where there is no whole."""
    return torch.where(whole > 0, part / whole.clamp(min=1e-300), part * 0)


class QueryValues(Metric):
    """The metrics of each query, M of them."""

    full_state_update = False
    sample_id: list[Tensor]
    values: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sample_id", [], dist_reduce_fx="cat")
        self.add_state("values", [], dist_reduce_fx="cat")

    def set_dtype(self, dst_type: torch.dtype | str) -> "QueryValues":
        """Keep float64 whatever the precision of the module."""
        return self

    def update(self, sample_id: Tensor, values: dict[str, Tensor], is_counted: Tensor) -> None:
        """Add a batch. Args: sample_id [B] int64; values, name -> [B]; is_counted [B] bool."""
        self.sample_id.append(sample_id[is_counted])
        self.values.append(torch.stack(list(values.values()), 1).double()[is_counted])

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return the sample ids [N] int64, ascending, and values [N, M] float64."""
        sample_id, order = dim_zero_cat(self.sample_id).sort()
        return sample_id, dim_zero_cat(self.values)[order]


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


log = logging.getLogger(__name__)


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


def _joined(parts: Any) -> Tensor:
    return parts if isinstance(parts, Tensor) else torch.cat(parts)


@rank_zero_only
def _warn(message: str) -> None:
    log.warning(message)
