"""Metrics of rankings, per query and as means, and of scored texts, exact over ranks.

Shapes: B queries or texts, K candidates per query, J judged documents per query, P predictions,
L labels. Metrics of rankings follow trec_eval 9 (NDCG of Järvelin & Kekäläinen 2002, with
log2(rank + 1) as the discount of every rank):

- Candidates without a judgement count as not relevant, as do grades of 0 or below.
- The ideal ranking and the number of relevant documents are those of **all** judged documents, so
  that relevant documents missing from the candidates lower NDCG, MAP and recall.
- A query with judgements but no relevant document scores 0; one without judgements is left out.
- Ties keep the order of the candidates, which is that of the documents' indices, on any number of
  devices. (trec_eval takes the larger identifier first.)
- A query with a score of NaN has the value NaN, so that it cannot pass for a good ranking.

Scores of heads are scikit-learn's and scipy's, in float64 over all predictions in the order of the
sample ids. An undefined score gives a warning and the value of a guess: 0 for a correlation or a
kappa of constant values, 0.5 for the AUROC of a single class, 0 for the F1 of a label that is
neither present nor predicted (such classes of a multiclass head do not count). Without any label,
or with predictions that are not finite, it is NaN.
"""

import json
import logging
import warnings
from collections.abc import Sequence
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
BOOTSTRAP_ROWS = 4_000_000  # random numbers per chunk: 32 MB


class RankedQueries(NamedTuple):
    """Queries with their candidates sorted by score."""

    relevance: Tensor  # [B, K] float64, grade at each rank; 0 = irrelevant, unjudged or missing
    ideal: Tensor  # [B, J] float64, grades of all judged documents, descending, at least 0


def rank_queries(
    scores: Tensor, relevance: Tensor, is_candidate: Tensor, all_relevance: Tensor
) -> RankedQueries:
    """Sort the candidates of each query by score.

    Args:
        scores: [B, K], higher is better.
        relevance: [B, K] grades; NaN = unjudged.
        is_candidate: [B, K] bool, false at padding.
        all_relevance: [B, J] grades of all judged documents, candidates or not, padded with NaN.
    """
    scores = scores.detach().double()
    # Stable sorts, the least important key first.
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
    """Return the discounted sum of grades over the first k ranks, or all, divided by that of the
    ideal ranking, [B] float64."""
    gained, best = (
        (grades[:, :k] / (_ranks(grades[:, :k]) + 1).log2()).sum(1)
        for grades in (ranked.relevance, ranked.ideal)
    )
    return _ratio(gained, best)


def reciprocal_rank(ranked: RankedQueries, k: int | None = None) -> Tensor:
    """Return 1 / rank of the first relevant document [B], 0 if the first k ranks have none."""
    hits = _hits(ranked, k)
    return (hits / _ranks(hits)).amax(1) if hits.shape[1] else hits.sum(1)


def first_relevant(ranked: RankedQueries) -> Tensor:
    """Return the rank, from 1, of the first relevant document [B] int64; 0 if there is none."""
    hits = _hits(ranked, None) > 0
    return torch.where(hits.any(1), hits.byte().argmax(1) + 1, 0) if hits.shape[1] else hits.sum(1)


def average_precision(ranked: RankedQueries, k: int | None = None) -> Tensor:
    """Return the sum of the precisions at each relevant document among the first k, divided by the
    number of all relevant documents, [B] float64."""
    hits = _hits(ranked, k)
    precisions = hits.long().cumsum(1) / _ranks(hits)
    return _ratio((precisions * hits).sum(1), (ranked.ideal > 0).double().sum(1))


def recall(ranked: RankedQueries, k: int | None = None) -> Tensor:
    """Return the share of all relevant documents that are among the first k, [B] float64."""
    return _ratio(_hits(ranked, k).sum(1), (ranked.ideal > 0).double().sum(1))


def _hits(ranked: RankedQueries, k: int | None) -> Tensor:
    grades = ranked.relevance[:, :k]
    return (grades > 0).double().where(~grades.isnan(), torch.nan)


