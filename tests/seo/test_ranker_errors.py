"""Wrong options and files of a ranker: what, the value, the rule and the way out."""

import pytest

from datamodules.search.candidates import CandidateOptions, GroupOptions
from datamodules.search.collection import CollectionRequest, QuerySplit
from datamodules.search.queries import Ranking, file_queries, write_run
from lit_models.seo.networks import RankingLoss
from tests.seo.small_collection import ranker, ranking_data, relevance_files
from tests.toy import toy_trainer

MINED = {"mined": 3, "unjudged_as_negative": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return relevance_files(tmp_path_factory.mktemp("relevance"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top": 5}, r"top 5 has no effect on source judged.*choose source bm25 or run"),
        ({"source": "bm25", "top": 0}, r"top must be at least 1, got 0"),
        ({"source": "run"}, r'source is "run" and candidates.run None; a run goes with source run'),
        ({"run": "a.trec"}, r'source is "judged" and candidates.run .a.trec.; a run goes with'),
        ({"source": "bm25", "bm25": None}, r"source bm25 needs candidates.bm25"),
    ],
)
def test_candidates_in_conflict_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CandidateOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 1}, r"size must be at least 2, .* got 1, 0 and 0"),
        ({"mined": 8}, r"groups.mined 0 to one less .*got 8, 8 and 0"),
        ({"after_rank": 2}, r"concern mined documents, and groups.mined is 0; raise"),
        ({"unjudged_as_negative": True}, r"unjudged_as_negative concern mined documents"),
        ({**MINED, "after_rank": -1}, r"after_rank 0 or more, got 8, 3 and -1"),
    ],
)
def test_groups_in_conflict_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GroupOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"groups": GroupOptions(**MINED)}, r"mined is 3, but candidates.source judged has noth"),
        (
            {"groups": GroupOptions(mined=3), "candidates": CandidateOptions("bm25")},
            r"mined documents are unjudged and count in no loss; set groups.unjudged_as_negative",
        ),
        ({"predict_queries": "q.tsv"}, r"nothing is judged for data.predict_queries q.tsv; set"),
    ],
)
def test_data_in_conflict_is_refused(folder, options, message):
    with pytest.raises(ValueError, match=message):
        ranking_data(folder, **options)


def fitted(folder, tmp_path, model, **options):
    toy_trainer(tmp_path, max_steps=1).fit(ranker(**model), ranking_data(folder, **options))


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            {"prior": True},
            {"candidates": CandidateOptions(bm25=None)},
            r"model.prior needs a first stage's score .*or set model.prior to false",
        ),
        (
            {"loss": RankingLoss("margin_mse")},
            {},
            r'loss.kind is "margin_mse" and data.teacher None: .*Name a run',
        ),
        ({}, {"teacher": "teacher.trec"}, r'loss.kind is "listnet" and data.teacher .*other loss'),
    ],
)
def test_a_model_and_data_that_do_not_go_together_are_refused(
    folder, tmp_path, monkeypatch, model, options, message
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "teacher.trec", [Ranking("q0", ["d1"], [1.0])], "t")
    with pytest.raises(ValueError, match=message):
        fitted(folder, tmp_path, model, **options)


@pytest.mark.parametrize(
    ("rankings", "message"),
    [
        (
            [Ranking("other", ["d1"], [1.0])],
            r"candidates.run .*ranks none of the 30 .*\"q0\"; name",
        ),
        ([Ranking("q0", ["no"], [1.0])], r'document "no" of query "q0" is not in the collection'),
    ],
)
def test_a_run_of_other_queries_or_documents_is_refused(folder, tmp_path, rankings, message):
    write_run(tmp_path / "first.trec", rankings, "x")
    options = CandidateOptions("run", run=str(tmp_path / "first.trec"))
    with pytest.raises(ValueError, match=message):
        fitted(folder, tmp_path, {}, candidates=options)


def test_two_runs_of_the_same_query_are_refused(folder, tmp_path):
    paths = [tmp_path / f"{name}.trec" for name in "ab"]
    for path in paths:
        write_run(path, [Ranking("q0", ["d1"], [1.0])], "x")
    options = CandidateOptions("run", run=[*map(str, paths)])
    with pytest.raises(ValueError, match=r'b.trec: query "q0" is in another of the runs too'):
        fitted(folder, tmp_path, {}, candidates=options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("q.md", "salt\n", r"q.md"),
        ("q.csv", "a,b\nsalt,1\n", r"q.csv:2: the row has no query or .*; it has a, b"),
        ("q.tsv", "id\tquery\na\tsalt\na\thay\n", r'q.tsv:3: "a": this id stands at .*q.tsv:2 a'),
        ("q.jsonl", '{"_id": "a"}\n', r"q.jsonl:1: the row has no query or .*; it has _id"),
        ("q.txt", "\n", r"q.txt holds no query"),
    ],
)
def test_a_file_of_queries_that_breaks_a_rule_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        file_queries(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"data.predict_queries: .*no.tsv does not exist"):
        file_queries(tmp_path / "no.tsv")


def test_queries_of_tables_and_lines_are_read(tmp_path):
    (tmp_path / "q.txt").write_text("\ufeffsalt mill\n\n old boat \n", encoding="utf-8")
    (tmp_path / "q.csv").write_text("question;page\nsalt mill;a\nsalt mill;b\nold boat;c\n")
    (tmp_path / "r.csv").write_text("id,query\nx,salt mill\ny,old boat\n")
    (tmp_path / "r.jsonl").write_text('{"_id": 7, "text": "salt mill"}\n{"query": "old boat"}\n')
    for name, ids in (("q.txt", "13"), ("q.csv", "24"), ("r.csv", "xy"), ("r.jsonl", "72")):
        queries = file_queries(tmp_path / name)
        assert [queries.text(place) for place in range(2)] == ["salt mill", "old boat"]
        assert "".join(queries.id(place) for place in range(len(queries))) == ids


def test_a_ranker_refuses_a_forward_of_no_pairs():
    with pytest.raises(ValueError, match="pairs_per_forward must be at least 1, got 0"):
        ranker(pairs_per_forward=0)


def test_rank_wants_a_prior_where_it_was_trained_with_one():
    with pytest.raises(ValueError, match=r"2 documents and 0 prior scores; .*one score each"):
        ranker(prior=True).rank("salt", ["a", "b"])
    with pytest.raises(
        ValueError, match=r"1 documents and 1 prior scores; .*no score, since .*prior=False"
    ):
        ranker().rank("salt", ["a"], prior=[1.0])
    with pytest.raises(ValueError, match="given 0 documents"):
        ranker().rank("salt", [])


def test_a_part_without_judgements_is_named(tmp_path):
    relevance_files(tmp_path)
    (tmp_path / "qrels" / "validation.tsv").unlink()
    split = QuerySplit(validation_share=0, test_share=0)
    collection = CollectionRequest("beir", str(tmp_path), split=split)
    with pytest.raises(ValueError, match=r"no query is judged for validation; name its judgements"):
        fitted(tmp_path, tmp_path, {}, collection=collection)
