"""Comparison of two records: differences are found and named, equal parts are not reported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_models.certify.command import Way, page, table
from lit_models.certify.compare import (
    BOUNDS,
    SEEN,
    Comparison,
    compare,
    first_difference,
    read_record,
)
from lit_models.certify.probe import Probe, lines_of, rows_of
from tests.text_corpora import rows_file
from tests.toy import LitToy, ToyData, toy_trainer

IDS = [str(number) for number in range(21)]
Line = dict[str, Any]


def start(*steps: tuple[int, list[str], float]) -> list[Line]:
    """Return the notes of one rank: number, samples and loss of each step."""
    names = ("step", "rows", "loss")
    rows = [dict(zip(names, s, strict=True)) | {"epoch": 0, "grad_norm": 1.0} for s in steps]
    return [{"resumed_from_step": steps[0][0] - 1}, *rows, {"ended": 0}]


def evaluated(samples: list[str] = IDS, value: float = 0.5, answer: str = "1") -> list[Line]:
    answers = {"predictions": [f"{name} {answer}\n" for name in samples]}
    notes = [{"evaluated": {"validation": samples}}, {"predicted": answers}]
    return [*notes, {"metrics": {"val/loss": value}}]


ONE = {"1-0": start((1, [*"abcd"], 4.0), (2, [*"ef"], 1.0)) + evaluated()}


def findings(
    folder: Path, other: dict[str, list[Line]], weight: float = 1.0, bits: str = "64"
) -> dict[str, Comparison]:
    """Return the findings of comparing a run with these notes and this weight with the run ONE."""
    records = []
    for name, ranks, value in (("one", ONE, 1.0), ("other", other, weight)):
        for part in (SEEN, "checkpoints"):
            (folder / name / part).mkdir(parents=True)
        for rank, lines in ranks.items():
            rows_file(folder / name / SEEN / f"{rank}.jsonl", lines)
        weights = {"layer.weight": torch.tensor([value, 0.0], dtype=torch.float64)}
        path = folder / name / "checkpoints" / "last.ckpt"
        torch.save({"state_dict": weights, "global_step": 2}, path)
        records.append(read_record(folder / name))
    return {finding.aspect: finding for finding in compare(*records, BOUNDS[bits])}


def test_two_ranks_and_a_resume_on_one_are_the_run_of_one_device(tmp_path: Path) -> None:
    other = {
        "1-0": start((1, [*"ca"], 3.0), (2, [*"zz"], 7.0)),  # the kill discards this step
        "1-1": start((1, [*"bd"], 5.0), (2, [*"zz"], 7.0)),
        "2-0": start((2, [*"ef"], 1.0)) + evaluated(IDS[::-1]),
    }
    found = findings(tmp_path, other)
    assert [finding.cell for finding in found.values()] == ["equal"] * 6
    assert all(finding.is_same for finding in found.values())
    way = Way("C", ((2, "ddp"), (1, "auto")), findings=[*found.values()])
    assert (way.name, way.sentences) == ("2 ddp -> 1", [])
    assert table([way])[2].split() == ["2", "ddp", "->", "1", *["equal"] * 6]


@pytest.mark.parametrize(
    ("other", "aspect", "cell", "words"),
    [
        (
            {"1-0": start((1, [*"abcd"], 4.0), (2, [*"ef"], 1.0)) + evaluated([*IDS, "7"])},
            "samples",
            "NOT",
            "validation: 22 samples of 21, 1 twice (7)",
        ),
        (
            {"1-0": start((1, [*"abcc"], 4.0), (2, [*"ef"], 1.0)) + evaluated()},
            "samples",
            "NOT",
            "epoch 0: 6 samples of 6, 1 twice (c), 1 left out (d)",
        ),
        (
            {"1-0": start((1, [*"abcdefgh"], 4.0), (2, [*"ef"], 1.0)) + evaluated()},
            "samples",
            "NOT",
            "step 1: 8 samples of 4, as if batch_size were per device, 4 not its own (e, f, g, …)",
        ),
        (  # losses 3, 3, 3, 7: their mean is 4, the mean of two ranks' means 5
            {
                "1-0": start((1, [*"abc"], 3.0), (2, [*"ef"], 1.0)) + evaluated(),
                "1-1": start((1, ["d"], 7.0), (2, [], 1.0)),
            },
            "losses",
            "NOT 2e-01",
            "step 1: 5.0 instead of 4.0",
        ),
        (
            {"1-0": start((1, [*"abcd"], 4.0), (2, [*"ef"], 1.0)) + evaluated(value=0.6)},
            "metrics",
            "NOT 2e-01",
            "of the same samples: a mean of means is not the mean of all",
        ),
        (
            {"1-0": start((1, [*"abcd"], 4.0), (2, [*"ef"], 1.0)) + evaluated(answer="2")},
            "files",
            "NOT",
            "predictions: 21 lines of 21, 0 of them the same",
        ),
        ({"1-0": ONE["1-0"][:2]}, "losses", "NOT", "step 2: None instead of 1.0"),
    ],
)
def test_what_differs_is_named(
    tmp_path: Path, other: dict[str, list[Line]], aspect: str, cell: str, words: str
) -> None:
    finding = findings(tmp_path, other)[aspect]
    assert (finding.is_same, finding.cell) == (False, cell)
    assert words in finding.words


def test_a_weight_is_compared_beside_its_size_and_in_float64_alone(tmp_path: Path) -> None:
    near = findings(tmp_path / "near", ONE, 1 + 1e-9)["weights"]
    far = findings(tmp_path / "far", ONE, 1 + 1e-7)["weights"]
    assert (near.is_same, far.is_same) == (True, False)
    assert far.words == ("layer.weight: 1e-07 apart",)
    assert findings(tmp_path / "32", ONE, 1 + 1e-7, "32")["weights"].is_same is None


def test_rows_have_names_by_their_content_and_planned_ones_their_ids() -> None:
    batch = {"sample_id": torch.tensor([5, 5]), "weight": torch.tensor([1.0, 0.0])}
    assert rows_of(batch) == ["5", ""]
    numbers = torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]])
    first, second, third = rows_of([numbers, {"y": torch.arange(3) // 2, "one": torch.ones(1)}])
    assert first == second != third
    [line, *_] = lines_of({"y": numbers.double() / 3}, ["a", "b", "c"])
    assert line == "a 0.333333333 0.666666667\n"


class Harder(LitToy):
    """A toy with another activation."""

    def build(self, recipe: dict[str, Any], data: Any) -> None:
        super().build(recipe, data)
        self.model[1] = nn.Hardtanh()


class Moved(LitToy):
    """A toy with other initial weights."""

    def build(self, recipe: dict[str, Any], data: Any) -> None:
        super().build(recipe, data)
        nn.init.constant_(self.model[0].bias, 9.0)


class Twice(LitToy):
    """A toy that counts the first layer's gradient twice."""

    def on_after_backward(self) -> None:
        self.model[0].weight.grad *= 2


