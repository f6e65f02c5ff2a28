"""A ranker: invariances, what it learns and writes, and refused inputs."""

import json

import numpy as np
import pytest
import torch

from datamodules.search.candidates import CandidateOptions, GroupOptions
from datamodules.search.queries import Ranking, file_queries, read_run, write_run
from lit_models import LitRanker
from lit_models.seo.networks import RankingLoss
from tests.search_collections import write_collection
from tests.seo.small_collection import ranker, ranking_data
from tests.toy import csv_rows, ledger_lines, toy_trainer

BM25 = CandidateOptions("bm25", top=10)
MINED = {"mined": 3, "unjudged_as_negative": True}
OPTIONS = {"candidates": BM25, "groups": GroupOptions(size=6, **MINED)}
RUN = {"candidates": CandidateOptions("run", run="a.trec")}
WIDE = {
    "candidates": CandidateOptions("bm25", top=20),
    "groups": GroupOptions(size=16, mined=10, unjudged_as_negative=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_collection(tmp_path_factory.mktemp("collection"))


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """Return the folder of a run: trained, tested and used for predictions."""
    root = tmp_path_factory.mktemp("trained")
    module = ranker(loss=RankingLoss("lambda"), prior=True, pairs_per_forward=7)
    data = ranking_data(folder, predict_output=str(root / "ranked.trec"), **OPTIONS)
    trainer = toy_trainer(root, max_steps=12, max_epochs=9)
    torch.manual_seed(1)
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data, return_predictions=False)
    return root


def built(folder, **options):
    """Return a module and its datamodule in float64, ready to compute."""
    torch.manual_seed(1)
    module, data = ranker(**options.pop("model", {})), ranking_data(folder, **OPTIONS | options)
    data.setup("fit")
    data.setup("test")
    module.recipe = {**data.recipe}
    module.configure_model()
    for parameter in module.parameters():  # a new head of 0 would hide everything else
        torch.nn.init.normal_(parameter, std=0.3)
    return module.double().eval(), data


def batch_of(data, stage, ids, epoch=0):
    batch = data.datasets[stage].batch(np.array(ids), epoch)
    return {**batch, "weight": torch.ones(len(ids)), "sample_id": torch.tensor(ids)}


def test_other_queries_and_their_padding_change_no_score(folder):
    module, data = built(folder, model={"prior": True})
    together = module(batch_of(data, "test", [0, 1, 2, 3]))
    for row in range(4):
        alone = module(batch_of(data, "test", [row]))
        torch.testing.assert_close(together[row, : alone.shape[1]], alone[0])
        assert (together[row, alone.shape[1] :] == -torch.inf).all()


def test_parts_change_no_score_and_no_gradient(folder):
    module, data = built(folder, **WIDE)
    batch = batch_of(data, "train", list(range(12)), 3)
    assert batch["num_parts"] == 12 * 16 // 64 == 3
    results = []
    for number in (1, 3, 5):
        module.zero_grad()
        (term,) = module.training_terms({**batch, "num_parts": number}).values()
        term.total.backward()
        gradients = [p.grad.clone() for p in module.network.parameters() if p.grad is not None]
        results.append([term.total.detach(), *gradients])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-9, atol=1e-11)
    scores = [module(batch, size).detach() for size in (None, 7, 1000)]
    torch.testing.assert_close(scores[1:], scores[:1] * 2, rtol=1e-9, atol=1e-11)


def test_a_ranker_begins_with_the_order_of_its_first_stage(folder, tmp_path):
    data = ranking_data(folder, **OPTIONS)
    toy_trainer(tmp_path).test(ranker(prior=True), data, verbose=False)
    content = json.loads((tmp_path / "ranking-test.json").read_text())
    assert content["systems"]["ranker"] == content["systems"]["bm25"]
    assert content["differences"]["ranker - bm25"]["map"] == [0, 0, 0]


