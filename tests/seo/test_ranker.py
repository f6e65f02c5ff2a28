"""A ranker from its first step to its run file: what may change no result, what it writes."""

import csv
import json

import numpy as np
import pytest
import torch

from datamodules.search.candidates import CandidateOptions, GroupOptions
from datamodules.search.queries import Ranking, read_run, write_run
from lit_models import LitRanker
from lit_models.commands.export import export_checkpoint
from lit_models.seo.networks import RankingLoss
from tests.seo.small_collection import ranker, ranking_data, relevance_files
from tests.toy import toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")
BM25 = CandidateOptions("bm25", top=10)
GROUPS = GroupOptions(size=6, mined=3, unjudged_as_negative=True)
OPTIONS = {"candidates": BM25, "groups": GROUPS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return relevance_files(tmp_path_factory.mktemp("relevance"))


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """Return the folder of a run: fitted, tested and predicted."""
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
    """Return a module and its datamodule, ready to compute, in float64."""
    torch.manual_seed(1)
    module, data = ranker(**options.pop("model", {})), ranking_data(folder, **OPTIONS | options)
    data.setup("fit")
    data.setup("test")
    module.recipe = {**data.recipe}
    module.configure_model()
    for parameter in module.parameters():  # a new head of 0 would hide the rest
        torch.nn.init.normal_(parameter, std=0.3)
    return module.double().eval(), data


def batch_of(data, stage, ids):
    dataset = data.datasets[stage]
    batch = dataset.collate([dataset.example(i, 0) for i in ids])
    return {**batch, "weight": torch.ones(len(ids)), "sample_id": torch.tensor(ids)}


def test_other_queries_and_their_padding_change_no_score(folder):
    module, data = built(folder, model={"prior": True})
    together = module(batch_of(data, "test", [0, 1, 2, 3]))
    for row in range(4):
        alone = module(batch_of(data, "test", [row]))
        torch.testing.assert_close(together[row, : alone.shape[1]], alone[0])
        assert (together[row, alone.shape[1] :] == -torch.inf).all()


def test_any_number_of_pairs_at_once_gives_the_same_scores(folder):
    module, data = built(folder)
    batch = batch_of(data, "test", [0, 1, 2])
    expected = module(batch)
    sizes = []
    module.network.encoder.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    for number in (1, 4, 1000):
        torch.testing.assert_close(module(batch, number), expected)
    assert max(sizes[:-1]) == 4


def test_a_ranker_begins_with_the_order_of_its_first_stage(folder, tmp_path):
    data = ranking_data(folder, **OPTIONS)
    module = ranker(prior=True)
    toy_trainer(tmp_path).test(module, data, verbose=False)
    content = json.loads((tmp_path / "ranking-test.json").read_text())
    assert content["systems"]["ranker"] == content["systems"]["bm25"]
    assert content["differences"]["ranker - bm25"]["map"] == [0, 0, 0]


def test_the_files_of_a_test_agree_with_each_other(trained):
    content = json.loads((trained / "ranking-test.json").read_text())
    with (trained / "queries-test.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert content["queries"] == 11
    assert [row["query"] for row in rows[::2]] == [f"q{i}" for i in range(39, 50)]
    for system, means in content["systems"].items():
        for metric, mean in means.items():
            values = [float(row[metric]) for row in rows if row["system"] == system]
            assert np.mean(values) == pytest.approx(mean, rel=1e-12)
    for metric, found in content["differences"]["ranker - bm25"].items():
        mean = content["systems"]["ranker"][metric] - content["systems"]["bm25"][metric]
        assert found[0] == pytest.approx(mean, abs=1e-12)
        assert found[1] <= found[0] <= found[2]


def test_the_tables_of_a_test_fit_80_columns(folder, tmp_path, capsys):
    write_run(tmp_path / "first.trec", [Ranking("q39", ["d5", "d1"], [3.0, 2.0])], "x")
    options = CandidateOptions("run", run=str(tmp_path / "first.trec"))
    data, module = ranking_data(folder, candidates=options), ranker()
    toy_trainer(tmp_path / "run").test(module, data, verbose=False)
    printed = capsys.readouterr().out
    for words in ("test: 11 queries", "ranker - first", "ranker - bm25"):
        assert words in printed
    lines = [line for line in printed.splitlines() if not line.startswith("errors: ")]  # a path
    assert max(map(len, lines)) <= 80


def test_a_prediction_is_a_run_of_all_candidates_in_the_order_of_scores(folder, trained):
    rankings = {ranking.query: ranking for ranking in read_run(trained / "ranked.trec")}
    assert list(rankings) == [f"q{i}" for i in range(39, 50)]
    module = LitRanker.load_from_checkpoint(trained / "checkpoints" / "last.ckpt").eval()
    data = ranking_data(folder, **OPTIONS)
    data.setup("test")
    dataset = data.datasets["test"]
    for place, ranking in enumerate(rankings.values()):
        example = dataset.example(place, 0)
        ids = [f"d{i}" for i in example.document]
        assert sorted(ranking.documents) == sorted(ids)
        texts = [data.collection.document_text(int(i)) for i in example.document]
        query = dataset.queries.text(place)
        scores = module.rank(query, texts, prior=example.first_stage.tolist())
        known = dict(zip(ids, scores.tolist(), strict=True))
        found = [known[document] for document in ranking.documents]
        assert found == pytest.approx(ranking.scores, rel=1e-5, abs=1e-5)


def test_queries_of_a_file_are_ranked_too(folder, trained, tmp_path, caplog):
    (tmp_path / "mine.tsv").write_text("id\tquery\na\tsalt ship\nb\tnothing known\nc\thay\n")
    data = ranking_data(
        folder,
        predict_queries=str(tmp_path / "mine.tsv"),
        predict_output=str(tmp_path / "mine.trec"),
        **OPTIONS,
    )
    module = LitRanker.load_from_checkpoint(trained / "checkpoints" / "last.ckpt")
    toy_trainer(tmp_path / "run").predict(module, data, return_predictions=False)
    rankings = list(read_run(tmp_path / "mine.trec"))
    assert [ranking.query for ranking in rankings] == ["a", "c"]  # none of b's words is known
    assert "1 of 3 queries have no candidate and are not in" in caplog.text
    assert "such as b." in caplog.text


def test_an_export_gives_the_ranker_of_the_checkpoint(trained, tmp_path):
    path = trained / "checkpoints" / "last.ckpt"
    export_checkpoint(path, tmp_path / "ranker", class_path="lit_models.LitRanker")
    exported = LitRanker.from_exported(tmp_path / "ranker")
    loaded = LitRanker.load_from_checkpoint(path).eval()
    assert exported.loss == RankingLoss("lambda")
    texts, prior = ["salt and bread", "wool", "iron ship hay"], [2.0, 0.5, 1.0]
    expected = loaded.rank("salt hay", texts, prior)
    assert torch.equal(exported.rank("salt hay", texts, prior), expected)
    assert expected.shape == (3,)
