"""Datamodules of all families, reading given texts."""

from pathlib import Path
from typing import Any

import datamodules
from datamodules.activations.documents import PositionRule
from datamodules.scored.store import LabelOptions
from datamodules.search.collection import CollectionRequest
from tests.occupation_tables import module as occupation_module
from tests.search_collections import write_qrels
from tests.text_corpora import rows_file, text_module

BYTES = datamodules.TokenizerOptions("bytes")


def collection(folder: Path, texts: list[str]) -> CollectionRequest:
    """Return a collection of these documents; each of as many queries has some judged ones."""
    rows = [{"_id": f"{n}", "title": "", "text": text} for n, text in enumerate(texts)]
    pairs = [(n, (n + k) % len(rows), 1 - k) for n in range(len(rows)) for k in (0, 1)]
    judged = [tuple(map(str, pair)) for pair in pairs]
    for part, some in (("train", judged), ("validation", judged[:2]), ("test", judged[:2])):
        write_qrels(folder / "qrels" / f"{part}.tsv", some)
    rows_file(folder / "corpus.jsonl", rows)
    rows_file(folder / "queries.jsonl", [{**row, "text": "which one"} for row in rows])
    return CollectionRequest(str(folder))


def text(folder: Path, texts: list[str], **options: Any) -> Any:
    path = rows_file(folder / "text.jsonl", [{"text": text} for text in texts])
    options = {"layout": "packed", "context_length": 512, **options}
    return text_module(path, tokenizer=BYTES, **options)


def occupation(folder: Path, texts: list[str], **options: Any) -> Any:
    rows = [(text[:120], "en", str(10000 + n % 4), "") for n, text in enumerate(texts)]
    return occupation_module(folder, rows, split=datamodules.SplitOptions(), **options)


def retrieval(folder: Path, texts: list[str], **options: Any) -> Any:
    request = collection(folder, texts)
    return datamodules.RetrievalDataModule(
        collection=request, tokenizer=BYTES, bm25=None, **options
    )


def ranking(folder: Path, texts: list[str], **options: Any) -> Any:
    request = collection(folder, texts)
    return datamodules.RankingDataModule(collection=request, tokenizer=BYTES, bm25=None, **options)


def scored(folder: Path, texts: list[str], **options: Any) -> Any:
    path = rows_file(folder / "s.jsonl", [{"text": t, "grade": n} for n, t in enumerate(texts)])
    heads = {"grade": LabelOptions("regression")}
    return datamodules.ScoredTextDataModule(
        {"train": path}, heads=heads, tokenizer=BYTES, **options
    )


def lens(folder: Path, texts: list[str], **options: Any) -> Any:
    path = rows_file(folder / "l.jsonl", [{"text": text} for text in texts])
    rule = PositionRule(min_position=2, per_document=1)
    given = {"tokenizer": BYTES, "positions": rule, "context_length": 512}
    return datamodules.ActivationDataModule(train_files=path, **given, **options)
