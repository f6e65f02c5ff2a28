"""FAISS candidates with the scores of exact search, their recall, and their index."""

import json
import sys

import pytest
import torch

from lit_models.seo import nearest
from lit_models.seo.nearest import ExactSearch, IndexSearch, SearchOptions
from tests.distributed.seo_retriever import retriever
from tests.search_collections import write_collection
from tests.seo.nearest.test_search_speed import clustered
from tests.toy import toy_trainer

DOCUMENTS, QUERIES = clustered(3000, 1, 24, 30), clustered(200, 2, 24, 30)


@pytest.fixture
def faiss():
    return pytest.importorskip("faiss", reason="extra: search")


def test_scores_are_those_of_the_exact_search_and_the_recall_is_as_stated(faiss):
    exact = ExactSearch(DOCUMENTS).search(QUERIES, len(DOCUMENTS))
    score_of = torch.empty_like(exact.scores).scatter(1, exact.documents, exact.scores)
    opened, work = IndexSearch(DOCUMENTS), []
    for least in (0.5, 0.9, 0.99):
        opened.tune(QUERIES, 10, least, None)
        found = opened.search(QUERIES, 10)
        assert torch.equal(found.scores, score_of.gather(1, found.documents))
        assert (found.scores.diff(dim=1) <= 0).all()
        recall = (found.documents[:, :, None] == exact.documents[:, None, :10]).any(2).double()
        assert opened.facts["recall"] == pytest.approx(recall.mean().item())
        assert least <= opened.facts["recall"]
        work.append(opened.facts["work"])
        # The results depend on the query only.
        alone = [opened.search(query[None], 10).documents for query in QUERIES[:20]]
        assert torch.equal(found.documents[:20], torch.cat(alone))
    assert work[0] <= work[1] <= work[2] <= opened.facts["most_work"]
    few = IndexSearch(DOCUMENTS[:4])
    few.tune(QUERIES, 9, 1.0, None)
    assert few.search(QUERIES, 9).documents.sort().values.tolist() == [[-1] * 5 + [*range(4)]] * 200


def test_an_index_is_made_once_and_equal_by_any_threads(faiss, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(nearest, "ROUNDS", 2)
    for number in (1, 2, torch.get_num_threads()):  # the default number last
        monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / str(number)))
        torch.set_num_threads(number)
        IndexSearch(DOCUMENTS[:500])
    contents = {path.read_bytes() for path in tmp_path.glob("*/nearest/*/index.faiss")}
    assert (len(contents), caplog.text.count("500 documents is made")) == (1, 2)
    IndexSearch(DOCUMENTS[:501])
    assert "501 documents is made" in caplog.text


def test_wrong_options_say_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError, match=r"needs FAISS: pip install 'unisono\[search\]'"):
        SearchOptions("ivf")
    with pytest.raises(ValueError, match=r"search\.recall must be above 0 and at most 1, got 1\.5"):
        SearchOptions(recall=1.5)


def test_an_index_is_taken_where_it_is_quicker(faiss, caplog):
    exact, queries = ExactSearch(DOCUMENTS[:600]), QUERIES[:40]
    for k, kind in ((10, IndexSearch), (400, ExactSearch)):  # of 400, most lists are read
        assert type(SearchOptions("ivf").opened(exact, queries, k, None)) is kind
    log = " ".join(caplog.messages)
    approximate = log.index("search is approximate: {'kind': 'ivf', 'documents': 600, 'work': ")
    assert approximate < log.index("search is exact, since an index would take longer: {")


def test_a_prediction_says_what_it_may_miss(faiss, tmp_path, monkeypatch):
    monkeypatch.setattr(nearest, "MOST_WORK", 1.0)
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
    vectors = module.encode(["salt", "old iron", "cheap mill by weight"], False)
    index = module.index(vectors, module.encode(["iron"], True), 2)
    found = module.search(["iron"], index, 2)
    assert all(map(torch.equal, found, module.search(["iron"], vectors, 2)))
