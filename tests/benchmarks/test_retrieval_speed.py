"""Texts encoded and queries answered per second, and the memory that both take.

pytest -m benchmark tests/benchmarks/test_retrieval_speed.py -s
RETRIEVAL_DOCUMENTS=10000 measures fewer than 100,000.
"""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from tests.distributed.launch import run
from tests.seo.test_pretrained_retriever import bert_folder

MOST = int(os.environ.get("RETRIEVAL_DOCUMENTS", "100000"))
QUERIES = 1000
WORDS = [f"w{number}" for number in range(2000)]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
pytestmark = pytest.mark.benchmark


def write_texts(folder: Path, number: int) -> Path:
    """Write documents of 8 to 24 words, and queries of 3 to 8."""
    rng = np.random.default_rng(0)
    (folder / "qrels").mkdir(parents=True)

    def line(id: str, low: int, high: int) -> str:
        text = " ".join(rng.choice(WORDS, rng.integers(low, high)))
        return json.dumps({"_id": id, "title": "", "text": text}) + "\n"

    (folder / "corpus.jsonl").write_text("".join(line(f"d{n}", 8, 25) for n in range(number)))
    (folder / "queries.jsonl").write_text("".join(line(f"q{n}", 3, 9) for n in range(QUERIES)))
    for part in ("train", "validation", "test"):
        rows = [f"q{n}\td{n % number}\t1" for n in range(QUERIES if part == "test" else 1)]
        text = "\n".join(["query-id\tcorpus-id\tscore", *rows]) + "\n"
        (folder / "qrels" / f"{part}.tsv").write_text(text)
    return folder


def measured(kind: str, folder: Path) -> dict[str, Any]:
    done = run("-m", "tests.benchmarks.retrieval_run", kind, str(folder), timeout_s=3000)
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def shown(rows: dict[str, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    table = Table(title=f"{MOST} texts, {QUERIES} queries, one thread")
    for name in ("", *columns):
        table.add_column(name.replace("_", " "), justify="right" if name else "left")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[c]:.1f}" if c in row else "" for c in columns))
    with capsys.disabled():
        Console(width=80).print("", table)


def test_texts_and_searches_per_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bert_folder(
        tmp_path / "bert",
        PIECES,
        hidden_size=128,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=64,
    )
    few = write_texts(tmp_path / "few", MOST // 10)
    many = write_texts(tmp_path / "many", MOST)
    rows = {"a tenth of them": measured("ours", few), "all": measured("ours", many)}
    if importlib.util.find_spec("sentence_transformers"):
        rows["sentence-transformers"] = measured("peers", many)
    shown(rows, capsys)
    grown = rows["all"]["peak_mib"] - rows["a tenth of them"]["peak_mib"]
    # One pass holds 64 texts and a search 8,192 vectors; the matrix itself is mapped.
    matrix_mib = MOST * 128 * 4 / 2**20
    assert grown < 2 * matrix_mib + 64


def test_a_step_in_chunks_takes_the_memory_of_a_chunk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {kind: measured(kind, tmp_path) for kind in ("whole", "chunks")}
    shown(rows, capsys)
    assert rows["chunks"]["step_mib"] < rows["whole"]["step_mib"] / 4
    assert rows["chunks"]["step_s"] < 2 * rows["whole"]["step_s"]
