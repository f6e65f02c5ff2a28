"""What a ranker learns: from judged and mined candidates, and a teacher."""

import numpy as np
import pytest
import torch

from datamodules.search.candidates import CandidateOptions, GroupOptions
from datamodules.search.queries import Ranking, write_run
from lit_models.seo.networks import RankingLoss
from tests.seo.small_collection import ranker, ranking_data, relevance_files
from tests.toy import ledger_lines, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed")
OPTIONS = {
    "candidates": CandidateOptions("bm25", top=10),
    "groups": GroupOptions(size=6, mined=3, unjudged_as_negative=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return relevance_files(tmp_path_factory.mktemp("relevance"))


@pytest.mark.parametrize("kind", ["listnet", "bce", "lambda"])
def test_accumulation_gives_the_gradient_of_the_one_batch(folder, tmp_path, kind):
    lines = []
    for micro in (8, 2):
        torch.manual_seed(1)
        data = ranking_data(folder, micro_batch_size=micro, **OPTIONS)
        root = tmp_path / str(micro)
        options = {"max_steps": 3, "max_epochs": 1, "limit_val_batches": 0}
        toy_trainer(root, **options).fit(ranker(loss=RankingLoss(kind)), data)
        lines.append(ledger_lines(root))
    for one, other in zip(*lines, strict=True):
        assert one["digest"] == other["digest"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-10)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-9)


def test_a_group_can_be_learnt_by_heart(folder, tmp_path):
    data = ranking_data(folder, global_batch_size=30)
    module = ranker()
    torch.manual_seed(1)
    options = {"max_steps": 15, "max_epochs": 15, "limit_val_batches": 0, "callbacks": []}
    toy_trainer(tmp_path, **options).fit(module, data)
    losses = [line["loss"] for line in ledger_lines(tmp_path)]
    dataset = data.datasets["train"]
    batch = dataset.collate([dataset.example(i, 0) for i in range(30)])
    grades = batch["relevance"].double()
    target = grades.nan_to_num() / grades.nansum(1, keepdim=True).clamp(min=1)
    least = -(target.clamp(min=1e-300).log() * target).sum(1).mean()
    assert losses[-1] - least < 0.8 * (losses[0] - least)


def test_a_resumed_run_draws_the_same_groups_and_ends_with_the_same_weights(folder, tmp_path):
    weights = []
    for name, stops in (("whole", [6]), ("cut", [2, 6])):
        for max_steps in stops:
            torch.manual_seed(1)
            module, data = ranker(prior=True), ranking_data(folder, **OPTIONS)
            options = {"max_steps": max_steps, "max_epochs": 2, "limit_val_batches": 0}
            path = tmp_path / name / "checkpoints" / "last.ckpt"
            resumed = str(path) if path.exists() else None
            trainer = toy_trainer(tmp_path / name, **options)
            trainer.fit(module, data, ckpt_path=resumed, weights_only=True)
        weights.append(module.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-12, atol=1e-12)


def test_a_teacher_is_imitated(folder, tmp_path):
    teacher = [Ranking(f"q{i}", ["d1", "d2", "d3"], [4.0, 2.0, -1.0]) for i in range(30)]
    write_run(tmp_path / "teacher.trec", teacher, "t")
    known = [f"q{i}" for i in (*range(30), 30, 39)]  # some for each part
    first = [Ranking(id, ["d4", "d1", "d2", "d3"], [4.0, 3.0, 2.0, 1.0]) for id in known]
    write_run(tmp_path / "first.trec", first, "f")
    options = {
        "candidates": CandidateOptions("run", run=str(tmp_path / "first.trec")),
        "groups": GroupOptions(size=6, mined=4),
        "teacher": str(tmp_path / "teacher.trec"),
    }
    module, data = ranker(loss=RankingLoss("margin_mse")), ranking_data(folder, **options)
    torch.manual_seed(1)
    toy_trainer(tmp_path / "run", max_steps=20, max_epochs=20).fit(module, data)
    losses = [line["loss"] for line in ledger_lines(tmp_path / "run")]
    assert np.mean(losses[-4:]) < 0.7 * np.mean(losses[:4])
