"""Candidates of FAISS with the scores of the exact search, their recall, and their index."""

import json
import sys

import numpy as np
import pytest
import torch

from lit_models.seo.nearest import ivf
from lit_models.seo.nearest.exact import ExactSearch
from lit_models.seo.nearest.ivf import IvfSearch, SearchOptions
from tests.distributed.seo_retriever import retriever
from tests.nearest.shards import assert_sharded_search_is_exact
from tests.seo.retrieval_collection import write_collection
from tests.toy import toy_trainer


@pytest.fixture
def faiss():
    return pytest.importorskip("faiss", reason="extra: search")


def vectors(number: int, seed: int, width: int = 24, topics: int = 30) -> np.ndarray:
    """Return unit vectors around topics."""
    centres = np.random.default_rng(0).normal(size=(topics, width))
    rng = np.random.default_rng(seed)
    spread = centres[rng.integers(topics, size=number)] + 0.5 * rng.normal(size=(number, width))
    return (spread / np.linalg.norm(spread, axis=1, keepdims=True)).astype(np.float32)


DOCUMENTS, QUERIES = vectors(3000, 1), vectors(200, 2)


def test_documents_have_the_score_bits_of_the_exact_search(faiss):
    opened = SearchOptions("ivf", recall=0.9).opened(DOCUMENTS, QUERIES, 10, "cpu", None)
    exact = ExactSearch(DOCUMENTS).search(QUERIES, len(DOCUMENTS))
    score_of = torch.empty_like(exact.scores).scatter(1, exact.documents, exact.scores)
    found = opened.search(QUERIES, 10)
    assert torch.equal(found.scores, score_of.gather(1, found.documents))
    assert (found.scores.diff(dim=1) <= 0).all()
    # Nothing but the query decides what it finds.
    alone = torch.cat([opened.search(query[None], 10).documents for query in QUERIES[:20]])
    assert torch.equal(found.documents[:20], alone)


def test_recall_is_that_of_a_plain_sort_and_as_high_as_asked_for(faiss, caplog):
    best = np.argsort(-(QUERIES.astype(float) @ DOCUMENTS.T.astype(float)), 1)[:, :10]
    opened, lists_read = IvfSearch(DOCUMENTS), []
    for least in (0.5, 0.9, 1.0):
        opened.tune(QUERIES, 10, least, None)
        found = opened.search(QUERIES, 10).documents.numpy()
        recall = (found[:, :, None] == best[:, None]).any(2).mean()
        assert opened.facts["recall"] == pytest.approx(recall)
        assert recall >= least
        assert f"approximate, measured with 200 queries: {opened.facts}" in caplog.text
        lists_read.append(opened.facts["lists_read"])
    assert lists_read[0] < lists_read[1] < lists_read[2] <= opened.facts["lists"] == 219
    few, expected = IvfSearch(DOCUMENTS[:4]), ExactSearch(DOCUMENTS[:4]).search(QUERIES, 9)
    few.tune(QUERIES, 9, 1.0, None)
    assert torch.equal(few.search(QUERIES, 9).documents[:, :4], expected.documents)
    assert (few.search(QUERIES, 9).documents[:, 4:] == -1).all()


def test_an_index_is_made_once_and_the_same_by_any_number_of_threads(faiss, tmp_path, monkeypatch):
    written, write = [], ivf._write
    monkeypatch.setattr(ivf, "_write", lambda *those: (write(*those), written.append(those[1])))
    monkeypatch.setattr(ivf, "ROUNDS", 2)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / str(number)))
            torch.set_num_threads(number)
            IvfSearch(DOCUMENTS[:500])
            IvfSearch(DOCUMENTS[:500])
    finally:
        torch.set_num_threads(threads)
    one, other = (path.read_bytes() for path in tmp_path.glob("*/nearest/*/index.faiss"))
    assert one == other
    assert len(written) == 2
    IvfSearch(DOCUMENTS[:501])
    assert len(written) == 3


def test_without_faiss_auto_is_exact_and_says_so_and_ivf_says_what_to_install(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.setattr(ivf, "MOST_EXACT", 100)
    opened = SearchOptions("auto").opened(DOCUMENTS, QUERIES, 10, "cpu", None)
    assert type(opened) is ExactSearch
    assert "3000 documents are searched exactly" in caplog.text
    with pytest.raises(ValueError, match=r"needs FAISS: pip install 'unisono\[search\]'"):
        SearchOptions("ivf")
    with pytest.raises(ValueError, match=r"search\.recall must be above 0 and at most 1, got 1\.5"):
        SearchOptions(recall=1.5)


def test_an_index_is_taken_above_a_number_of_documents_where_it_is_quicker(faiss, monkeypatch):
    def kind(recall: float, k: int = 10) -> type:
        options = (DOCUMENTS[:600], QUERIES[:40], k, "cpu", None)
        return type(SearchOptions("auto", recall).opened(*options))

    assert kind(0.9) is ExactSearch
    monkeypatch.setattr(ivf, "MOST_EXACT", 100)
    assert kind(0.9) is IvfSearch
    assert kind(1.0, k=400) is ExactSearch  # which would read most lists


def test_a_prediction_says_what_it_may_miss(faiss, tmp_path, monkeypatch):
    monkeypatch.setattr(ivf, "MOST_READ", 1.0)
    write_collection(tmp_path / "collection")
    runs = {}
    for kind in ("exact", "ivf"):
        folder = tmp_path / kind
        torch.manual_seed(1)
        module, data = retriever(folder, {}, search=SearchOptions(kind, recall=1.0))
        trainer = toy_trainer(folder, max_steps=1)
        trainer.fit(module, data)
        trainer.predict(module, data, return_predictions=False)
        runs[kind] = (folder / "coded.encoded" / "run.trec").read_bytes()
    facts = json.loads((folder / "coded.encoded" / "search.json").read_text())
    assert (facts["kind"], facts["recall"], facts["documents"]) == ("ivf", 1.0, 40)
    assert not (tmp_path / "exact" / "coded.encoded" / "search.json").exists()
    assert runs["exact"] == runs["ivf"]
    texts = [document.whole for document in data.collection.documents]
    vectors = module.encode(texts, False)
    index = module.index(vectors, vectors, 5)
    assert isinstance(index, IvfSearch)
    found = module.search(texts[:3], index, 5)
    assert all(map(torch.equal, found, module.search(texts[:3], vectors, 5)))


def test_one_rank_with_all_documents_is_a_plain_search():
    assert_sharded_search_is_exact(0, 1)