def test_the_files_of_a_test_agree_with_each_other(trained):
    content = json.loads((trained / "ranking-test.json").read_text())
    rows = csv_rows(trained / "queries-test.csv")
    assert content["queries"] == 9
    assert [row["query"] for row in rows[::2]] == [f"test-{i}" for i in range(9)]
    for system, means in content["systems"].items():
        for metric, mean in means.items():
            values = [float(row[metric]) for row in rows if row["system"] == system]
            assert np.mean(values) == pytest.approx(mean, rel=1e-12)
    for metric, found in content["differences"]["ranker - bm25"].items():
        mean = content["systems"]["ranker"][metric] - content["systems"]["bm25"][metric]
        assert found[0] == pytest.approx(mean, abs=1e-12)
        assert found[1] <= found[0] <= found[2]


def test_the_tables_of_a_test_fit_80_columns(folder, tmp_path, capsys):
    write_run(tmp_path / "first.trec", [Ranking("test-0", ["d5", "d1"], [3.0, 2.0])])
    options = CandidateOptions("run", run=str(tmp_path / "first.trec"))
    data, module = ranking_data(folder, candidates=options), ranker()
    toy_trainer(tmp_path / "run").test(module, data, verbose=False)
    printed = capsys.readouterr().out
    for words in ("test: 9 queries", "ranker - first", "ranker - bm25"):
        assert words in printed
    lines = [line for line in printed.splitlines() if not line.startswith("errors: ")]  # a path
    assert max(map(len, lines)) <= 80


def test_a_prediction_is_a_run_of_all_candidates_in_the_order_of_scores(folder, trained):
    rankings = {ranking.query: ranking for ranking in read_run(trained / "ranked.trec")}
    assert list(rankings) == [f"test-{i}" for i in range(9)]
    module = LitRanker.load_from_checkpoint(trained / "checkpoints" / "last.ckpt").eval()
    data = ranking_data(folder, **OPTIONS)
    data.setup("test")
    dataset = data.datasets["test"]
    for place, ranking in enumerate(rankings.values()):
        documents = dataset.candidates(place)
        ids = [f"d{i}" for i in documents]
        assert sorted(ranking.documents) == sorted(ids)
        texts = [data.collection.documents[int(i)].whole for i in documents]
        query = dataset.queries[place].text
        prior = dataset.first_scores(place, documents).tolist()
        scores = module.rank(query, texts, prior=prior)
        known = dict(zip(ids, scores.tolist(), strict=True))
        found = [known[document] for document in ranking.documents]
        assert found == pytest.approx(ranking.scores, rel=1e-5, abs=1e-5)


def test_queries_of_a_file_are_ranked_too(folder, trained, tmp_path, caplog):
    (tmp_path / "mine.tsv").write_text("id\tquery\na\tsalt boat\nb\tnothing known\nc\tmill\n")
    files = {"predict_queries": f"{tmp_path}/mine.tsv", "predict_output": f"{tmp_path}/mine.trec"}
    data = ranking_data(folder, **files, **OPTIONS)
    module = LitRanker.load_from_checkpoint(trained / "checkpoints" / "last.ckpt")
    toy_trainer(tmp_path / "run").predict(module, data, return_predictions=False)
    rankings = list(read_run(tmp_path / "mine.trec"))
    assert [ranking.query for ranking in rankings] == ["a", "c"]  # no word of b is known
    assert "1 of 3 queries have no candidate and are not in" in caplog.text
    assert "such as b." in caplog.text
    (tmp_path / "mine.trec").unlink()
    table = (tmp_path / "mine.trec.csv").read_text()
    with pytest.raises(FileExistsError, match=r"mine\.trec\.csv exists and is not overwritten"):
        toy_trainer(tmp_path / "run").predict(module, data, return_predictions=False)
    assert (tmp_path / "mine.trec.csv").read_text() == table
    assert not (tmp_path / "mine.trec").exists()


