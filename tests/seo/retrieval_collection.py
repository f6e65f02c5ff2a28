"""A collection of 40 documents in BEIR's layout, some of them equal."""

import json
from pathlib import Path

import numpy as np

from tests.search_collections import write_lines

WORDS = ("salt", "bread", "iron", "boat", "wool", "old", "cheap", "sold", "by", "weight", "mill")
SIZES = {"train": 24, "validation": 7, "test": 9}


def write_collection(folder: Path, num_documents: int = 40) -> Path:
    """Write documents of one to four sentences, and queries that share words with them.

    Every query has a document of grade 2 and one of grade 1, every third one of grade 0.
    """
    rng = np.random.default_rng(0)

    def sentence() -> str:
        return " ".join(rng.choice(WORDS, rng.integers(4, 9))) + "."

    documents = []
    for number in range(num_documents):
        text = " ".join(sentence() for _ in range(rng.integers(1, 5)))
        title = " ".join(rng.choice(WORDS, 3)) if number % 4 else ""
        documents.append({"_id": f"d{number}", "title": title, "text": text})
    documents[-1] = {**documents[-2], "_id": documents[-1]["_id"]}  # a tie
    write_lines(folder / "corpus.jsonl", *map(json.dumps, documents))
    queries = []
    for part, size in SIZES.items():
        judged = ["query-id\tcorpus-id\tscore"]
        for number in range(size):
            chosen = rng.choice(num_documents, 3, replace=False)
            words = documents[chosen[0]]["text"].replace(".", "").split()
            text = " ".join(rng.choice(words, rng.integers(2, 5)))
            queries.append({"_id": f"{part}-{number}", "text": text})
            grades = [2, 1, 0][: 3 if number % 3 == 0 else 2]
            judged += [f"{part}-{number}\td{d}\t{g}" for d, g in zip(chosen, grades, strict=False)]
        write_lines(folder / "qrels" / f"{part}.tsv", *judged)
    write_lines(folder / "queries.jsonl", *map(json.dumps, queries))
    return folder
