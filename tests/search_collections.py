"""Small collections in the exact formats of their field."""

import json
from pathlib import Path

DOCUMENTS = [
    ("d1", "Wings", "lift of a wing"),
    ("d2", "", "drag of a body"),
    ("d3", "Heat", "flow"),
]
QUERIES = [("q1", "what is lift"), ("q2", "what is drag"), ("q3", "what is heat")]
TRAIN = [("q1", "d1", "2"), ("q1", "d2", "0"), ("q2", "d2", "1")]
TEST = [("q3", "d3", "1")]


def write_lines(path: Path, *lines: str) -> Path:
    """Write a text file, every line with its end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return path


def write_qrels(path: Path, rows: list[tuple[str, str, str]], header: bool = True) -> Path:
    """Write qrels as BEIR has them."""
    lines = ["\t".join(row) for row in rows]
    return write_lines(path, *(["query-id\tcorpus-id\tscore"] if header else []), *lines)


def write_beir(folder: Path, train: list[tuple[str, str, str]] = TRAIN) -> Path:
    """Write a folder in BEIR's layout, with judgements of train and test."""
    rows = [{"_id": i, "title": t, "text": x, "metadata": {}} for i, t, x in DOCUMENTS]
    write_lines(folder / "corpus.jsonl", *map(json.dumps, rows))
    rows = [{"_id": i, "text": x, "metadata": {}} for i, x in QUERIES]
    write_lines(folder / "queries.jsonl", *map(json.dumps, rows))
    write_qrels(folder / "qrels" / "train.tsv", train)
    write_qrels(folder / "qrels" / "test.tsv", TEST)
    return folder
