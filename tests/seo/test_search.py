"""Exact search, fusion with BM25 and evaluation, by hand and beside a plain sort."""

import numpy as np
import pytest
import torch

from datamodules.search.candidates import Bm25Options, Hits, open_bm25
from datamodules.search.collection import CollectionRequest, open_collection
from datamodules.search.queries import Queries, QueryJudgements
from datamodules.search.retrieval import chosen_documents
from lit_models.seo import nearest
from lit_models.seo.nearest import ExactSearch
from lit_models.seo.retriever import RetrievalEvaluation, fused
from tests.search_collections import write_collection


def chunks(patch: pytest.MonkeyPatch, documents: int, queries: int = 256) -> None:
    """Search with so many rows at once, and hardly more documents than are returned."""
    patch.setattr(nearest, "SPARE", 1)
    patch.setattr(nearest, "DOCUMENTS_AT_ONCE", documents)
    patch.setattr(nearest, "QUERIES_AT_ONCE", queries)


def plainly(queries: np.ndarray, documents: np.ndarray, k: int) -> list[list[int]]:
    """Sort all products; of equal ones the smaller number comes first."""
    scores = -(queries.astype(np.float64)[:, None] * documents.astype(np.float64)).sum(-1)
    return scores.astype(np.float32).argsort(axis=1, kind="stable")[:, :k].tolist()


@pytest.mark.parametrize("documents_at_once", [1, 3, 7, 1000])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_exact_search_equals_a_plain_sort_for_any_chunks(documents_at_once, k, monkeypatch):
    chunks(monkeypatch, documents_at_once, 4)
    rng = np.random.default_rng(0)
    # Few distinct numbers, so that many scores are equal.
    queries, documents = (rng.integers(-1, 2, (n, 4)).astype(np.float32) for n in (6, 40))
    found = ExactSearch(documents).search(queries, k)
    assert found.documents.tolist() == plainly(queries, documents, k)
    scores = np.take_along_axis(queries @ documents.T, found.documents.numpy(), 1)
    assert np.array_equal(found.scores.numpy(), scores)


def test_scores_that_float32_products_confuse_are_ordered_in_float64(monkeypatch):
    """Products of positive numbers, whose float32 sums lose the most digits."""
    chunks(monkeypatch, 200)
    rng = np.random.default_rng(0)
    queries = rng.uniform(size=(20, 768))
    documents = np.repeat(rng.uniform(size=(30, 768)), 40, axis=0)
    documents *= 1 + rng.uniform(3e-7, 1e-6, size=documents.shape)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    documents = rng.permutation(documents / np.linalg.norm(documents, axis=1, keepdims=True))
    found = ExactSearch(documents).search(queries, 30)
    assert found.documents.tolist() == plainly(queries, documents, 30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-22, 1.0, 1e19])  # products underflow or overflow
def test_chunks_dtypes_and_precisions_change_no_bit(dtype, scale, monkeypatch):
    queries, documents = (scale * torch.randn(n, 33) for n in (40, 300))
    products = (queries.double() @ documents.double().T).float()
    scores, numbers = products.sort(dim=1, descending=True, stable=True)
    chunks(monkeypatch, 64, 32)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            found = ExactSearch(documents).search(queries, 20)
    finally:
        torch.set_default_dtype(before)
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(found.documents, numbers[:, :20])
    assert torch.equal(found.scores, scores[:, :20])


def test_documents_with_nan_come_first_for_any_chunks(monkeypatch):
    documents = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    documents[41] = np.nan
    whole = ExactSearch(documents).search(documents[:2], 3)
    chunks(monkeypatch, 10)
    parts = ExactSearch(documents).search(documents[:2], 3)
    assert whole.documents.tolist() == parts.documents.tolist()
    assert whole.documents[:, 0].tolist() == [41, 41]


def test_a_mapped_matrix_of_half_precision_is_searched_where_it_lies(tmp_path, monkeypatch):
    chunks(monkeypatch, 8)
    documents = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float16)
    np.save(tmp_path / "documents.npy", documents)
    mapped = np.load(tmp_path / "documents.npy", mmap_mode="r")
    found = ExactSearch(mapped).search(documents[:3], 60)
    assert found.documents.shape == (3, 50)
    assert found.documents.tolist() == plainly(documents[:3], documents, 50)
    with pytest.raises(ValueError, match="search.k must be at least 1, got 0"):
        ExactSearch(mapped).search(documents, 0)
    with pytest.raises(ValueError, match="queries have 7 numbers and documents 8: encode both"):
        ExactSearch(mapped).search(documents[:, 1:], 1)


