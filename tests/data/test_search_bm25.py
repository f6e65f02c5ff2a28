"""BM25 equals a slow plain reference, breaks ties by number, and gives Cranfield's figures."""

import json
import math
import pickle
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules.files.splitting import VALIDATION
from datamodules.search.candidates import Bm25, Bm25Options, open_bm25
from datamodules.search.collection import Collection, CollectionRequest, open_collection
from tests.search_collections import write_beir, write_lines

CRANFIELD = Path(__file__).parents[3] / "shared" / "data" / "cranfield"
TEXTS = ["a b a c", "b c", "a", "d d d d d d", "", "B, c!", "a b a c"]


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> Collection:
    folder = write_beir(tmp_path_factory.mktemp("beir"))
    rows = [{"_id": f"d{i + 1}", "title": "e" * (i == 1), "text": t} for i, t in enumerate(TEXTS)]
    write_lines(folder / "corpus.jsonl", *map(json.dumps, rows))
    return open_collection(CollectionRequest(str(folder)))


def reference(collection: Collection, query: str, k1: float, b: float) -> list[float]:
    """Score every document by the paper's formula, one word after the other."""

    def cut(text: str) -> list[str]:
        return re.findall(r"\w+", text.lower())

    texts = [cut(f"{document.title} {document.text}") for document in collection.documents]
    mean = sum(map(len, texts)) / len(texts)
    scores = []
    for words in texts:
        score = 0.0
        for word in cut(query):
            frequency = sum(word in other for other in texts)
            if frequency:
                idf = math.log(1 + (len(texts) - frequency + 0.5) / (frequency + 0.5))
                count = Counter(words)[word]
                score += idf * count / (count + k1 * (1 - b + b * len(words) / mean))
        scores.append(score)
    return scores


def best(index: Bm25, query: str, k: int) -> tuple[list[int], list[float]]:
    hits = index.search([query], k)
    return hits.documents[0].tolist(), hits.scores[0].tolist()


@pytest.mark.parametrize("query", ["a", "a b", "b b c", "d e x", "A, B?", "x", ""])
@pytest.mark.parametrize(("k1", "b"), [(0.9, 0.4), (1.2, 0.75), (0.1, 0.9)])
def test_scores_equal_a_plain_reference(collection, query: str, k1: float, b: float) -> None:
    index = open_bm25(collection, Bm25Options(k1, b))
    expected = np.array(reference(collection, query, k1, b))
    np.testing.assert_allclose(index.scores(query, np.arange(7)), expected, rtol=1e-6)
    chosen = np.array([6, 0, 3, 3])
    np.testing.assert_allclose(index.scores(query, chosen), expected[chosen], rtol=1e-6)
    documents, scores = best(index, query, 7)
    num_hits = int((expected > 0).sum())
    assert documents[num_hits:] == [-1] * (7 - num_hits)
    np.testing.assert_allclose(scores[:num_hits], expected[documents[:num_hits]], rtol=1e-6)
    assert scores[:num_hits] == sorted(scores[:num_hits], reverse=True)
    assert sorted(documents[:num_hits]) == np.flatnonzero(expected).tolist()


def test_another_version_of_the_stemmer_makes_another_index(collection, monkeypatch) -> None:
    plain, stemmed = Bm25Options(), Bm25Options(stemmer="english")
    before = [open_bm25(collection, options).folder for options in (plain, stemmed)]
    monkeypatch.setattr("datamodules.text.encoding.version", lambda name: "another")
    now = [open_bm25(collection, options).folder for options in (plain, stemmed)]
    assert [now[0] == before[0], now[1] == before[1]] == [True, False]


def test_equal_scores_come_in_the_order_of_documents(collection: Collection) -> None:
    index = open_bm25(collection, Bm25Options(b=0.0))
    assert best(index, "b", 5)[0] == [0, 1, 5, 6, -1]
    assert best(index, "b", 2)[0] == [0, 1]
    assert best(index, "a", 2)[0] == [0, 6]


def test_a_pickled_index_gives_the_same(collection: Collection) -> None:
    index = open_bm25(collection, Bm25Options(stopwords="english"))
    assert best(pickle.loads(pickle.dumps(index)), "a b c", 7) == best(index, "a b c", 7)


def test_stopwords_and_stems_are_options() -> None:
    assert Bm25Options(stopwords="english").words()("What is the Lift?") == ["lift"]
    assert Bm25Options(stemmer="english").words()("running wings") == ["run", "wing"]
    with pytest.raises(ValueError, match='there is no stemmer of "klingon"; there are: arabic'):
        Bm25Options(stemmer="klingon").words()


@pytest.mark.real_data
@pytest.mark.skipif(not CRANFIELD.exists(), reason="needs ../shared/data/cranfield")
def test_cranfield_has_the_known_figures() -> None:
    from lit_models.seo.metrics import ndcg, rank_queries, reciprocal_rank

    collection = open_collection(CollectionRequest(str(CRANFIELD)))
    judged = collection.judgements(VALIDATION)
    queries = np.unique(judged.query)
    index = open_bm25(collection, Bm25Options(k1=0.9, b=0.4))
    hits = index.search([collection.queries[q].text for q in queries.tolist()], 100)
    grades = np.zeros((len(queries), len(collection.documents)))
    all_grades = np.full(grades.shape, -1.0)
    row = np.searchsorted(queries, judged.query)
    grades[row, judged.document] = all_grades[row, judged.document] = judged.grade
    documents = torch.from_numpy(hits.documents)
    ranked = rank_queries(
        torch.from_numpy(hits.scores),
        torch.from_numpy(grades).gather(1, documents.clamp(min=0)),
        documents >= 0,
        torch.from_numpy(all_grades),
    )
    assert ndcg(ranked, 10).mean().item() == pytest.approx(0.343, abs=5e-4)
    assert reciprocal_rank(ranked, 10).mean().item() == pytest.approx(0.491, abs=5e-4)
