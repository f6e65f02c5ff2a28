"""Exact search against a plain sort: ties, chunks, memory maps."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lit_models.seo.search import search


def plainly(queries: np.ndarray, documents: np.ndarray, k: int) -> list[list[int]]:
    """Sort every product, the smaller number first among equals."""
    found = []
    for query in queries.astype(np.float64):
        scores = [float(np.float32(query @ document)) for document in documents.astype(np.float64)]
        found.append(sorted(range(len(documents)), key=lambda n: (-scores[n], n))[:k])
    return found


@pytest.mark.parametrize("documents_at_once", [1, 3, 7, 1000])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_it_finds_what_a_plain_sort_finds_whatever_the_chunks(
    documents_at_once: int, k: int
) -> None:
    rng = np.random.default_rng(0)
    # Few different numbers: many equal scores.
    queries, documents = (rng.integers(-1, 2, (n, 4)).astype(np.float32) for n in (6, 40))
    found = search(queries, documents, k, documents_at_once=documents_at_once, queries_at_once=4)
    assert found.documents.tolist() == plainly(queries, documents, k)
    scores = np.take_along_axis(queries @ documents.T, found.documents.numpy(), 1)
    assert np.array_equal(found.scores.numpy(), scores)


def test_chunks_change_no_bit_of_real_vectors() -> None:
    queries, documents = torch.randn(9, 33), torch.randn(300, 33)
    whole = search(queries, documents, 20)
    parts = search(queries, documents, 20, documents_at_once=17, queries_at_once=2)
    assert torch.equal(whole.documents, parts.documents)
    assert torch.equal(whole.scores, parts.scores)


def test_a_mapped_matrix_of_half_precision_is_searched_where_it_lies(tmp_path: Path) -> None:
    documents = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float16)
    np.save(tmp_path / "documents.npy", documents)
    mapped = np.load(tmp_path / "documents.npy", mmap_mode="r")
    found = search(documents[:3], mapped, 60, documents_at_once=8)
    assert found.documents.shape == (3, 50)
    assert found.documents.tolist() == plainly(documents[:3], documents, 50)


def test_wrong_input_is_refused() -> None:
    with pytest.raises(ValueError, match=r"k must be 1 or more, got 0"):
        search(torch.ones(1, 2), torch.ones(1, 2), 0)
    with pytest.raises(ValueError, match=r"queries have 3 dimensions and documents 2; encode both"):
        search(torch.ones(1, 3), torch.ones(1, 2), 1)
    assert search(torch.ones(2, 3), torch.ones(0, 3), 4).documents.shape == (2, 0)
