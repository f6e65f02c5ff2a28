"""Texts encoded and queries answered per second, and the memory of both.

RETRIEVAL_DOCUMENTS=10000 measures fewer than 100,000. Each run has a process of its own, since a
peak is that of a process: python -m tests.benchmarks.test_retrieval_speed KIND FOLDER prints JSON.
"""

import importlib
import importlib.util
import json
import logging
import os
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datamodules import RetrievalDataModule
from datamodules.core.planned import LoaderOptions
from datamodules.search.collection import CollectionRequest
from datamodules.text.encoding import TextLimits
from lit_models import LitRetriever
from lit_models.seo.encoders import TransformerEncoder
from lit_models.seo.nearest import ExactSearch
from lit_models.seo.networks import BiEncoder, TemperatureOptions
from lit_models.training import PredictionWriter
from tests.benchmarks.figures import Aim, Figures
from tests.distributed.launch import run
from tests.seo.small_collection import bert_folder
from tests.toy import json_rows, toy_trainer

MOST = int(os.environ.get("RETRIEVAL_DOCUMENTS", "100000"))
QUERIES, ROUNDS = 1000, 3
WORDS = [f"w{number}" for number in range(2000)]
PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
pytestmark = pytest.mark.benchmark
DEPTH = 100
ROWS, POSITIONS = 256, 64  # of the step whose memory is measured


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def texts_of(folder: Path) -> tuple[list[str], list[str]]:
    """Return documents and queries."""
    documents, queries = (json_rows(folder / f"{name}.jsonl") for name in ("corpus", "queries"))
    return [row["text"] for row in documents], [row["text"] for row in queries]


def ours(folder: Path) -> dict[str, Any]:
    """Encode through `predict`, with its parts and its mapped matrix; then search the matrix.

    As for the peer, the time of encoding includes tokenising; no file of an earlier round is
    reused.
    """
    cache = folder / "cache"
    for left in (cache, folder / "encoded"):
        shutil.rmtree(left, ignore_errors=True)
    os.environ["UNISONO_CACHE"] = str(cache)
    data = RetrievalDataModule(
        collection=CollectionRequest(str(folder)),
        predict_output=str(folder / "encoded"),
        text=TextLimits(max_length=POSITIONS, max_query_length=32),
        global_batch_size=64,
        loader=LoaderOptions(num_workers=0),
    )
    module = LitRetriever(
        optimizer=partial(torch.optim.SGD, lr=0.1), pretrained=str(folder.parent / "bert")
    )
    trainer = toy_trainer(folder, precision=32, callbacks=[PredictionWriter()])
    trainer.strategy.connect(module)
    module.trainer, data.trainer, data.model = trainer, trainer, module.model_facts()
    importlib.import_module("transformers.models.bert.modeling_bert")  # as the peer does
    began = time.perf_counter()
    data.model = module.model_facts()  # names the tokenizer of the folder
    data.setup("fit")  # makes the tokenizer's recipe, as a training does
    module.recipe = {**data.recipe}
    module.rankings = lambda *encoded: ()  # measured separately below
    trainer.predict(module, data, return_predictions=False)
    encoding_s = time.perf_counter() - began
    documents, queries = (
        np.load(folder / "encoded" / f"{name}.npy", mmap_mode="r")
        for name in ("documents", "queries")
    )
    number = len(documents) + len(queries)
    began = time.perf_counter()
    found = ExactSearch(documents).search(np.asarray(queries), DEPTH)
    searching_s = time.perf_counter() - began
    return {
        "texts_per_second": number / encoding_s,
        "searches_per_second": len(found.documents) / searching_s,
    }


def peers(folder: Path) -> dict[str, Any]:
    """Measure the same with sentence-transformers on the same folder of weights."""
    from sentence_transformers import SentenceTransformer, models, util

    documents, queries = texts_of(folder)
    transformer = models.Transformer(str(folder.parent / "bert"), max_seq_length=POSITIONS)
    pooling = models.Pooling(transformer.get_word_embedding_dimension(), "mean")
    model = SentenceTransformer(modules=[transformer, pooling, models.Normalize()], device="cpu")
    options: dict[str, Any] = {"batch_size": 64, "convert_to_tensor": True}
    began = time.perf_counter()
    vectors = model.encode(documents, **options)
    of_queries = model.encode(queries, **options)
    encoding_s = time.perf_counter() - began
    began = time.perf_counter()
    util.semantic_search(of_queries, vectors, top_k=DEPTH)
    searching_s = time.perf_counter() - began
    return {
        "texts_per_second": (len(documents) + len(queries)) / encoding_s,
        "searches_per_second": len(queries) / searching_s,
    }


def step(chunk: int | None) -> dict[str, Any]:
    """Compute one training step's gradient over 256 texts, at once or in chunks."""
    encoder = TransformerEncoder(1000, 256, 4, 4, 1024)
    network = BiEncoder(encoder, TemperatureOptions())
    ids, mask = torch.randint(1, 1000, (ROWS, POSITIONS)), torch.ones(ROWS, POSITIONS).bool()
    before, began = peak_mib(), time.perf_counter()
    vectors = network.encode_samples(ids, mask, False, ROWS, chunk)
    ((vectors @ vectors.T) / network.temperature()).logsumexp(1).sum().backward()
    return {"step_s": time.perf_counter() - began, "step_mib": peak_mib() - before}


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
    done = run("-m", "tests.benchmarks.test_retrieval_speed", kind, str(folder), timeout_s=3000)
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
    # One pass encodes 64 texts, a search takes 8,192 vectors; the matrix itself is mapped.
    assert grown < 2 * (MOST * 128 * 4 / 2**20) + 64


def test_a_step_in_chunks_takes_the_memory_of_a_chunk(tmp_path: Path, figures: Figures) -> None:
    whole, chunks = (measured(kind, tmp_path) for kind in ("whole", "chunks"))
    for column, unit, aim in (("step_mib", "MiB", 0.25), ("step_s", "s", 2.0)):
        figures.add(
            *("seo", "a step of 256 texts in chunks of 16", unit, [chunks[column]]),
            *("the whole at once", [whole[column]], Aim(aim)),
        )
    assert chunks["step_mib"] < whole["step_mib"] / 4


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    kind, folder = sys.argv[1], Path(sys.argv[2])
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "ours": partial(ours, folder),
        "peers": partial(peers, folder),
        "whole": partial(step, None),
        "chunks": partial(step, 16),
    }
    print(json.dumps({**runs[kind](), "peak_mib": peak_mib()}), flush=True)
