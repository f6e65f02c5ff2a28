"""Tables of a test, and the run of a prediction."""

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor

from datamodules.search.bm25 import Hits, open_bm25
from datamodules.search.datamodule import NUM_FOUND
from datamodules.search.queries import Ranking
from datamodules.search.queries import write_run as write_rankings
from datamodules.search.retrieval import (
    RUN_FILE,
    EncodedCollection,
    RetrievalDataModule,
    TextsDataset,
)
from lit_models.seo.metrics import first_relevant, paired_bootstrap
from lit_models.seo.search import BM25, OWN, Feedback, Found, RetrievalEvaluation, fused, searched
from lit_models.training.predictions import MOST_ON_BOARD, as_markdown, boards, write_table

TITLES = {"ranker": "ranker", "first": "first stage", "bm25": "BM25"}
SEED = 0  # of the bootstrap: the same values give the same intervals
ByQuery = dict[str, dict[str, np.ndarray]]


class RankingTable(Callback):
    """Shows and writes the metrics of a test's queries, and how sure the differences are.

    ranking.json: queries, their number; systems, system -> metric -> mean; differences, baseline
    -> metric -> mean, low and high of the ranker less the baseline, with a 95 % interval of a
    paired bootstrap over queries. ranking_queries.csv: query, system and its metrics.
    """

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        source = trainer.datamodule.datasets["test"].source
        metrics = list(pl_module.test_metrics)
        found: ByQuery = {}
        for system in ("ranker", *source.first.names):  # collectives: on every rank
            ids, values = pl_module.tested[system].compute()
            found[system] = dict(zip(metrics, values.cpu().numpy().T, strict=True))
        if not trainer.is_global_zero:
            return
        names = [source.queries.id(place) for place in ids.tolist()]
        content = summary(found)
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1) + "\n"
        (folder / "ranking.json").write_text(text, encoding="utf-8")
        write_queries(folder / "ranking_queries.csv", names, found)
        console = Console(highlight=False)
        console.print(means_table(content))
        for baseline in content["differences"]:
            console.print(differences_table(content, baseline))


def summary(found: ByQuery) -> dict[str, Any]:
    """Return the content of ranking.json.

    Args:
        found: system -> metric -> value of each query [N], the ranker's first.
    """
    own, *baselines = found
    return {
        "queries": len(next(iter(found[own].values()))),
        "systems": {
            system: {metric: float(values.mean()) for metric, values in metrics.items()}
            for system, metrics in found.items()
        },
        "differences": {
            baseline: {
                metric: dict(
                    zip(
                        ("mean", "low", "high"),
                        paired_bootstrap(values, found[baseline][metric], SEED),
                        strict=True,
                    )
                )
                for metric, values in found[own].items()
            }
            for baseline in baselines
        },
    }


