"""`unisono report A B`: what differs comes first, and only what differs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_models.commands._arguments import with_words
from lit_models.commands.report import report
from lit_models.reporting.compare import differences, loss_gap, said
from lit_models.reporting.reading import RunRecord, read_run
from tests.commands.run_folders import CONFIG, METRICS, run_folder, text_of

Unisono = Callable[..., tuple[int, str]]
OTHER = (
    CONFIG.replace("seed_everything: 1", "seed_everything: 2")
    .replace("lr: 0.003", "lr: 0.001")
    .replace("runs/a", "runs/b")
    .replace("max_steps: -1", "max_steps: -1, callbacks: [{class_path: X, init_args: {a: null}}]")
)


def record(folder: Path) -> RunRecord:
    return read_run(folder, folder / "config.yaml", 0.0)


def compared(first: Path, second: Path) -> str:
    path = first.parent / "both.html"
    assert report(first, second, to=path) == 0
    return text_of(path.read_text(encoding="utf-8"))


def test_each_aspect_is_the_same_or_says_both_values(tmp_path: Path) -> None:
    first = run_folder(tmp_path / "a")
    changes = {"world_size": 4, "code": {"version": "0.1.0", "digest": "def"}}
    second = run_folder(tmp_path / "b", topology=changes, config=OTHER)
    found = {one.aspect: one.rows for one in differences(record(first), record(second))}
    assert found == {
        "data": [],
        "plan": [],
        "seed": [("seed", "1", "2")],
        "configuration": [
            ("model.optimizer.lr", "0.003", "0.001"),
            ("trainer.callbacks", "absent", "[X(a: null)]"),
        ],
        "code": [("digest", "abc", "def")],
        "devices": [("devices", "2", "4")],
        "versions": [],
    }
    words = compared(first, second)
    assert (
        "They differ in seed, configuration (2 keys), code and devices. "
        "The same: data, plan and versions." in words
    )
    assert words.index("What differs") < words.index("Curves") < words.index("Final values")
    assert "model.optimizer.lr 0.003 0.001" in words


def test_a_run_and_its_copy_differ_in_nothing(tmp_path: Path) -> None:
    words = compared(run_folder(tmp_path / "a"), run_folder(tmp_path / "b"))
    assert "Nothing known differs." in words
    assert "Over 6 common steps the losses are the same bits." in words
    assert "val/f1 0.5000 0.5000 0" in words


def test_the_largest_gap_of_the_losses_is_told_under_one_plan_only(tmp_path: Path) -> None:
    first, second = run_folder(tmp_path / "a"), run_folder(tmp_path / "b", losses={4: 0.2})
    assert loss_gap(record(first), record(second)) == (pytest.approx(0.2), 6)  # 0.25 and 0.2
    plan = json.loads((second / "plan.json").read_text())
    (second / "plan.json").write_text(json.dumps({**plan, "digest": "other"}))
    # The samples are the same, their order is not.
    assert loss_gap(record(first), record(second)) is None
    assert "They differ in plan." in compared(first, second)


def test_runs_of_two_families_share_what_both_have(tmp_path: Path) -> None:
    config = CONFIG.replace("LitOccupationCoder", "LitTextScorer")
    metrics = METRICS.replace("val/f1", "val/rank")
    second = run_folder(tmp_path / "b", config=config, metrics=metrics)
    words = compared(run_folder(tmp_path / "a"), second)
    assert "These train different things, LitOccupationCoder and LitTextScorer" in words
    assert "2 metrics that only one of them has left out." in words
    assert "val/loss 0.6250 0.6250 0" in words
    assert "val/rank" not in words


def test_what_was_not_written_down_is_said(tmp_path: Path) -> None:
    first, second = run_folder(tmp_path / "a"), run_folder(tmp_path / "b")
    (second / "topology.json").unlink()
    words = compared(first, second)
    assert "Nothing known differs." in words
    assert "Not written down by both: code, devices and versions." in words


def test_a_value_reads_as_in_a_configuration() -> None:
    assert said({"class_path": "A", "init_args": {"b": None, "c": [1, True]}}) == (
        "A(b: null, c: [1, true])"
    )
    assert said({"a": {"b": 0.1}}) == "(a: (b: 0.1))"


def test_two_folders_on_the_command_line(
    tmp_path: Path, unisono: Unisono, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "runs/a")
    run_folder(tmp_path / "runs/b")
    status, output = unisono("report", "runs/a", "runs/b")
    assert (status, output) == (0, "written to compare-a-b.html\n")
    Path("compare-a-b.html").write_text("mine")
    status, output = unisono("report", "runs/a", "runs/b")
    assert status == 2
    assert "is no report of this command" in output
    assert unisono("report", "runs/a", "runs/b", "--to", "c.html")[0] == 0
    status, output = unisono("report", "runs/a", "runs/b", "runs/c")
    assert status == 2
    assert "report takes 1 or 2 of these, got 3 (runs/a runs/b runs/c): leave out" in output
    status, output = unisono("report")
    assert status == 2
    assert "report lacks run. Write: unisono report RUN [OTHER]\n  RUN: a run folder, " in output
    status, output = unisono("report", "runs/a", "runs/b", "--forecast=x.json")
    assert "--forecast belongs to one run" in output


def test_only_words_after_the_required_ones_get_a_name() -> None:
    def function(run: Path, other: Path | None = None, *, to: Path | None = None) -> None: ...

    assert with_words(["a", "b"], function) == ["a", "--other=b"]
    assert with_words(["--to", "x", "a", "b"], function) == ["--to", "x", "a", "--other=b"]
    assert with_words(["--run=a", "b"], function) == ["--run=a", "--other=b"]

    def without(devices: int = 1) -> None: ...

    assert with_words(["b"], without) == ["b"]
