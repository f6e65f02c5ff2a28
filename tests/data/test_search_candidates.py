"""Candidates of a query: drawn for training, listed by a first stage, or judged; TREC run files are
written whole, read back equal, and wrong lines are named."""

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules.core.plan import rng_for
from datamodules.core.store import cache_root
from datamodules.search import candidates as candidates_file
from datamodules.search.candidates import Bm25Options, CandidateOptions, GroupOptions, open_bm25
from datamodules.search.collection import CollectionRequest, open_collection
from datamodules.search.formats import CollectionFiles
from datamodules.search.queries import Ranking, read_run, write_run
from datamodules.search.ranking import RankingDataset
from tests.search_collections import SIZES, write_collection, write_lines, write_qrels
from tests.seo.small_collection import ranking_data

MINED = GroupOptions(size=6, mined=3, unjudged_as_negative=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_collection(tmp_path_factory.mktemp("collection"))


@pytest.fixture(scope="module")
def collection(folder):
    return open_collection(CollectionRequest(str(folder)))


def built(folder, stage, **options):
    data = ranking_data(folder, **options)
    data.setup("fit" if stage in ("train", "validation") else stage)
    return data.datasets[stage]


def drawn(data, place, epoch=0):
    """Return documents, grades and priors of one query's candidates."""
    batch = data.batch(np.array([place]), epoch)
    is_there, documents = batch["pair_index"][0] >= 0, documents_of(data, place, epoch)
    return (documents, *(batch[name][0][is_there].numpy() for name in ("relevance", "prior")))


def documents_of(data, place, epoch):
    """Return one query's candidates."""
    return data.graded(place, rng_for(data.seed, epoch, place))[0]


def test_a_group_has_a_relevant_document_judged_ones_and_mined_ones():
    grades = np.array([0, 0, 0, 2, 0, 1], np.float32)
    sizes = Counter()
    for epoch in range(200):
        places = MINED.draw(grades, num_minable=5, rng=rng_for(1, epoch, 7))
        assert len(set(places.tolist())) == 6
        assert (grades[places[places < 6]] > 0).any()
        sizes[int((places < 6).sum())] += 1
        again = MINED.draw(grades, num_minable=5, rng=rng_for(1, epoch, 7))
        assert places.tolist() == again.tolist()
    assert sizes == {3: 200}
    seen = {tuple(MINED.draw(grades, 5, rng_for(1, epoch, 7))) for epoch in range(20)}
    assert len(seen) > 15  # each epoch draws anew


@pytest.mark.parametrize(
    ("num_judged", "num_minable", "expected"), [(2, 9, (2, 4)), (9, 1, (3, 1)), (1, 0, (1, 0))]
)
def test_places_that_judged_documents_leave_go_to_mined_ones(num_judged, num_minable, expected):
    places = MINED.draw(np.ones(num_judged), num_minable, rng_for(0, 0, 0))
    assert (int((places < num_judged).sum()), int((places >= num_judged).sum())) == expected
    assert MINED.sizes(num_judged, num_minable) == expected  # as the plan expects


def test_no_judged_document_is_mined_and_the_first_ranks_are_passed_over():
    options = GroupOptions(size=6, mined=3, after_rank=2, unjudged_as_negative=True)
    listed, judged = np.array([9, 4, 7, 1, 3]), np.array([1, 4])
    assert options.minable(listed, judged).tolist() == [7, 3]
    assert GroupOptions().minable(listed, judged).tolist() == []


def test_mined_candidates_count_as_irrelevant(folder, collection):
    data = built(folder, "train", candidates=CandidateOptions("bm25", top=10), groups=MINED)
    for place in range(len(data.lengths)):
        (documents, grades, _), judged = drawn(data, place), data.queries.judged(place)
        is_mined = ~np.isin(documents, judged.documents)
        assert (np.diff(documents) > 0).all()
        assert is_mined.any()
        assert (grades[is_mined] == 0).all()
        grade_of = dict(zip(*map(np.ndarray.tolist, judged), strict=True))
        expected = [grade_of[document] for document in documents[~is_mined].tolist()]
        assert grades[~is_mined].tolist() == expected
        assert np.isin(documents[is_mined], data.listed(place)).all()


def test_the_first_stage_of_judged_documents_is_bm25(folder, collection):
    data = built(folder, "test")
    bm25 = open_bm25(collection, Bm25Options())
    for place in (0, 5):
        documents, _, prior = drawn(data, place)
        expected = bm25.scores(data.queries[place].text, documents)
        assert data.first_scores(place, documents) == pytest.approx(expected)
        spread = (expected - expected.mean()) / (expected.std() or 1)
        assert prior == pytest.approx(spread, abs=1e-5)


def test_the_prior_of_a_candidate_is_the_same_in_training_and_evaluation(folder):
    options = {"candidates": CandidateOptions("bm25", top=10), "groups": MINED}
    train = built(folder, "train", **options)
    facts = (train.collection, train.encoding, train.queries, train.options, Bm25Options())
    whole = RankingDataset(*facts, "validation")
    for place in range(5):
        documents, _, priors = drawn(whole, place)
        known = dict(zip(documents.tolist(), priors.tolist(), strict=True))
        documents, _, priors = drawn(train, place, 3)
        for document, prior in zip(documents.tolist(), priors.tolist(), strict=True):
            assert prior == pytest.approx(known.get(document, prior), abs=1e-6)


def test_candidates_of_a_run_keep_all_judgements_for_the_ideal_ranking(folder, tmp_path):
    rankings = [Ranking("test-0", ["d5", "d1", "d7"], [3, 2, 1]), Ranking("train-0", ["d1"], [1])]
    write_run(tmp_path / "first.trec", rankings)
    options = CandidateOptions("run", top=2, run=str(tmp_path / "first.trec"))
    data = built(folder, "test", candidates=options)
    documents, _, prior = drawn(data, 0)
    assert data.queries[0].id == "test-0"
    assert documents.tolist() == [1, 5]
    assert prior.tolist() == [-1.0, 1.0]
    batch = data.batch(np.array([0]), 0)
    assert batch["baselines"]["first"].tolist() == [[2.0, 3.0]]
    assert batch["all_relevance"][0].tolist() == data.queries.judged(0).grades.tolist()
    batch = data.batch(np.array([1, 1]), 0)  # missing from the run: counts, with score 0
    assert batch["pair_index"].tolist() == [[-1], [-1]]
    assert batch["input_ids"].shape == (1, 3)  # marks
    assert sorted(batch["baselines"]) == ["bm25", "first"]
    # Documents outside its list get the lowest score of the run.
    assert data.first_scores(0, np.array([5, 6])).tolist() == [3.0, 2.0]


def test_other_queries_of_equal_number_are_another_prediction(folder, tmp_path):
    files = {p: str(write_qrels(tmp_path / f"{p}.tsv", [(f"{p}-0", "d2", "1")])) for p in SIZES}
    request, digests = CollectionRequest(str(folder), CollectionFiles(**files)), set()
    for part in ("validation", "test"):
        data = ranking_data(folder, collection=request, predict_part=part)
        data.setup("fit")  # it knows how texts are read
        data.setup("predict")
        digests.add(data.request("predict").digest())
    assert len(digests) == 2


def test_the_rows_of_a_group_are_those_of_its_texts_the_longest_first(folder):
    data = built(folder, "train", candidates=CandidateOptions("bm25", top=10), groups=MINED)
    data = pickle.loads(pickle.dumps(data))  # as passed to a worker that is not forked
    encoding, encode = data.encoding, data.encoding.ids
    for places in ([0], [4, 0, 9]):
        batch = data.batch(np.array(places), 2)
        lengths = batch["pair_lengths"].tolist()
        assert lengths == sorted(batch["attention_mask"].sum(1).tolist(), reverse=True)
        assert sorted(batch["pair_index"][batch["pair_index"] >= 0]) == list(range(len(lengths)))
        for row, place in enumerate(places):
            query, index = encode(data.queries[place].text), batch["pair_index"][row]
            documents = documents_of(data, place, 2).tolist()
            assert (index[len(documents) :] == -1).all()
            for document, number in zip(documents, index[index >= 0].tolist(), strict=True):
                text = encode(data.collection.documents[document].whole)
                expected = encoding.rows([text], [query])["input_ids"][0]
                assert torch.equal(batch["input_ids"][number, : lengths[number]], expected)


def test_copies_of_a_document_have_one_row_in_evaluation_and_so_one_score(folder):
    data, rows_of = built(folder, "validation", candidates=CandidateOptions("bm25", top=40)), []
    for place, rows in enumerate(data.batch(np.arange(7), 0)["pair_index"].tolist()):
        documents = documents_of(data, place, 0).tolist()
        rows_of.append({row for row, n in zip(rows, documents, strict=False) if n in (38, 39)})
    assert {len(rows) for rows in rows_of} == {1}


def test_the_lists_of_bm25_are_kept_until_its_scoring_changes(folder, monkeypatch):
    options = {"candidates": CandidateOptions("bm25", top=7)}
    before = built(folder, "test", **options).lists
    kept = cache_root() / "candidates" / before.fingerprint
    assert np.load(kept / "documents.npy").shape[1] == 7
    assert built(folder, "test", **options).lists.fingerprint == before.fingerprint
    monkeypatch.setattr(candidates_file, "BM25_VERSION", candidates_file.BM25_VERSION + 1)
    assert built(folder, "test", **options).lists.fingerprint != before.fingerprint


RANKINGS = [Ranking("q1", ["a", "b"], [0.1 + 0.2, -1e-30]), Ranking("q2", ["a"], [3.0])]


def test_a_run_is_written_in_six_columns_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "mine.run"
    write_run(path, RANKINGS)
    assert path.read_text().splitlines() == [
        "q1 Q0 a 1 0.30000000000000004 unisono",
        "q1 Q0 b 2 -1e-30 unisono",
        "q2 Q0 a 1 3.0 unisono",
    ]
    assert list(read_run(path)) == RANKINGS


def test_a_run_is_read_in_the_order_of_its_scores(tmp_path: Path) -> None:
    lines = ["q Q0 a 1 1 x", "q Q0 b 3 2 x", "", "q\tQ0\tc\t2\t2\tx"]
    path = write_lines(tmp_path / "mine.run", *lines)
    assert list(read_run(path)) == [Ranking("q", ["c", "b", "a"], [2, 2, 1])]


def test_a_file_is_never_overwritten_and_a_failure_leaves_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.run"
    with pytest.raises(ValueError, match="query q1: the score of a is nan"):
        write_run(path, [Ranking("q1", ["a"], [float("nan")])])
    assert not list(tmp_path.iterdir())
    write_run(path, RANKINGS)
    before = path.read_text()
    with pytest.raises(FileExistsError, match="mine.run exists and is not overwritten; move it"):
        write_run(path, RANKINGS)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["q Q0 b 2 0.5"], r"mine.run:2: .*: a line has 6 columns with blanks between"),
        (["q Q0 b two 0.5 x"], 'mine.run:2: "q Q0 b two .* rank a whole number and score a'),
        (["q Q0 b 2 high x"], 'mine.run:2: "q Q0 b 2 high x": a line has 6 columns'),
        (["q Q0 b 2 nan x"], 'mine.run:2: "q Q0 b 2 nan x": a line has 6 columns'),
        (["q Q0 a 2 0.5 x"], 'mine.run:2: "a": the document is ranked twice for query q; keep one'),
        (["p Q0 a 1 1 x", "q Q0 b 2 0 x"], 'run:3: "q": this query stands further up; sort'),
    ],
)
def test_a_wrong_line_of_a_run_is_named(tmp_path: Path, lines: list[str], message: str) -> None:
    path = write_lines(tmp_path / "mine.run", "q Q0 a 1 1 x", *lines)
    with pytest.raises(ValueError, match=message):
        list(read_run(path))
