"""Texts that are collected over batches, and what is measured over them."""

import numpy as np
import pytest
import torch

from datamodules.search.bm25 import Bm25Options, open_bm25
from datamodules.search.collection import CollectionRequest, Judgements, open_collection
from datamodules.search.queries import JudgedQueries
from datamodules.search.retrieval import chosen_documents
from lit_models.seo.metrics import reciprocal_rank
from lit_models.seo.retriever import RetrievalEvaluation, graded
from tests.seo.retrieval_collection import write_collection

NAN = float("nan")
METRICS = ["ndcg@10", "mrr@10"]


def batch(texts, queries):
    """Texts as (number, is query, weight); queries as (judged, grade, first, score)."""
    number, is_query, weight = zip(*texts, strict=True)
    columns = zip(*queries, strict=True) if queries else [[], [], [], []]
    judged, grade, first, score = map(list, columns)
    return {
        "text_index": torch.tensor(number),
        "is_query": torch.tensor(is_query),
        "weight": torch.tensor(weight),
        "judged": torch.tensor(judged, dtype=torch.int64).reshape(-1, 2),
        "grade": torch.tensor(grade, dtype=torch.float32).reshape(-1, 2),
        "first_document": torch.tensor(first, dtype=torch.int64).reshape(-1, 2),
        "first_score": torch.tensor(score, dtype=torch.float32).reshape(-1, 2),
    }


def two_batches():
    """Query 4 finds document 20 first, query 2 finds document 10; the others follow."""
    queries = {
        4: ([10, 30], [1.0, 0.0], [20, 10], [3.0, 1.0]),
        2: ([10, -1], [2.0, NAN], [10, -1], [2.0, 0.0]),
    }
    first = batch([(4, True, 1.0), (20, False, 1.0), (4, True, 0.0)], [queries[4]] * 2)
    second = batch([(30, False, 1.0), (2, True, 1.0), (10, False, 1.0)], [queries[2]])
    vectors = {4: [0.6, 0.8], 2: [1.0, 0.0], 20: [0.0, 1.0], 10: [1.0, 0.0], 30: [-1.0, 0.0]}
    return [(torch.tensor([vectors[int(n)] for n in b["text_index"]]), b) for b in (first, second)]


@pytest.mark.parametrize("turned", [False, True])
def test_systems_are_measured_by_hand_in_any_order_of_batches(turned) -> None:
    evaluation, batches = RetrievalEvaluation(METRICS), two_batches()
    for vectors, part in batches[::-1] if turned else batches:
        evaluation.update(vectors, part)
    evaluation.search()
    assert evaluation.queries.id.tolist() == [2, 4]  # fillers are left out
    assert evaluation.num_documents == 3
    assert evaluation.queries.judged.tolist() == [[10, -1], [10, 30]]
    found = {n: float(m.compute()) for n, m in evaluation.measure(0.5).items()}
    # Query 2 finds its document first; query 4 behind document 20, in both rankings.
    assert found["mrr@10"] == found["bm25_mrr@10"] == found["fused_mrr@10"] == 0.75
    discounted = (1 + 1 / torch.log2(torch.tensor(3.0))) / 2
    assert found["ndcg@10"] == pytest.approx(float(discounted))
    assert evaluation.best_weight(reciprocal_rank) == 0.0


def test_one_text_alone_and_none_at_all_are_no_trouble() -> None:
    evaluation = RetrievalEvaluation(METRICS)
    (vectors, _), _ = two_batches()
    alone = batch([(4, True, 1.0)], [([1, 2], [1, 1], [1, 2], [2, 1])])
    evaluation.update(vectors[:1], alone)
    evaluation.search()
    assert evaluation.queries.id.shape == (1,)
    assert float(evaluation.measure(0.5)["fused_ndcg@10"].compute()) == 0.0
    evaluation = RetrievalEvaluation(METRICS)
    evaluation.update(vectors[1:2], batch([(20, False, 1.0)], []))
    evaluation.search()
    assert evaluation.best_weight(reciprocal_rank) == 0.0
    assert evaluation.measure(None)["ndcg@10"].compute().isnan()


def test_grades_are_found_wherever_they_stand() -> None:
    judged, grade = torch.tensor([[7, 3, -1]]), torch.tensor([[2.0, 0.0, NAN]])
    found = graded(torch.tensor([[3, 9, 7, -1, 1]]), judged, grade)[0]
    assert found[[0, 2]].tolist() == [0.0, 2.0]
    assert found[[1, 3, 4]].isnan().all()


def test_bm25_over_some_documents_is_its_search_without_the_others(tmp_path) -> None:
    request = CollectionRequest("beir", str(write_collection(tmp_path / "small")))
    collection = open_collection(request)
    index = open_bm25(collection, Bm25Options())
    judged = JudgedQueries(collection.judgements(2))
    documents = chosen_documents(judged, collection.num_documents, 3)
    of_queries = set(judged.judgements.document.tolist())
    assert len(documents) == len(of_queries) + 3
    assert of_queries <= set(documents.tolist())
    for number in judged.queries.tolist():
        query = collection.query(number)
        (hits,) = index.search([query], collection.num_documents)
        expected = [d for d in hits.documents[0].tolist() if d in set(documents.tolist())]
        (best,) = index.search([query], 10, among=documents)
        assert [d for d in best.documents[0].tolist() if d >= 0] == expected[:10]


def test_a_query_has_all_its_judgements() -> None:
    judged = JudgedQueries(Judgements(np.array([2, 2]), np.array([5, 8]), np.array([1.0, 0.0])))
    assert [values.tolist() for values in judged.judged(0)] == [[5, 8], [1, 0]]
    assert judged.with_relevant().most == judged.most == 2