def write_queries(path: Path, names: list[str], found: ByQuery) -> None:
    """Write one row per query and system, with numbers that are read back as they are."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["query", "system", *next(iter(found.values()))])
        for place, name in enumerate(names):
            for system, metrics in found.items():
                values = (repr(float(values[place])) for values in metrics.values())
                writer.writerow([name, system, *values])


def means_table(content: dict[str, Any]) -> Table:
    """Return the means of all systems, at most 80 columns wide."""
    shown = _table(f"means over {content['queries']} queries")
    shown.add_column("")
    for metric in content["systems"]["ranker"]:
        shown.add_column(metric, justify="right")
    for system, values in content["systems"].items():
        shown.add_row(TITLES[system], *(f"{value:.4f}" for value in values.values()))
    return shown


def differences_table(content: dict[str, Any], baseline: str) -> Table:
    """Return the differences to one baseline and their intervals, at most 80 columns wide."""
    shown = _table(f"ranker less {TITLES[baseline]}, 95 % interval")
    for name in ("metric", "difference", "from", "to"):
        shown.add_column(name, justify="left" if name == "metric" else "right")
    for metric, values in content["differences"][baseline].items():
        shown.add_row(metric, *(f"{values[name]:+.4f}" for name in ("mean", "low", "high")))
    return shown


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False)


WIDTH = 80
NUM_WORST, MOST_ERRORS, SHOWN_DOCUMENTS = 12, 1000, 3


class RetrievalTable(Callback):
    """Prints the systems of the last evaluation, and writes retrieval-SPLIT.json and, of queries
    whose first document is not relevant, errors-SPLIT.csv.

    The first file: queries, documents and how many the collection has; fusion_weight, of BM25, and
    whether it was chosen on these very queries; systems, name -> metric -> mean;
    differences, system -> metric -> mean of it less BM25 with a 95 % interval over queries;
    per_query, system -> metric -> query id -> value; worst, of the queries with the lowest first
    metric of the retriever, the lowest first: query, its id, text, and first_relevant, the rank of
    the first relevant document, null where none of those that are ranked is. (A retriever has no
    loss of a query by itself: its loss compares all of a step.)
    """

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer, pl_module, "val")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._show(trainer, pl_module, "val")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer, pl_module, "test")

    def _show(self, trainer: Trainer, module: LightningModule, split: str) -> None:
        evaluation = getattr(module, f"{split}_evaluation")
        if (
            not trainer.is_global_zero
            or evaluation.texts is None
            or not len(evaluation.texts.query)
        ):
            return
        collection = trainer.datamodule.collection  # type: ignore[attr-defined]
        content = compared(evaluation)
        content["documents_in_collection"] = collection.num_documents
        content["fusion_weight"] = module.fusion_weight()
        content["weight_chosen_here"] = split == "val" and module.fusion_is_open
        names = [collection.query_id(int(number)) for number in evaluation.texts.query]
        per_query = _named(evaluation.per_query(), names)
        content["worst"] = worst_queries(evaluation, collection, per_query[OWN], names)
        path = Path(trainer.default_root_dir) / f"retrieval-{split}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**content, "per_query": per_query}) + "\n")
        errors = error_rows(evaluation, collection, per_query[OWN], names)
        of_errors = path.with_name(f"errors-{split}.csv")
        write_table(of_errors, errors)
        for board in boards(trainer):
            text = as_markdown(errors[: MOST_ON_BOARD + 1])
            board.experiment.add_text(f"{split}/errors", text, trainer.global_step)
            text = as_markdown(found_rows(evaluation, collection))
            board.experiment.add_text(f"{split}/retrieved", text, trainer.global_step)
        Console(width=WIDTH, highlight=False).print(table(content, split))
        if split == "test":
            print(f"errors: {of_errors} ({len(errors) - 1} queries, the worst first)")


def compared(evaluation: RetrievalEvaluation) -> dict[str, Any]:
    """Return sizes, means, and differences to BM25 with their intervals."""
    assert evaluation.texts is not None
    per_query = evaluation.per_query()
    baseline = per_query.get(BM25, {})
    return {
        "queries": len(evaluation.texts.query),
        "documents": len(evaluation.texts.document),
        "systems": {
            system: {name: float(values.mean()) for name, values in metrics.items()}
            for system, metrics in per_query.items()
        },
        "differences": {
            system: {
                name: paired_bootstrap(values.cpu().numpy(), baseline[name].cpu().numpy(), SEED)
                for name, values in metrics.items()
            }
            for system, metrics in per_query.items()
            if baseline and system != BM25
        },
    }


def worst_queries(
    evaluation: RetrievalEvaluation,
    collection: Any,
    own: dict[str, Any],
    names: list[str],
    most: int = NUM_WORST,
) -> list[dict[str, Any]]:
    """Return the entries of `worst`.

    Args:
        evaluation: with the rankings of its last evaluation.
        collection: of the queries.
        own: the retriever's metrics, name -> query id -> value.
        names: the query ids, in the order of the evaluation.
        most: queries.
    """
    assert evaluation.texts is not None
    values = next(iter(own.values()))
    order = sorted(range(len(names)), key=lambda place: (values[names[place]], names[place]))
    numbers = evaluation.texts.query.tolist()
    ranks = first_relevant(evaluation.ranked[OWN]).tolist()
    return [
        {
            "query": names[place],
            "text": collection.query(numbers[place]),
            "first_relevant": ranks[place] or None,
        }
        for place in order[:most]
    ]


def error_rows(
    evaluation: RetrievalEvaluation, collection: Any, own: dict[str, Any], names: list[str]
) -> list[list[str]]:
    """Return head and rows of the queries whose first document is not relevant, the lowest first
    metric first; arguments as for `worst_queries`."""
    texts, (metric, values) = evaluation.texts, next(iter(own.items()))
    assert texts is not None
    rows = []
    for one in worst_queries(evaluation, collection, own, names, MOST_ERRORS):
        if one["first_relevant"] != 1:
            place = names.index(one["query"])
            judged = zip(texts.judged[place].tolist(), texts.grade[place].tolist(), strict=True)
            truth = " ".join(collection.document_id(n) for n, grade in judged if grade > 0)
            rank = one["first_relevant"]
            answer = f"rank {rank}" if rank else "none found"
            rows.append([one["text"], truth, answer, one["query"], f"{values[one['query']]:.3g}"])
    return [["input", "truth", "answer", "sample", metric], *rows]


def found_rows(evaluation: RetrievalEvaluation, collection: Any) -> list[list[str]]:
    """Return head and rows of the first queries, each with the first documents found for it."""
    assert evaluation.texts is not None
    assert evaluation.found is not None
    rows = [["query", *(str(rank) for rank in range(1, SHOWN_DOCUMENTS + 1))]]
    queries = evaluation.texts.query[:MOST_ON_BOARD].tolist()
    first = evaluation.found[:MOST_ON_BOARD, :SHOWN_DOCUMENTS].tolist()
    for query, documents in zip(queries, first, strict=True):
        texts = [collection.document_text(n) if n >= 0 else "" for n in documents]
        texts += [""] * (SHOWN_DOCUMENTS - len(texts))
        rows.append([collection.query(query), *texts])
    return rows


def table(content: dict[str, Any], split: str) -> Table:
    """Return the table of `compared` for a terminal of 80 columns."""
    among, whole = content["documents"], content["documents_in_collection"]
    title = f"{split}: {content['queries']} queries over {among} documents"
    if among < whole:
        title += f" of {whole}, which is easier than all"
    caption = "difference: to bm25, 95 % over queries"
    if content["weight_chosen_here"]:
        caption += "\nfused: weight chosen on these queries"
    shown = Table(
        title=title,
        caption=caption,
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    shown.add_column("metric")
    for system in content["systems"]:
        shown.add_column(system, justify="right")
    differences = content["differences"]
    for system in differences:
        shown.add_column("difference" if system == OWN else f"of {system}", justify="right")
    for name in content["systems"][OWN]:
        means = [f"{metrics[name]:.3f}" for metrics in content["systems"].values()]
        spans = [_span(*metrics[name]) for metrics in differences.values()]
        shown.add_row(name, *means, *spans)
    return shown


def _span(mean: float, low: float, high: float) -> str:
    """A difference and its interval, without the zeros before the points."""
    return f"{mean:+.3f} [{low:+.2f} {high:+.2f}]".replace("0.", ".")


def _named(per_query: dict[str, dict[str, Tensor]], names: list[str]) -> dict[str, Any]:
    return {
        system: {
            name: dict(zip(names, values.tolist(), strict=True)) for name, values in metrics.items()
        }
        for system, metrics in per_query.items()
    }


TAG, FOUND_FILE = "unisono", "found.csv"
QUERIES_AT_ONCE = 8192  # each chunk reads the whole matrix once more


def write_run(
    encoded: EncodedCollection,
    data: RetrievalDataModule,
    fusion_weight: float | None,
    device: torch.device,
    feedback: Feedback | None = None,
) -> None:
    """Write the best documents of each query into the folder of encoded texts; where people ask,
    as a table, too.

    Args:
        encoded: of the data's collection.
        data: with the options of the run and of BM25.
        fusion_weight: of BM25; none leaves it out.
        device: where products are computed.
        feedback: how queries are moved before they search.
    """
    rankings = _rankings(encoded, data, fusion_weight, device, feedback)
    best: list[Ranking] = []

    def noted() -> Iterator[Ranking]:
        for ranking in rankings:
            if data.shows_found:
                documents, scores = ranking.documents[:NUM_FOUND], ranking.scores[:NUM_FOUND]
                best.append(Ranking(ranking.query, documents, scores))
            yield ranking

    write_rankings(encoded.folder / RUN_FILE, noted(), TAG)
    if data.shows_found:
        dataset = data.datasets["predict"]
        assert isinstance(dataset, TextsDataset)
        data.write_found(encoded.folder / FOUND_FILE, best, dataset.queries)


def _rankings(
    encoded: EncodedCollection,
    data: RetrievalDataModule,
    fusion_weight: float | None,
    device: torch.device,
    feedback: Feedback | None,
) -> Iterator[Ranking]:
    names = encoded.query_ids
    bm25 = (
        None
        if data.bm25 is None or fusion_weight is None
        else open_bm25(data.collection, data.bm25)
    )
    depth = data.predict_depth if bm25 is None else max(data.predict_depth, data.bm25_depth)
    ids, dataset = encoded.document_ids, data.datasets["predict"]
    assert isinstance(dataset, TextsDataset)
    for start in range(0, len(names), QUERIES_AT_ONCE):
        chunk = names[start : start + QUERIES_AT_ONCE]
        queries = encoded.queries[start : start + QUERIES_AT_ONCE]
        found = searched(np.asarray(queries), encoded.documents, depth, device, feedback)
        if bm25 is not None and fusion_weight is not None:
            texts = [dataset.queries.text(place) for place in range(start, start + len(chunk))]
            found = _with_bm25(found, bm25.search(texts, data.bm25_depth), fusion_weight)
        for name, rows, scores in zip(chunk, found.documents, found.scores, strict=True):
            kept = rows[rows >= 0][: data.predict_depth].tolist()
            yield Ranking(name, [ids[row] for row in kept], scores[: len(kept)].tolist())


def _with_bm25(found: Found, hits: Iterable[Hits], weight: float) -> Found:
    """Fuse as evaluation does. Rows of the matrix are numbers of documents: all are encoded."""
    documents, scores = zip(*hits, strict=True)
    first, first_scores = (torch.from_numpy(np.concatenate(part)) for part in (documents, scores))
    return Found(*fused(found.documents, found.scores, first, first_scores, weight))
