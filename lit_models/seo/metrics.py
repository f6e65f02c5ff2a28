"""Metrics of rankings, per query and as means, and of scored texts, exact over ranks.

Shapes: B queries or texts, K candidates of a query, J judged documents of a query, P predictions,
L labels. Definitions of rankings are those of trec_eval 9 (NDCG of Järvelin & Kekäläinen 2002, with
log2(rank + 1) as the discount of every rank):

- A candidate without a judgement counts as not relevant, and so does a grade of 0 or below.
- The ideal ranking and the number of relevant documents are those of **all** judged documents, so
  that a relevant document that no candidate is lowers NDCG, MAP and recall.
- A query that has judgements but no relevant document scores 0; one without is in no part.
- Ties: equal scores keep the order of the candidates, which is that of the documents' indices, on
  any number of devices. (trec_eval takes the larger identifier first.)
- A query with a score that is no number has the value NaN: it cannot pass for a good ranking.

Scores of heads are those of scikit-learn and scipy, in float64 over all predictions in the order of
the sample ids. Where one is undefined, a warning says so and the value is that of someone who knows
nothing: 0 for a correlation or a kappa of constant values, 0.5 for the AUROC of a single class, 0
for the F1 of a label that is neither there nor predicted (of several classes such ones do not
count). Without any label, or with predictions that are no numbers, it is NaN.
"""

import json
import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from datamodules.core.store import write_whole
from datamodules.files.tables import write_table
from lit_models.training.metrics import SumCount

log = logging.getLogger(__name__)
DEFAULT_METRICS = ("ndcg@1", "ndcg@5", "ndcg@10", "mrr@10", "map", "recall@100")
BOOTSTRAP_ROWS = 4_000_000  # numbers drawn at once: 32 MB


class RankedQueries(NamedTuple):
    """Queries whose candidates are in the order of their scores."""

    relevance: Tensor  # [B, K] float64, grade at each rank; 0 = not relevant, unjudged or none
    ideal: Tensor  # [B, J] float64, grades of all judged documents, descending, at least 0


def rank_queries(
    scores: Tensor, relevance: Tensor, is_candidate: Tensor, all_relevance: Tensor
) -> RankedQueries:
    """Put the candidates of each query in order.

    Args:
        scores: [B, K], the higher the better.
        relevance: [B, K] grades; nan = unjudged.
        is_candidate: [B, K] bool, false where a query has fewer candidates.
        all_relevance: [B, J] grades of every judged document, whether it is a candidate or not;
            nan = none.
    """
    scores = scores.detach().double()
    # Sorts that keep the order of equals, the least important first.
    order = scores.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, (~is_candidate).gather(1, order).byte().argsort(dim=1, stable=True))
    grades = relevance.double().nan_to_num(nan=0.0).clamp(min=0).masked_fill(~is_candidate, 0)
    is_wrong = (scores.isnan() & is_candidate).any(1, keepdim=True)
    judged = all_relevance.double().nan_to_num(nan=0.0).clamp(min=0)
    return RankedQueries(
        relevance=grades.gather(1, order).masked_fill(is_wrong, torch.nan),
        ideal=judged.sort(dim=1, descending=True).values,
    )


def ndcg(ranked: RankedQueries, k: int | None = None) -> Tensor:
    """Return the discounted grades of the first k ranks, or of all, over those of the ideal
    ranking, [B] float64."""
    gained, best = (
        (grades[:, :k] / (_ranks(grades[:, :k]) + 1).log2()).sum(1)
        for grades in (ranked.relevance, ranked.ideal)
    )
    return _ratio(gained, best)


def reciprocal_rank(ranked: RankedQueries, k: int | None = None) -> Tensor:
    """Return 1 / rank of the first relevant document, 0 where none is in the first k; [B]."""
    hits = _hits(ranked, k)
    return (hits / _ranks(hits)).amax(1) if hits.shape[1] else hits.sum(1)


def first_relevant(ranked: RankedQueries) -> Tensor:
    """Return the rank of the first relevant document from 1, 0 where none is ranked; [B] int64."""
    hits = _hits(ranked, None) > 0
    return torch.where(hits.any(1), hits.byte().argmax(1) + 1, 0) if hits.shape[1] else hits.sum(1)


def average_precision(ranked: RankedQueries, k: int | None = None) -> Tensor:
    """Return the precision at each relevant document of the first k, summed, over the number of
    all relevant documents, [B] float64."""
    hits = _hits(ranked, k)
    precisions = hits.long().cumsum(1) / _ranks(hits)
    return _ratio((precisions * hits).sum(1), (ranked.ideal > 0).double().sum(1))


