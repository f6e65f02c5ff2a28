"""Small collections in the exact formats of their field."""

import json
from pathlib import Path

import numpy as np

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


WORDS = ("salt", "bread", "iron", "boat", "wool", "old", "cheap", "sold", "by", "weight", "mill")
SIZES = {"train": 24, "validation": 7, "test": 9}


def write_collection(folder: Path) -> Path:
    """Write 40 documents of one to four sentences, and queries that share words with them.

    Every query has a document of grade 2 and one of grade 1, every third one of grade 0.
    """
    rng = np.random.default_rng(0)

    def sentence() -> str:
        return " ".join(rng.choice(WORDS, rng.integers(4, 9))) + "."

    documents = []
    for number in range(40):
        text = " ".join(sentence() for _ in range(rng.integers(1, 5)))
        title = " ".join(rng.choice(WORDS, 3)) if number % 4 else ""
        documents.append({"_id": f"d{number}", "title": title, "text": text})
    documents[-1] = {**documents[-2], "_id": documents[-1]["_id"]}  # a tie
    write_lines(folder / "corpus.jsonl", *map(json.dumps, documents))
    queries = []
    for part, size in SIZES.items():
        judged = ["query-id\tcorpus-id\tscore"]
        for number in range(size):
            chosen = rng.choice(len(documents), 3, replace=False)
            words = documents[chosen[0]]["text"].replace(".", "").split()
            text = " ".join(rng.choice(words, rng.integers(2, 5)))
            queries.append({"_id": f"{part}-{number}", "text": text})
            grades = [2, 1, 0][: 3 if number % 3 == 0 else 2]
            judged += [f"{part}-{number}\td{d}\t{g}" for d, g in zip(chosen, grades, strict=False)]
        write_lines(folder / "qrels" / f"{part}.tsv", *judged)
    write_lines(folder / "queries.jsonl", *map(json.dumps, queries))
    return folder
