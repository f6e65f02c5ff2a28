"""The samples with the largest losses: the same as by looking at each, told once, written whole."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_models.training.callbacks import Ledger, WorstSamples, worst_samples
from lit_models.training.judged import Judged, Told, as_table, distinct, rows_of, worst_of
from tests.toy import LitToy, ToyData, toy_trainer


def rows(losses: list[float], ids: list[int], weights: list[float] | None = None) -> Tensor:
    judged = Judged(torch.tensor(losses), {"answer": torch.tensor(ids) * 10})
    return rows_of(judged, torch.tensor(ids), torch.tensor(weights or [1.0] * len(ids)))


def ids_of(found: Tensor) -> list[int]:
    return [int(row[1]) for row in found.tolist() if row[1] >= 0]


def test_the_largest_come_first_and_equal_ones_by_their_number() -> None:
    found = worst_of(rows([1.0, 3.0, 2.0, 3.0, 0.0], [4, 7, 1, 2, 9]), 3)
    assert found.tolist() == [[3.0, 2.0, 20.0], [3.0, 7.0, 70.0], [2.0, 1.0, 10.0]]
    assert ids_of(worst_of(rows([-5.0, -6.0], [0, 1]), 3)) == [0, 1]  # filled up with nobody


def test_losses_that_differ_by_rounding_are_equal_and_others_are_not() -> None:
    nearly = 2.0 / 3 * (1 + 1e-7)
    assert ids_of(worst_of(rows([2.0 / 3, nearly], [1, 8]), 2)) == [1, 8]
    assert ids_of(worst_of(rows([2.0 / 3, 2.0 / 3 * 1.001], [1, 8]), 2)) == [8, 1]
    for loss in (1e-30, 3.7, 1e30):
        assert rows([loss], [0])[0, 0].item() == pytest.approx(loss, rel=1 / 4096)


def test_two_at_an_edge_of_the_grid_differ_by_a_step_and_no_more() -> None:
    edge = 0.5 + 0.5 / 4096
    found = worst_of(rows([edge - 1e-7, edge + 1e-7], [1, 8]), 2)
    assert found[:, :2].tolist() == [[0.5 + 1 / 4096, 8], [0.5, 1]]


def test_fillers_are_nobody_and_what_is_no_number_is_worst() -> None:
    found = worst_of(rows([math.inf, 9.0, math.nan, 1.0], [0, 1, 2, 3], [1, 0, 1, 1]), 4)
    assert ids_of(found) == [2, 0, 3]
    assert [row[1] for row in distinct(torch.cat([found, found]), 2)] == [2, 0]


def test_what_not_all_samples_have_shares_a_column_and_long_texts_are_cut() -> None:
    told = [
        Told({"size": "2", "a": "x", "b": "y", "said": "z" * 301}, 5, 0.5),
        Told({"size": "1", "a": "x", "said": "z"}, 3, math.nan),
    ]
    found = as_table(told)
    assert found["columns"] == ["size", "a", "said", "more", "sample", "loss"]
    assert found["rows"][0] == ["2", "x", "z" * 300 + "…", "b: y", 5, 0.5]
    assert found["rows"][1] == ["1", "x", "z", "", 3, "nan"]
    assert as_table(told[1:])["columns"] == ["size", "a", "said", "sample", "loss"]
    assert as_table([]) == {"columns": ["sample", "loss"], "rows": []}


def content(folder: Path, split: str) -> dict[str, Any]:
    return json.loads((folder / f"worst-{split}.json").read_text())


@pytest.mark.parametrize("batches", [1, 2, 64])
def test_a_run_tells_what_looking_at_each_sample_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    monkeypatch.setattr(worst_samples, "MOST_BATCHES", batches)
    trainer = toy_trainer(tmp_path, max_epochs=1, callbacks=[Ledger(), WorstSamples(4)])
    module, data = LitToy(), ToyData(micro_batch_size=2)
    trainer.fit(module, data)
    title = content(tmp_path, "val")["title"]
    assert title == "Samples with the largest loss in validation, step 7"
    trainer.test(module, data, verbose=False)
    dataset, expected = data.datasets["test"], []
    for number in range(21):
        batch = dataset.collate([dataset.example(number, 0)])
        with torch.no_grad():
            judged = module.double().judged(batch, module(batch))
        expected.append((-judged.loss.item(), number, judged.answers["sum"].item()))
    found = content(tmp_path, "test")
    assert found["columns"] == ["length", "sum", "sample", "loss"]
    for row, (loss, number, said) in zip(found["rows"], sorted(expected)[:4], strict=True):
        assert row[:3] == [str(dataset.lengths[number]), f"{said:g}", number]
        assert row[3] == pytest.approx(-loss, rel=1 / 4096)
    assert not list(tmp_path.glob("*.tmp"))


class LitSilent(LitToy):
    """Says nothing of its samples."""

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        super().test_step(batch, batch_idx)


@pytest.mark.parametrize(("module", "number"), [(LitToy, 0), (LitSilent, 12)])
def test_there_may_be_none(tmp_path: Path, module: type[LitToy], number: int) -> None:
    trainer = toy_trainer(tmp_path, callbacks=[WorstSamples(number)])
    trainer.test(module(), ToyData(), verbose=False)
    assert not list(tmp_path.glob("worst-*"))


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="number must be 0 or more, got -1; 0 keeps no samples"):
        WorstSamples(-1)