def test_a_group_can_be_learnt_by_heart(folder, tmp_path):
    data = ranking_data(folder, global_batch_size=24)
    module = ranker()
    torch.manual_seed(1)
    options = {"max_steps": 15, "max_epochs": 15, "limit_val_batches": 0, "callbacks": []}
    toy_trainer(tmp_path, **options).fit(module, data)
    losses = [line["loss"] for line in ledger_lines(tmp_path)]
    batch = data.datasets["train"].batch(np.arange(24), 0)
    grades = batch["relevance"].double()
    target = grades.nan_to_num() / grades.nansum(1, keepdim=True).clamp(min=1)
    least = -(target.clamp(min=1e-300).log() * target).sum(1).mean()
    assert losses[-1] - least < 0.8 * (losses[0] - least)


@pytest.mark.parametrize(
    ("query", "model", "options", "message"),
    [
        ("", {"prior": True}, {"bm25": None}, "model.prior needs a first"),
        ("", {}, {"candidates": BM25, "bm25": None}, "source is bm25, but data.bm25 is null"),
        ("other", {}, RUN, 'a.trec ranks none of the 24 .*"train-0"; name'),
        ("train-0", {}, RUN, 'document "no" of query "train-0" is not in the collection'),
    ],
)
def test_a_first_stage_that_is_missing_or_of_other_data_is_refused(
    folder, own_folder, query, model, options, message
):
    write_run(own_folder / "a.trec", [Ranking(query, ["no"], [1.0])])
    trainer = toy_trainer(own_folder, max_steps=1)
    with pytest.raises(ValueError, match=message):
        trainer.fit(ranker(**model), ranking_data(folder, **options))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("q.md", "salt\n", r"q.md"),
        (
            "q.csv",
            "a,b\nsalt,1\n",
            r'q.csv:2: "": no query or .*keyword, or an empty one; it has a, b',
        ),
        ("q.tsv", "id\tquery\na\tsalt\na\thay\n", r'q.tsv:3: "a": a row further up has this id'),
        ("q.jsonl", '{"Query": ""}\n{}', r'q.jsonl:1: "": .*it has Query(.|\n)*has nothing'),
        ("q.txt", "\n", r"q.txt holds no query"),
    ],
)
def test_a_file_of_queries_that_breaks_a_rule_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        file_queries(tmp_path / name)


def test_queries_of_tables_and_lines_are_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data.predict_queries: .*no.tsv does not exist"):
        file_queries(tmp_path / "no.tsv")
    (tmp_path / "q.txt").write_text("\ufeffsalt mill\n\n old boat \n", encoding="utf-8")
    (tmp_path / "q.csv").write_text("question;page\nsalt mill;a\nsalt mill;b\nold boat;c\n")
    (tmp_path / "r.csv").write_text("id,query,page\nx,salt mill,a\nx,salt mill,b\ny,old boat,c\n")
    (tmp_path / "r.jsonl").write_text('{"_id": 7, "text": "salt mill"}\n{"query": "old boat"}\n')
    for name, ids in (("q.txt", "13"), ("q.csv", "24"), ("r.csv", "xy"), ("r.jsonl", "72")):
        queries = file_queries(tmp_path / name)
        assert [queries[place].text for place in range(2)] == ["salt mill", "old boat"]
        assert "".join(queries[place].id for place in range(len(queries))) == ids


def test_rank_requires_a_prior_if_trained_with_one():
    with pytest.raises(ValueError, match=r"2 documents and 0 prior scores; .*one score each"):
        ranker(prior=True).rank("salt", ["a", "b"])
    with pytest.raises(
        ValueError, match=r"1 documents and 1 prior scores; .*no score, since .*prior=False"
    ):
        ranker().rank("salt", ["a"], prior=[1.0])
    with pytest.raises(ValueError, match="given 0 documents"):
        ranker().rank("salt", [])