def _ranks(grades: Tensor) -> Tensor:
    return torch.arange(1, grades.shape[1] + 1, dtype=torch.float64, device=grades.device)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Return part / whole, 0 where whole is 0."""
    return torch.where(whole > 0, part / whole.clamp(min=1e-300), part * 0)


MEASURES = {"ndcg": ndcg, "mrr": reciprocal_rank, "map": average_precision, "recall": recall}


def values_per_query(
    ranked: RankedQueries, names: Sequence[str] = DEFAULT_METRICS
) -> dict[str, Tensor]:
    """Return name -> each query's metric [B] float64. A name is a key of MEASURES, maybe with a
    number of ranks, as in `ndcg@10`."""
    values = {}
    for name in names:
        key, _, ranks = name.partition("@")
        values[name] = MEASURES[key](ranked, int(ranks) if ranks else None)
    return values


class GatheredRows(Metric):
    """Rows of a split, such as vectors or predictions, sorted by id, with the columns `id` and
    `names`; of all ranks, or without `gathers` of this rank."""

    def __init__(self, *names: str, gathers: bool = True) -> None:
        super().__init__(sync_on_compute=gathers)
        self.names = ("id", *names)
        for name in self.names:
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, is_counted: Tensor, **columns: Tensor) -> None:
        """Add the counted rows [B, …] of each column, including `id` int64, without filler rows. A
        batch without counted rows must be added, too, as all ranks take part in the gathering."""
        for name in self.names:
            getattr(self, name).append(columns[name].detach()[is_counted])

    def compute(self) -> SimpleNamespace:
        """Return the columns as attributes. (In a dict, torchmetrics would squeeze single rows.)"""
        order = dim_zero_cat(self.id).argsort()
        return SimpleNamespace(**{n: dim_zero_cat(getattr(self, n))[order] for n in self.names})

    def take(self) -> SimpleNamespace:
        """Return the columns, and reset."""
        rows = self.compute()
        self.reset()
        return rows


def paired_bootstrap(
    a: np.ndarray, b: np.ndarray, seed: int, num: int = 10_000
) -> tuple[float, float, float]:
    """Return the mean of a - b over queries and its 95 % percentile interval (low, high).

    Queries are drawn with replacement, with both systems' values for a query (Sakai 2006).

    Args:
        a, b: [Q] values of the same queries in the same order; NaN gives NaN.
        num: number of samples.
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


def log_means(module: LightningModule, means: dict[str, Tensor]) -> None:
    """Log finished values [] float64, which all ranks have alike."""
    for name, value in means.items():
        metric = SumCount().to(value.device)
        metric.update(value, torch.ones_like(value))
        module.log(name, metric, metric_attribute=name)


class QueryValues(NamedTuple):
    """Values per query of an evaluation."""

    queries: list[str]  # ids, in the order of the values
    # System -> metric -> value of each query [Q], the module's own first.
    systems: dict[str, dict[str, Tensor]]
    title: str  # of the table
    notes: Sequence[str] = ()  # below the table
    # Rows of errors-SPLIT.csv; `None` if another callback writes them.
    errors: list[list[str]] | None = None


BASELINES = ("first", "bm25")  # systems that others are compared with
WIDTH = 80
SEED = 0  # of the bootstrap: the same values give the same intervals


