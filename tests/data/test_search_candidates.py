"""Candidates of a query: drawn for training, listed by a first stage, or judged."""

import pickle
from collections import Counter

import numpy as np
import pytest

from datamodules.core.plan import rng_for
from datamodules.core.store import cache_root
from datamodules.search import candidates as candidates_file
from datamodules.search.bm25 import Bm25Options, open_bm25
from datamodules.search.candidates import CandidateOptions, GroupOptions
from datamodules.search.collection import CollectionRequest, open_collection
from datamodules.search.queries import Ranking, write_run
from tests.seo.small_collection import ranking_data, relevance_files

MINED = GroupOptions(size=6, mined=3, unjudged_as_negative=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return relevance_files(tmp_path_factory.mktemp("relevance"))


@pytest.fixture(scope="module")
def collection(folder):
    return open_collection(CollectionRequest("beir", str(folder)))


def built(folder, stage, **options):
    data = ranking_data(folder, **options)
    data.setup("fit" if stage in ("train", "validation") else stage)
    return data.datasets[stage]


def test_a_group_has_a_relevant_document_judged_ones_and_mined_ones():
    grades = np.array([0, 0, 0, 2, 0, 1], np.float32)
    sizes = Counter()
    for epoch in range(200):
        places = MINED.drawn(grades, num_minable=5, rng=rng_for(1, epoch, 7))
        assert len(set(places.tolist())) == 6
        assert (grades[places[places < 6]] > 0).any()
        sizes[int((places < 6).sum())] += 1
        again = MINED.drawn(grades, num_minable=5, rng=rng_for(1, epoch, 7))
        assert places.tolist() == again.tolist()
    assert sizes == {3: 200}
    seen = {tuple(MINED.drawn(grades, 5, rng_for(1, epoch, 7))) for epoch in range(20)}
    assert len(seen) > 15  # another draw in every epoch


@pytest.mark.parametrize(
    ("num_judged", "num_minable", "expected"), [(2, 9, (2, 4)), (9, 1, (3, 1)), (1, 0, (1, 0))]
)
def test_places_that_judged_documents_leave_go_to_mined_ones(num_judged, num_minable, expected):
    places = MINED.drawn(np.ones(num_judged), num_minable, rng_for(0, 0, 0))
    found = int((places < num_judged).sum()), int((places >= num_judged).sum())
    assert found == expected
    assert MINED.sizes(num_judged, num_minable) == expected  # as the plan has them


def test_no_judged_document_is_mined_and_the_first_ranks_are_passed_over():
    options = GroupOptions(size=6, mined=3, after_rank=2, unjudged_as_negative=True)
    listed, judged = np.array([9, 4, 7, 1, 3]), np.array([1, 4])
    assert options.minable(listed, judged).tolist() == [7, 3]
    assert GroupOptions().minable(listed, judged).tolist() == []


def test_mined_candidates_are_unjudged_unless_said_otherwise(folder, collection):
    candidates = CandidateOptions("bm25", top=10)
    for as_negative in (True, False):
        groups = GroupOptions(size=6, mined=3, unjudged_as_negative=as_negative)
        run = folder / "teacher.trec"
        if not run.exists():
            write_run(run, [Ranking("q0", ["d1"], [1.0])], "t")
        teacher = None if as_negative else str(run)
        data = built(folder, "train", candidates=candidates, groups=groups, teacher=teacher)
        for place in range(len(data.lengths)):
            example, judged = data.example(place, 0), data.source.judged(place)
            is_mined = ~np.isin(example.document, judged.documents)
            assert (np.diff(example.document) > 0).all()
            assert is_mined.any()
            grades = example.relevance
            assert (
                (grades[is_mined] == 0).all() if as_negative else np.isnan(grades[is_mined]).all()
            )
            expected = judged.grades_of(example.document[~is_mined])
            assert grades[~is_mined].tolist() == expected.tolist()
            assert np.isin(example.document[is_mined], data.source.first.listed(place)).all()


def test_the_first_stage_of_judged_documents_is_bm25(folder, collection):
    data = built(folder, "test")
    bm25 = open_bm25(collection, Bm25Options())
    for place in (0, 5):
        example = data.example(place, 0)
        expected = bm25.scores(data.source.queries.text(place), example.document)
        assert example.first_stage == pytest.approx(expected)
        spread = (expected - expected.mean()) / (expected.std() or 1)
        assert example.prior == pytest.approx(spread, abs=1e-5)


def test_the_prior_of_a_candidate_is_the_same_in_training_and_evaluation(folder):
    options = {"candidates": CandidateOptions("bm25", top=10), "groups": MINED}
    train = built(folder, "train", **options)
    whole = train.__class__.__mro__[1](train.source)
    for place in range(5):
        drawn, listed = train.example(place, 3), whole.example(place, 0)
        known = dict(zip(listed.document.tolist(), listed.prior.tolist(), strict=True))
        for document, prior in zip(drawn.document.tolist(), drawn.prior.tolist(), strict=True):
            assert prior == pytest.approx(known.get(document, prior), abs=1e-6)


def test_candidates_of_a_run_keep_all_judgements_for_the_ideal_ranking(folder, tmp_path):
    rankings = [Ranking("q39", ["d5", "d1", "d7"], [3.0, 2.0, 1.0]), Ranking("q0", ["d1"], [1.0])]
    write_run(tmp_path / "first.trec", rankings, "x")
    options = CandidateOptions("run", top=2, run=str(tmp_path / "first.trec"))
    data = built(folder, "test", candidates=options)
    example, other = data.example(0, 0), data.example(1, 0)
    assert data.source.queries.id(0) == "q39"
    assert example.document.tolist() == [1, 5]
    assert example.first_stage.tolist() == [2.0, 3.0]
    assert example.prior.tolist() == [-1.0, 1.0]
    assert example.all_relevance.tolist() == data.source.judged(0).grades.tolist()
    assert other.document.tolist() == []  # not in the run: counts, and scores 0
    batch = data.collate([other, other])
    assert batch["pair_index"].tolist() == [[-1], [-1]]
    assert batch["input_ids"].shape == (1, 2)  # marks
    assert sorted(batch["baselines"]) == ["bm25", "first"]
    # Outside its list a run gives a document the lowest score that it has given.
    assert data.source.first.scores(0, np.array([5, 6])).tolist() == [3.0, 2.0]


def test_the_rows_of_a_group_are_those_of_its_texts(folder):
    data = built(folder, "train", candidates=CandidateOptions("bm25", top=10), groups=MINED)
    source = pickle.loads(pickle.dumps(data)).source  # what a worker gets that is no fork
    encode, framing = source.encoding.ids_once, source.encoding.framing
    for place in range(len(data.lengths)):
        example = data.example(place, 2)
        query = encode(source.queries.text(place))
        for document, row in zip(example.document.tolist(), example.pairs, strict=True):
            expected = framing.pair(query, encode(source.collection.document_text(document)))
            assert row.ids.tolist() == expected.ids.tolist()


def test_the_lists_of_bm25_are_kept(folder, collection):
    before = built(folder, "test", candidates=CandidateOptions("bm25", top=7)).source.first.lists
    kept = cache_root() / "candidates" / before.fingerprint
    assert np.load(kept / "documents.npy").shape[1] == 7
    again = built(folder, "test", candidates=CandidateOptions("bm25", top=7)).source.first.lists
    assert again.fingerprint == before.fingerprint


def test_changed_scoring_gives_other_lists(folder, monkeypatch):
    options = {"candidates": CandidateOptions("bm25", top=7)}
    before = built(folder, "test", **options).source.first.lists
    monkeypatch.setattr(candidates_file, "BM25_VERSION", candidates_file.BM25_VERSION + 1)
    assert built(folder, "test", **options).source.first.lists.fingerprint != before.fingerprint