def recall(ranked: RankedQueries, k: int | None = None) -> Tensor:
    """Return the share of all relevant documents that is among the first k, [B] float64."""
    return _ratio(_hits(ranked, k).sum(1), (ranked.ideal > 0).double().sum(1))


def _hits(ranked: RankedQueries, k: int | None) -> Tensor:
    grades = ranked.relevance[:, :k]
    return (grades > 0).double().where(~grades.isnan(), torch.nan)


def _ranks(grades: Tensor) -> Tensor:
    return torch.arange(1, grades.shape[1] + 1, dtype=torch.float64, device=grades.device)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole, 0 where there is no whole."""
    return torch.where(whole > 0, part / whole.clamp(min=1e-300), part * 0)


MEASURES = {"ndcg": ndcg, "mrr": reciprocal_rank, "map": average_precision, "recall": recall}


def measure(name: str) -> Callable[[RankedQueries], Tensor]:
    """Return the function that a name stands for: a key of MEASURES, also with its ranks, as in
    `ndcg@10`."""
    key, _, ranks = name.partition("@")
    return partial(MEASURES[key], k=int(ranks) if ranks else None)


class RankingMetrics(nn.ModuleDict):
    """Means over queries; every entry is a SumCount that is logged under its name, of `measure`."""

    def __init__(self, names: Sequence[str] = DEFAULT_METRICS) -> None:
        super().__init__()
        for name in names:
            self[name] = SumCount()

    def update(self, ranked: RankedQueries, weight: Tensor) -> None:
        """Add a batch of queries in order. Args: weight [B], 0 for a filler."""
        for name, values in self.per_query(ranked).items():
            # Zero times a value that is no number would be one that is none.
            self[name].update(values.where(weight > 0, 0.0) * weight, weight)

    def per_query(self, ranked: RankedQueries) -> dict[str, Tensor]:
        """Return each metric of each query, [B] float64."""
        return {name: measure(name)(ranked) for name in self}


class GatheredRows(Metric):
    """Rows of a split, such as vectors or predictions, in the order of their ids, of the columns
    `id` and others of these names; of all ranks, or of this one."""

    def __init__(self, *names: str, gathers: bool = True) -> None:
        super().__init__(sync_on_compute=gathers)
        self.names = ("id", *names)
        for name in self.names:
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, is_counted: Tensor, **columns: Tensor) -> None:
        """Add rows [B, …] of each column, `id` int64 among them, but those that are not counted, of
        fillers; a batch without any still takes part in the gathering."""
        for name in self.names:
            getattr(self, name).append(columns[name].detach()[is_counted])

    def compute(self) -> SimpleNamespace:
        """Return the columns by name. (Of a dict torchmetrics would squeeze single rows.)"""
        order = dim_zero_cat(self.id).argsort()
        return SimpleNamespace(**{n: dim_zero_cat(getattr(self, n))[order] for n in self.names})

    def take(self) -> SimpleNamespace:
        """Return the columns, and forget them."""
        rows = self.compute()
        self.reset()
        return rows


def paired_bootstrap(
    a: np.ndarray, b: np.ndarray, seed: int, num: int = 10_000
) -> tuple[float, float, float]:
    """Return the mean of a - b over queries and its 95 % percentile interval (low, high).

    Queries are drawn with replacement, both systems' values of a query together (Sakai 2006).

    Args:
        a, b: [Q] values of the same queries in the same order; NaN gives NaN.
        num: samples drawn.
    """
    difference = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    generator, size = np.random.default_rng(seed), difference.size
    rows = max(1, BOOTSTRAP_ROWS // size)
    means = [
        difference[generator.integers(size, size=(min(rows, num - start), size))].mean(1)
        for start in range(0, num, rows)
    ]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(difference.mean()), float(low), float(high)


class QueryValues(NamedTuple):
    """Values of the queries of an evaluation."""

    queries: list[str]  # ids, in the order of the values
    # System -> metric -> value of each query [Q], the module's own first.
    systems: dict[str, dict[str, np.ndarray]]
    title: str  # of the table
    notes: Sequence[str] = ()  # below the table
    # Rows of errors-SPLIT.csv; None where another callback writes them.
    errors: list[list[str]] | None = None


BASELINES = ("first", "bm25")  # systems that others are compared with
WIDTH = 80
SEED = 0  # of the bootstrap: the same values give the same intervals


class QueryTable(Callback):
    """Prints the systems of an evaluation and writes ranking-SPLIT.json and queries-SPLIT.csv.

    The module gives them by `query_values(split)`. In the json: `queries`, their number; `systems`,
    system -> metric -> mean; `differences`, "SYSTEM - BASELINE" -> metric -> mean, low and high of
    a 95 % interval of a paired bootstrap over queries. The csv has a row per query and system.
    """

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer, pl_module, "val")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._show(trainer, pl_module, "val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer, pl_module, "test")

    def _show(self, trainer: Trainer, module: Any, split: str) -> None:
        values: QueryValues | None = module.query_values(split)  # a collective: on every rank
        if not trainer.is_global_zero or values is None or not values.queries:
            return
        folder, content = Path(trainer.default_root_dir), summary(values.systems)
        write_whole(folder / f"ranking-{split}.json", json.dumps(content, indent=1) + "\n")
        rows = [["query", "system", *next(iter(values.systems.values()))]]
        for place, query in enumerate(values.queries):
            for system, metrics in values.systems.items():
                rows.append([query, system, *(repr(float(m[place])) for m in metrics.values())])
        write_table(folder / f"queries-{split}.csv", rows)
        table = shown_systems(content, f"{split}: {values.title}", values.notes)
        Console(width=WIDTH, highlight=False).print(table)
        if values.errors is not None:
            path = folder / f"errors-{split}.csv"
            write_table(path, values.errors)
            if split == "test":
                print(f"errors: {path} ({len(values.errors) - 1} queries, the worst first)")


def summary(systems: dict[str, dict[str, np.ndarray]]) -> dict[str, Any]:
    """Return the content of ranking-SPLIT.json. Args: system -> metric -> values [Q]."""
    pairs = [(s, b) for b in BASELINES if b in systems for s in systems if s not in BASELINES]
    return {
        "queries": len(next(iter(next(iter(systems.values())).values()))),
        "systems": {
            system: {metric: float(values.mean()) for metric, values in metrics.items()}
            for system, metrics in systems.items()
        },
        "differences": {
            f"{system} - {baseline}": {
                metric: paired_bootstrap(values, systems[baseline][metric], SEED)
                for metric, values in systems[system].items()
            }
            for system, baseline in pairs
        },
    }


def shown_systems(content: dict[str, Any], title: str, notes: Sequence[str]) -> Table:
    """Return the table of a `summary` for a terminal of 80 columns."""
    if content["differences"]:
        notes = ["differences: 95 % over queries", *notes]
    table = Table(title=title, caption="\n".join(notes), box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("metric")
    for name in (*content["systems"], *content["differences"]):
        table.add_column(name, justify="right")
    for metric in next(iter(content["systems"].values())):
        means = [f"{metrics[metric]:.3f}" for metrics in content["systems"].values()]
        spans = [
            "{:+.3f} [{:+.2f} {:+.2f}]".format(*metrics[metric]).replace("0.", ".")
            for metrics in content["differences"].values()
        ]
        table.add_row(metric, *means, *spans)
    return table


CALIBRATION_BINS = 15
NAMES = {
    "regression": ("spearman", "pearson", "rmse", "mae"),
    "ordinal": ("kappa", "spearman", "mae"),
    "binary": ("auroc", "f1", "calibration_error", "log_loss"),
    "multiclass": ("macro_f1", "accuracy", "calibration_error", "log_loss"),
    "multilabel": ("macro_f1", "macro_auroc"),
}
BASELINE = "baseline_"  # before the names of the same measures of a baseline
UNKNOWN = {"auroc": 0.5, "macro_auroc": 0.5}  # of someone who knows nothing; else 0


class HeadMetrics(nn.Module):
    """The mean loss of one head over a split, which the module adds, and its measures."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.loss = kind, SumCount()
        self.rows = GatheredRows("prediction", "target")
        names = [label + name for label in ("", BASELINE) for name in NAMES[kind]]
        self.figures = nn.ModuleDict({name: SumCount() for name in names})

    def update(
        self, prediction: Tensor, target: Tensor, is_labelled: Tensor, batch: dict[str, Any]
    ) -> None:
        """Add a batch.

        Args:
            prediction: [B, P], from `Head.prediction`.
            target, is_labelled: [B] or [B, L].
            batch: with `sample_id` and `weight`.
        """
        target, is_labelled = target.reshape(len(target), -1), is_labelled.reshape(len(target), -1)
        self.rows.update(
            is_labelled.any(1) & (batch["weight"] > 0),
            id=batch["sample_id"],
            prediction=prediction.double(),
            target=target.double().masked_fill(~is_labelled, torch.nan),
        )

    def measure(self, split: str, head: str, expected: Tensor | None = None) -> dict[str, Any]:
        """Return label -> what is logged, and begin anew; a collective. `expected` [P] float64 is
        the prediction of someone who has read no text: a baseline."""
        rows = self.rows.take()
        self.has_labels = len(rows.target) > 0
        predictions, target = {"": rows.prediction.cpu().numpy()}, rows.target.cpu().numpy()
        if expected is not None:
            predictions[BASELINE] = expected.expand(len(target), -1).numpy()
        one, logged = torch.ones((), dtype=torch.float64, device=rows.target.device), {}
        for start, prediction in predictions.items():
            for name, (value, why) in measures(self.kind, prediction, target).items():
                if why and not start:
                    rank_zero_only(log.warning)(f"{split}/{head}_{name} is undefined: {why}.")
                figure = self.figures[start + name]
                figure.update(one * value, one)
                logged[f"{split}/{start}{head}_{name}"] = figure
        return logged


