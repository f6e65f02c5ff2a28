"""One measured run of the retrieval benchmark, in a process of its own whose peak is its own.

python -m tests.benchmarks.retrieval_run KIND FOLDER prints one line of JSON.
"""

import importlib
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
import torch

from datamodules import RetrievalDataModule
from datamodules.core.planned import LoaderOptions
from datamodules.search.collection import CollectionRequest
from datamodules.search.retrieval import EncodedCollection
from datamodules.text.encoding import TextLimits
from lit_models import LitRetriever
from lit_models.seo.encoders import TransformerEncoder
from lit_models.seo.networks import BiEncoder, TemperatureOptions
from lit_models.seo.retriever import search
from lit_models.training import PredictionWriter
from tests.toy import toy_trainer

DEPTH = 100
ROWS, POSITIONS = 256, 64  # of the step whose memory is measured


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def texts_of(folder: Path) -> tuple[list[str], list[str]]:
    """Return documents and queries."""
    lines = (folder / "corpus.jsonl").read_text().splitlines()
    queries = (folder / "queries.jsonl").read_text().splitlines()
    return [json.loads(x)["text"] for x in lines], [json.loads(x)["text"] for x in queries]


def ours(folder: Path) -> dict[str, Any]:
    """Encode through `predict`, with its parts and its mapped matrix; then search that.

    As the peer's, the time of encoding holds that of the tokens; nothing of an earlier round is
    left to be found.
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
    module.trainer, data.trainer = trainer, trainer
    importlib.import_module("transformers.models.bert.modeling_bert")  # as the peer has
    began = time.perf_counter()
    data.setup("fit")  # makes the tokenizer's recipe, as a training does
    module.recipe = {**data.recipe}
    module.write_run = lambda encoded: None  # measured by itself below
    trainer.predict(module, data, return_predictions=False)
    encoding_s = time.perf_counter() - began
    encoded = EncodedCollection(folder / "encoded")
    number = len(encoded.documents) + len(encoded.queries)
    began = time.perf_counter()
    found = search(np.asarray(encoded.queries), encoded.documents, DEPTH)
    searching_s = time.perf_counter() - began
    return {
        "texts_per_second": number / encoding_s,
        "searches_per_second": len(found.documents) / searching_s,
    }


def peers(folder: Path) -> dict[str, Any]:
    """The same with sentence-transformers on the same folder of weights."""
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
    """Take one training step's gradient over 256 texts, all at once or in chunks."""
    encoder = TransformerEncoder(1000, 256, 4, 4, 1024)
    network = BiEncoder(encoder, "mean", None, TemperatureOptions())
    ids, mask = torch.randint(1, 1000, (ROWS, POSITIONS)), torch.ones(ROWS, POSITIONS).bool()
    before, began = peak_mib(), time.perf_counter()
    vectors = network.encode_samples(ids, mask, False, ROWS, chunk)
    ((vectors @ vectors.T) / network.temperature()).logsumexp(1).sum().backward()
    return {"step_s": time.perf_counter() - began, "step_mib": peak_mib() - before}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    kind, folder = sys.argv[1], Path(sys.argv[2])
    runs: dict[str, Callable[[], dict[str, Any]]] = {
        "ours": partial(ours, folder),
        "peers": partial(peers, folder),
        "whole": partial(step, None),
        "chunks": partial(step, 16),
    }
    measured = runs[kind]()
    print(json.dumps({**measured, "peak_mib": peak_mib()}), flush=True)


if __name__ == "__main__":
    main()