def test_a_document_of_both_rankings_has_the_sum_of_both():
    """Each query's scores are first scaled to 0 to 1; a ranking that is not full ends at 0."""
    documents = torch.tensor([[7, 2, 5], [7, 2, 5]])
    scores = torch.tensor([[0.9, 0.5, 0.1], [2.0, 2.0, 2.0]])
    first = torch.tensor([[5, 9, -1], [5, 9, 8]])
    first_scores = torch.tensor([[4.0, 1.0, 0.0], [5.0, 3.0, 1.0]])
    found, values = fused(documents, scores, first, first_scores, weight=0.25)
    pairs = [
        {d: v for d, v in zip(*row, strict=True) if d >= 0}
        for row in zip(found.tolist(), values.tolist(), strict=True)
    ]
    assert pairs[0] == pytest.approx({7: 0.75, 2: 0.75 * 0.5, 5: 0.25, 9: 0.25 * 0.25})
    assert pairs[1] == pytest.approx({7: 0.75, 2: 0.75, 5: 1.0, 9: 0.25 * 0.5, 8: 0.0})


NAN = float("nan")


KNOWN = {  # query -> judged documents, their grades, BM25's documents and scores
    2: ([10, -1], [2.0, NAN], [10, -1], [2.0, 0.0]),
    4: ([10, 30], [1.0, 0.0], [20, 10], [3.0, 1.0]),
}


def known(numbers: np.ndarray) -> tuple[QueryJudgements, Hits]:
    """Return the known documents, as `TextsDataset.known` does."""
    rows = [KNOWN[number] for number in numbers.tolist()]
    judged, grades, first, scores = np.array(rows, np.float32).reshape(-1, 4, 2).swapaxes(0, 1)
    return QueryJudgements(judged.astype(int), grades), Hits(first.astype(int), scores)


def batch(*texts):
    """Return texts, given as (number, is query, weight), and their vectors."""
    vectors = {4: [0.6, 0.8], 2: [1.0, 0.0], 20: [0.0, 1.0], 10: [1.0, 0.0], 30: [-1.0, 0.0]}
    number, is_query, weight = map(torch.tensor, zip(*texts, strict=True))
    columns = {"text_index": number, "is_query": is_query, "weight": weight}
    return torch.tensor([vectors[n] for n in number.tolist()]), columns


@pytest.mark.parametrize("turned", [False, True])
def test_systems_are_measured_by_hand_in_any_order_of_batches(turned):
    """Query 4 finds document 20 first, query 2 finds document 10; the others follow."""
    first = batch((4, True, 1.0), (20, False, 1.0), (4, True, 0.0))
    second = batch((30, False, 1.0), (2, True, 1.0), (10, False, 1.0))
    evaluation = RetrievalEvaluation()
    for vectors, part in (second, first) if turned else (first, second):
        evaluation.update(vectors, part)
    evaluation.search(known)
    assert evaluation.numbers.tolist() == [2, 4]  # without fillers
    assert evaluation.num_documents == 3
    assert evaluation.judged.tolist() == [[10, -1], [10, 30]]
    found = {n: float(mean) for n, mean in evaluation.measure(0.5).items()}
    # Query 2 finds its document first; query 4 finds it after document 20, in both rankings.
    assert found["mrr@10"] == found["bm25_mrr@10"] == found["fused_mrr@10"] == 0.75
    discounted = (1 + 1 / torch.log2(torch.tensor(3.0))) / 2
    assert found["ndcg@10"] == pytest.approx(float(discounted))
    assert evaluation.best_weight() == 0.0


def test_an_evaluation_may_have_one_query_or_none():
    evaluation = RetrievalEvaluation()
    evaluation.update(*batch((4, True, 1.0)))
    evaluation.search(known)
    assert evaluation.numbers.tolist() == [4]
    assert float(evaluation.measure(0.5)["fused_ndcg@10"]) == 0.0
    evaluation = RetrievalEvaluation()
    evaluation.update(*batch((20, False, 1.0)))
    evaluation.search(known)
    assert evaluation.best_weight() == 0.0
    assert evaluation.measure(None)["ndcg@10"].isnan()


def test_bm25_over_some_documents_is_its_search_without_the_others(tmp_path):
    collection = open_collection(CollectionRequest(str(write_collection(tmp_path / "small"))))
    index = open_bm25(collection, Bm25Options())
    judged = Queries(collection.queries, collection.fingerprint, collection.judgements(2))
    documents = chosen_documents(judged, len(collection.documents), 3)
    of_queries = set(judged.judgements.document.tolist())
    assert len(documents) == len(of_queries) + 3
    assert of_queries <= set(documents.tolist())
    for query in judged:
        hits = index.search([query.text], len(collection.documents))
        expected = [d for d in hits.documents[0].tolist() if d in set(documents.tolist())]
        best = index.search([query.text], 10, among=documents)
        assert [d for d in best.documents[0].tolist() if d >= 0] == expected[:10]