def measures(
    kind: str, prediction: np.ndarray, target: np.ndarray
) -> dict[str, tuple[float, str | None]]:
    """Return every measure of a kind, and why it is undefined where it is.

    Args:
        prediction: [N, P] float64, from `Head.prediction`.
        target: [N, L] float64; NaN = missing, which only a multilabel head may have.
    """
    if not len(target):
        return dict.fromkeys(NAMES[kind], (np.nan, "no text of the split has a label"))
    if not np.isfinite(prediction).all():
        return dict.fromkeys(NAMES[kind], (np.nan, "predictions are no numbers"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of undefined values, which are told in our own words
        values = _values(kind, prediction, target)
    why = "predictions or labels are all the same"
    found: dict[str, tuple[float, str | None]] = {
        name: (UNKNOWN.get(name, 0.0), why) if np.isnan(value) else (float(value), None)
        for name, value in values.items()
    }
    if kind == "multilabel":
        single = [str(n) for n, own in enumerate(target.T) if len(np.unique(own[own >= 0])) < 2]
        if single:
            why = f"labels of a single class are left out: {', '.join(single)}"
            found["macro_auroc"] = (found["macro_auroc"][0], why)
    return found


def _values(kind: str, prediction: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """Return every measure of a kind, NaN where it is undefined."""
    from scipy import stats  # these two take a second to import
    from sklearn import metrics as sk

    column = target[:, 0]
    if kind == "multilabel":
        columns = zip(target.T, prediction.T, strict=True)
        pairs = [(t[~np.isnan(t)], chances[~np.isnan(t)]) for t, chances in columns]
        areas = [sk.roc_auc_score(*pair) for pair in pairs if len(np.unique(pair[0])) == 2]
        f1s = [sk.f1_score(labels, chances >= 0.5, zero_division=0) for labels, chances in pairs]
        return {"macro_f1": np.mean(f1s), "macro_auroc": np.mean(areas) if areas else np.nan}
    if kind == "regression":
        value = prediction[:, 0]
        return {
            "spearman": stats.spearmanr(value, column).statistic,
            "pearson": stats.pearsonr(value, column).statistic if len(column) > 1 else np.nan,
            "rmse": sk.root_mean_squared_error(column, value),
            "mae": sk.mean_absolute_error(column, value),
        }
    levels = np.arange(prediction.shape[1])
    if kind == "ordinal":
        expected = prediction @ levels
        level = np.floor(expected + 0.5)  # the nearest, which makes the quadratic error least
        return {
            "kappa": sk.cohen_kappa_score(column, level, labels=levels, weights="quadratic"),
            "spearman": stats.spearmanr(expected, column).statistic,
            "mae": sk.mean_absolute_error(column, level),
        }
    if kind == "binary":
        chance = prediction[:, 0]
        has_both = len(np.unique(column)) == 2
        return {
            "auroc": sk.roc_auc_score(column, chance) if has_both else np.nan,
            "f1": sk.f1_score(column, chance >= 0.5, zero_division=np.nan),
            "calibration_error": calibration_error(chance, column),
            "log_loss": sk.log_loss(column, chance, labels=[0, 1]),
        }
    chosen = prediction.argmax(1)
    return {
        "macro_f1": sk.f1_score(column, chosen, average="macro"),
        "accuracy": np.mean(chosen == column),
        "calibration_error": calibration_error(prediction.max(1), chosen == column),
        "log_loss": sk.log_loss(column, prediction, labels=levels),
    }


def calibration_error(confidence: np.ndarray, is_hit: np.ndarray) -> float:
    """Return the mean distance of confidence [N] from the share of hits over equal bins, weighted
    by their counts (Guo et al. 2017)."""
    bins = (confidence * CALIBRATION_BINS).astype(int).clip(0, CALIBRATION_BINS - 1)
    return np.abs(np.bincount(bins, confidence - is_hit)).sum() / len(confidence)