class QueryTable(Callback):
    """Prints the systems of an evaluation and writes ranking-SPLIT.json and queries-SPLIT.csv.

    Values come from the module's `query_values(split)`. The json has `queries`, their number;
    `systems`, system -> metric -> mean; `differences`, "SYSTEM - BASELINE" -> metric -> mean, low
    and high of the 95 % interval by a paired bootstrap over queries. The csv has a row per query
    and system.
    """

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer, pl_module, "val")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._show(trainer, pl_module, "val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer, pl_module, "test")

    def _show(self, trainer: Trainer, module: Any, split: str) -> None:
        values: QueryValues | None = module.query_values(split) if trainer.is_global_zero else None
        if values is None or not values.queries:
            return
        systems = {
            system: {name: each.cpu().numpy() for name, each in metrics.items()}
            for system, metrics in values.systems.items()
        }
        folder, content = Path(trainer.default_root_dir), summary(systems)
        write_whole(folder / f"ranking-{split}.json", json.dumps(content, indent=1) + "\n")
        rows = [["query", "system", *next(iter(systems.values()))]]
        for place, query in enumerate(values.queries):
            for system, metrics in systems.items():
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
UNKNOWN = {"auroc": 0.5, "macro_auroc": 0.5}  # values of a guess; 0 for other measures


class HeadMetrics(nn.Module):
    """Mean loss of one head over a split, which the module updates, and its measures."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.loss = kind, SumCount()
        self.rows = GatheredRows("text", "prediction", "target")

    def update(
        self, prediction: Tensor, target: Tensor, is_labelled: Tensor, batch: dict[str, Any]
    ) -> None:
        """Add a batch.

        Args:
            prediction: [B, P] from `Head.prediction`.
            target, is_labelled: [B] or [B, L].
            batch: with `sample_id`, `weight` and `text_index`.
        """
        target, is_labelled = target.reshape(len(target), -1), is_labelled.reshape(len(target), -1)
        self.rows.update(
            is_labelled.any(1) & (batch["weight"] > 0),
            id=batch["sample_id"],
            text=batch["text_index"],
            prediction=prediction.double(),
            target=target.double().masked_fill(~is_labelled, torch.nan),
        )

    def measure(self, split: str, head: str, expected: Tensor | None = None) -> dict[str, Tensor]:
        """Return log name -> value [] float64, and reset; a collective. Args: expected: [P]
        float64, a baseline's prediction, see `baseline`."""
        rows, logged = self.rows.take(), {}
        self.has_labels, target = len(rows.target) > 0, rows.target.cpu().numpy()
        # Copies of a text have the prediction of the first: rounding in other batches orders none.
        _, first, place = np.unique(rows.text.cpu(), return_index=True, return_inverse=True)
        predictions = {"": rows.prediction.cpu().numpy()[first][place]}
        if expected is not None:
            predictions[BASELINE] = expected.expand(len(target), -1).numpy()
        for start, prediction in predictions.items():
            for name, (value, why) in measures(self.kind, prediction, target).items():
                if why and not start:
                    rank_zero_only(log.warning)(f"{split}/{head}_{name} is undefined: {why}.")
                figure = torch.tensor(value, dtype=torch.float64, device=rows.target.device)
                logged[f"{split}/{start}{head}_{name}"] = figure
        return logged


def measures(
    kind: str, prediction: np.ndarray, target: np.ndarray
) -> dict[str, tuple[float, str | None]]:
    """Return measure -> value and, if it is undefined, the reason, for a kind of head.

    Args:
        prediction: [N, P] float64 from `Head.prediction`.
        target: [N, L] float64; NaN = missing, only for a multilabel head.
    """
    if not len(target):
        return dict.fromkeys(NAMES[kind], (np.nan, "no text of the split has a label"))
    if not np.isfinite(prediction).all():
        return dict.fromkeys(NAMES[kind], (np.nan, "predictions are no numbers"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # undefined values get our own message
        values = _values(kind, prediction, target)
    why = "predictions or labels are all the same"
    results: dict[str, tuple[float, str | None]] = {
        name: (UNKNOWN.get(name, 0.0), why) if np.isnan(value) else (float(value), None)
        for name, value in values.items()
    }
    if kind == "multilabel":
        single = [str(n) for n, own in enumerate(target.T) if len(np.unique(own[own >= 0])) < 2]
        if single:
            why = f"labels of a single class are left out: {', '.join(single)}"
            results["macro_auroc"] = (results["macro_auroc"][0], why)
    return results


def _values(kind: str, prediction: np.ndarray, target: np.ndarray) -> dict[str, float]:
    """Return all measures of a kind, NaN if undefined."""
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
        level = np.floor(expected + 0.5)  # the nearest level minimises the quadratic error
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
    """Return the mean absolute difference of confidence [N] and share of hits over equal bins,
    weighted by their counts (Guo et al. 2017)."""
    bins = (confidence * CALIBRATION_BINS).astype(int).clip(0, CALIBRATION_BINS - 1)
    return np.abs(np.bincount(bins, confidence - is_hit)).sum() / len(confidence)
