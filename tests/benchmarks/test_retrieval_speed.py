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

from tests.benchmarks.figures import Aim, Figures
from tests.distributed.launch import run
from tests.seo.small_collection import bert_folder

MOST = int(os.environ.get("RETRIEVAL_DOCUMENTS", "100000"))
QUERIES, ROUNDS = 1000, 3
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


def test_texts_and_searches_per_second(tmp_path: Path, figures: Figures) -> None:
    bert_folder(
        tmp_path / "bert",
        PIECES,
        hidden_size=128,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=64,
    )
    few = measured("ours", write_texts(tmp_path / "few", MOST // 10))
    many = write_texts(tmp_path / "many", MOST)
    kinds = {"ours": "unisono"}
    if importlib.util.find_spec("sentence_transformers"):
        kinds["peers"] = "sentence-transformers"
    rounds = [{kind: measured(kind, many) for kind in kinds} for _ in range(ROUNDS)]  # in turns
    at_least = Aim(1.0, is_least=True) if "peers" in kinds else None
    for column, what in (("texts_per_second", "encoded"), ("searches_per_second", "searched")):
        ours, theirs = ([r[k][column] for r in rounds if k in r] for k in ("ours", "peers"))
        figures.add(
            *("seo", f"{MOST:,} texts {what}", column.replace("_per_", "/").replace("second", "s")),
            *(ours, kinds.get("peers", ""), theirs, at_least),
        )
    grown = max(r["ours"]["peak_mib"] for r in rounds) - few["peak_mib"]
    # One pass holds 64 texts and a search 8,192 vectors; the matrix itself is mapped.
    matrix_mib = MOST * 128 * 4 / 2**20
    assert grown < 2 * matrix_mib + 64


def test_a_step_in_chunks_takes_the_memory_of_a_chunk(tmp_path: Path, figures: Figures) -> None:
    whole, chunks = (measured(kind, tmp_path) for kind in ("whole", "chunks"))
    for column, unit, aim in (("step_mib", "MiB", 0.25), ("step_s", "s", 2.0)):
        figures.add(
            *("seo", "a step of 256 texts in chunks of 16", unit, [chunks[column]]),
            *("the whole at once", [whole[column]], Aim(aim)),
        )
    assert chunks["step_mib"] < whole["step_mib"] / 4
