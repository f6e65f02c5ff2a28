"""Exact search against a plain sort: ties, chunks, memory maps."""

from pathlib import Path

import numpy as np
import pytest
import torch

from lit_models.seo.retriever import search


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


def test_ties_that_float32_cannot_tell_apart_are_told_by_their_scores() -> None:
    """Products of positive numbers, whose float32 sums lose most: without the bound, 8 of the 20
    queries find other documents."""
    rng = np.random.default_rng(0)
    queries = rng.uniform(size=(20, 768))
    documents = np.repeat(rng.uniform(size=(30, 768)), 40, axis=0)
    documents *= 1 + rng.uniform(3e-7, 1e-6, size=documents.shape)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    documents = rng.permutation(documents / np.linalg.norm(documents, axis=1, keepdims=True))
    found = search(queries, documents, 30, documents_at_once=200)
    assert found.documents.tolist() == plainly(queries, documents, 30)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    queries, documents = torch.randn(9, 33), torch.randn(300, 33)
    expected = search(queries, documents, 20, documents_at_once=60)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        found = search(queries, documents, 20, documents_at_once=60)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(found.documents, expected.documents)
    assert torch.equal(found.scores, expected.scores)


def test_equal_documents_far_apart_have_equal_scores() -> None:
    """Whichever way a chunk goes; their products may lie beside the middle of two float32."""
    rng = np.random.default_rng(0)
    documents = rng.normal(size=(600, 33))
    documents[450] = documents[50]
    queries = documents[50:51] + 1e-3 * rng.normal(size=(200, 33))
    found = search(queries, documents, 5, documents_at_once=100)
    assert found.documents[:, :2].tolist() == [[50, 450]] * 200
    assert torch.equal(found.scores[:, 0], found.scores[:, 1])


def test_documents_that_only_rise_or_fall_are_found() -> None:
    documents = np.linspace(0.5, 1.0, 600)[:, None] * np.ones((1, 8))
    for turned, best in ((documents, range(599, 594, -1)), (documents[::-1].copy(), range(5))):
        found = search(np.ones((2, 8)), turned, 5, documents_at_once=100)
        assert found.documents.tolist() == [[*best]] * 2


def test_what_is_no_number_is_found_whatever_the_chunks() -> None:
    documents = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    documents[41] = np.nan
    whole = search(documents[:2], documents, 3)
    parts = search(documents[:2], documents, 3, documents_at_once=10)
    assert whole.documents.tolist() == parts.documents.tolist()
    assert whole.documents[:, 0].tolist() == [41, 41]


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