def tape(folder: Path, module: LitToy, look_at: int, micro_batch_size: int = 8) -> Path:
    trainer = toy_trainer(folder, max_steps=2, callbacks=[Probe(look_at=look_at)])
    trainer.fit(module, ToyData(micro_batch_size=micro_batch_size))
    return folder


@pytest.mark.parametrize(
    ("other", "look_at", "place"),
    [
        (LitToy, 2, ""),
        (Harder, 1, "the output of model.1 for sample "),
        (Twice, 1, "the gradient of model.0.weight: "),
        (Moved, 1, "the weight model.0.bias before it: "),
    ],
)
def test_where_a_step_parts_first(tmp_path: Path, other: Any, look_at: int, place: str) -> None:
    one = tape(tmp_path / "one", LitToy(), look_at)
    two = tape(tmp_path / "two", other(), look_at, micro_batch_size=3)  # other padding
    found = first_difference(one, two, 1e-9)
    assert found.startswith(place)
    assert bool(found) == bool(place)


def test_a_page_says_what_differs_under_its_command() -> None:
    wrong = Comparison("metrics", False, 0.2, ("val/loss: 0.6 instead of 0.5",), None)
    way = Way("A", ((2, "ddp"),), ["start 1 ended with status 1"], findings=[wrong])
    facts = dict.fromkeys(("date", "hardware", "versions", "bounds"), "x")
    facts |= {"name": "mine", "is_same": False, "command": "unisono certify", "left out": {}}
    text = page({**facts, "ways": [{"name": way.name, "proof": []}]}, table([way]))
    assert text.startswith("# mine: NOT the same run\n\n```bash\nunisono certify\n```")
    assert "  metrics: val/loss: 0.6 instead of 0.5\n" in text
    assert max(map(len, table([way]))) <= 80
