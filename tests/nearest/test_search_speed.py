"""Queries per second through an index beside exact search, its recall, and what making it takes.

SEARCH_DOCUMENTS=100000 measures fewer than a million. Vectors have 384 numbers: clustered ones lie
around 4,000 topics of sizes that fall with the root of their rank, each spread over 24 directions
and, less, over all; uniform ones have no structure, where every index is poor.
"""

import os
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_models.seo.nearest.exact import ExactSearch
from lit_models.seo.nearest.ivf import IvfSearch
from tests.benchmarks.conftest import _kept, figures  # noqa: F401 - fixtures
from tests.benchmarks.figures import Aim, Figures

MOST = int(os.environ.get("SEARCH_DOCUMENTS", "1000000"))
QUERIES, WIDTH, TOPICS, ROUNDS = 1024, 384, 4000, 3
pytestmark = pytest.mark.benchmark


def uniform(number: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((number, WIDTH), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def clustered(number: int, seed: int) -> np.ndarray:
    rng, topics, spreads = np.random.default_rng(seed), uniform(TOPICS, 0), uniform(64 * 24, 3)
    shares = 1 / np.sqrt(1 + np.arange(TOPICS))
    topic = rng.choice(TOPICS, number, p=shares / shares.sum())
    vectors = topics[topic] + 0.5 * uniform(number, seed)
    for group in range(64):
        rows = np.flatnonzero(topic % 64 == group)
        directions = rng.normal(scale=0.7 / np.sqrt(24), size=(len(rows), 24))
        vectors[rows] += directions @ spreads[24 * group : 24 * group + 24]
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.parametrize("kind", [clustered, uniform])
def test_searches_per_second(kind, figures: Figures, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("faiss", reason="extra: search")
    os.environ["UNISONO_CACHE"] = str(tmp_path)
    documents, queries = kind(MOST, 1), kind(QUERIES, 2)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    opened, exact = IvfSearch(documents), ExactSearch(documents)
    made_s = time.perf_counter() - began
    grown_gib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    size_gib = next(tmp_path.glob("nearest/*/index.faiss")).stat().st_size / 2**30
    for k in (10, 100):
        opened.tune(queries, k, 0.995, None)
        ours, theirs = [], []
        for _ in range(ROUNDS):  # in turns
            for search, seconds in ((opened, ours), (exact, theirs)):
                began = time.perf_counter()
                best = search.search(queries, k).scores
                seconds.append(QUERIES / (time.perf_counter() - began))
        recall = (opened.search(queries, k).scores >= best[:, -1:]).double().mean()
        note = f"recall {recall:.4f}, {opened.facts['lists_read']} of {opened.facts['lists']} lists"
        note += f"; made in {made_s:.0f} s with {grown_gib:.2f} GiB, {size_gib:.2f} GiB"
        figures.add(
            *("seo", f"{k} of {MOST:,} {kind.__name__} documents searched", "queries/s", ours),
            *("exact search", theirs, Aim(20, is_least=True) if kind is clustered else None),
            note=f"{note}; {torch.get_num_threads()} threads",
        )
        assert kind is uniform or recall >= 0.99
