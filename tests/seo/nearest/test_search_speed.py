"""Queries per second through an index and by exact search, recall, and the cost of the index.

SEARCH_DOCUMENTS=100000 measures fewer than a million. Documents are uniform, or of 4,000 topics
whose sizes fall with the root of their rank, spread over 24 directions and, less, over all.
"""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from lit_models.seo.nearest import ExactSearch, IndexSearch

MOST = int(os.environ.get("SEARCH_DOCUMENTS", "1000000"))
QUERIES, ROUNDS = 1024, 3


def uniform(number: int, seed: int, width: int = 384) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((number, width), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def clustered(number: int, seed: int, width: int = 384, topics: int = 4000) -> np.ndarray:
    rng, spreads = np.random.default_rng(seed), uniform(64 * 24, 3, width)
    shares = 1 / np.sqrt(1 + np.arange(topics))
    topic = rng.choice(topics, number, p=shares / shares.sum())
    vectors = uniform(topics, 0, width)[topic] + 0.5 * uniform(number, seed, width)
    for group in range(64):
        rows = np.flatnonzero(topic % 64 == group)
        directions = rng.normal(scale=0.7 / np.sqrt(24), size=(len(rows), 24))
        vectors[rows] += directions @ spreads[24 * group : 24 * group + 24]
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@pytest.mark.benchmark
@pytest.mark.parametrize("kind", [clustered, uniform])
def test_searches_per_second(kind, tmp_path: Path) -> None:
    pytest.importorskip("faiss", reason="extra: search")
    os.environ["UNISONO_CACHE"] = str(tmp_path)
    documents, queries = kind(MOST, 1), kind(QUERIES, 2)
    began = time.perf_counter()
    opened, exact = IndexSearch(documents), ExactSearch(documents)
    made_s = time.perf_counter() - began
    size_gib = next(tmp_path.glob("nearest/*/index.faiss")).stat().st_size / 2**30
    made = f"made in {made_s:.0f} s, {size_gib:.2f} GiB"
    for k in (10, 100):
        opened.tune(queries, k, 0.995, None)
        rates: dict[ExactSearch, list[float]] = {opened: [], exact: []}
        for search in (opened, exact) * ROUNDS:  # in turns
            began = time.perf_counter()
            best = search.search(queries, k).scores
            rates[search].append(QUERIES / (time.perf_counter() - began))
        recall = (opened.search(queries, k).scores >= best[:, -1:]).double().mean()
        ratio = np.median(np.divide(rates[opened], rates[exact]))
        ours, theirs = (f"{np.median(each):,.0f}" for each in rates.values())
        found = f"{ours} beside {theirs}/s, recall {recall:.4f}; {made}, {opened.facts}"
        print(f"{k} of {MOST:,} {kind.__name__}: {ratio:.1f} x, {found}")
        assert kind is uniform or MOST < 1_000_000 or (recall >= 0.99 and ratio >= 20)
