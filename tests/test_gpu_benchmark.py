"""The benchmark of one GPU, at toy sizes and with rows that only pretend to be measured."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lit_models.causal_lm.network import DecoderConfig
from tests.benchmarks import gpu
from tests.benchmarks.figures import Aim, Figures
from tests.benchmarks.gpu import (
    ACCELERATE,
    CEILINGS,
    CODER,
    RETRIEVER,
    ROWS,
    SHAKESPEARE,
    Limits,
    Suite,
    add_row,
    beside,
    rows,
)
from tests.benchmarks.gpu_rows import ROUNDS, SIZES, Rounds, flops_per_token, language_model

LINE = {
    "seconds": 2.0,
    "padding_share": 0.03,
    "mfu": 0.5,
    "split": {"data": 0.01, "forward": 1.19, "communication": None, "other": 0.8},
}
FOUND: dict[str, Any] = {
    "unit": "tokens/s",
    "rates": [100.0, 120.0],
    "flops": 2e9,
    "memory_gib": 1.5,
    "steps_ms": [10.3, 10.1],
    "loop_ms": [10.0, 10.0],
    "lines": [],
    "halvings": 1,
}
PUBLISHED = {"loss": 1.5, "seconds": 60.0, "rate": 1e6}


class Told:
    """Pretends to measure: answers in so many seconds of a clock that nothing else moves."""

    def __init__(self, seconds: float, **broken: str) -> None:
        self.seconds, self.broken, self.now = seconds, broken, 0.0
        self.asked: list[str] = []

    def __call__(self, name: str, is_small: bool, limit_s: float) -> dict[str, Any]:
        self.asked.append(name)
        self.now += min(self.seconds, limit_s)
        if limit_s < self.seconds:
            raise gpu.OutOfTime(f"not done within {limit_s:.0f} s")
        if name in self.broken:
            raise ValueError(self.broken[name])
        return {"product": 1e12, "copy": 1e12} if name == CEILINGS else FOUND

    def suite(self, path: Path) -> Suite:
        console = Console(quiet=True)
        return Suite(True, self, lambda: self.now, console, path)


def whats(figures: Figures) -> set[str]:
    return {row.what for row in figures.rows}


def test_a_row_that_fails_is_named_and_loses_no_other(tmp_path: Path) -> None:
    told = Told(1.0, **{"1b, compiled": "no", CEILINGS: "busy"})
    suite = told.suite(tmp_path / "x.json")
    assert suite.run() is False
    assert suite.failed == [f"{CEILINGS}: ValueError: busy", "1b, compiled: ValueError: no"]
    assert {"gpt2-124m, compiled", "7b, LoRA, compiled", "1b, eager"} <= whats(suite.figures)
    assert "1b, compiled" not in whats(suite.figures)  # its peers have nothing to stand beside
    assert all(row.aim is None for row in suite.figures.rows)  # of a toy


def test_rows_for_which_no_time_is_left_are_named_and_not_begun(tmp_path: Path) -> None:
    told = Told(150.0)  # the ceilings and two rows leave 70 s, which the third one would need
    suite = told.suite(tmp_path / "x.json")
    assert suite.run() is True
    assert told.asked == [CEILINGS, *ROWS[:3]]
    assert told.now == gpu.BUDGET_S
    assert suite.left_out[:2] == [
        f"{ROWS[2]}: left out, not done within 70 s, which were left of {gpu.BUDGET_S} s",
        f"{ROWS[3]}: left out, 0 of {gpu.BUDGET_S} s are left; --go-on measures the rest",
    ]
    assert {line.partition(": left out")[0] for line in suite.left_out} == set(ROWS[2:])


def test_what_a_failed_row_printed_is_kept_and_its_error_is_named(tmp_path: Path) -> None:
    printed = "Traceback\nRuntimeError: the cause\n\nrank 0, step 1. `unisono replay X`\n"

    def measure(name: str, is_small: bool, limit_s: float) -> dict[str, Any]:
        if name == CODER:
            raise gpu.RowFailed(printed)
        if name == RETRIEVER:
            return {"nothing": "of use"}
        return {"product": 1e12, "copy": 1e12} if name == CEILINGS else {**FOUND, **PUBLISHED}

    suite = Suite(True, measure, lambda: 0.0, Console(quiet=True), tmp_path / "x.json")
    assert suite.run() is False
    log = tmp_path / "gpu" / "occupation-coder-of-canine-s-size.log"
    assert suite.failed == [
        f"{CODER}: RuntimeError: the cause; all that it printed is in {log}",
        f"{RETRIEVER}: KeyError: 'memory_gib'",
    ]
    assert log.read_text() == printed
    assert "1b, eager" in whats(suite.figures)


def test_another_call_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    path, asked = tmp_path / "x.json", []

    def call(until: int) -> Suite:
        told = Told(gpu.BUDGET_S / until)
        measure = lambda *a: told(*a) | PUBLISHED  # noqa: E731
        suite = Suite(False, measure, lambda: told.now, Console(quiet=True), path, goes_on=True)
        assert suite.run() is True
        asked.append(told.asked)
        return suite

    assert len(call(4).figures.rows) < len(call(100).figures.rows)
    assert asked == [[CEILINGS, *ROWS[:3]], [name for name in ROWS[3:] if is_possible(name)]]
    last = call(100)
    assert asked[-1] == []
    assert {row["what"] for row in json.loads(path.read_text())["figures"]} == whats(last.figures)
    assert last.limits.ceiling == 1e12


def is_possible(name: str) -> bool:
    try:
        gpu.check_possible(name, False)
    except gpu.LeftOut:
        return False
    return True


def test_rows_of_unequal_steps_say_so() -> None:
    figures = Figures()
    beside(figures, "1b, compiled", FOUND, "eager", FOUND)
    beside(figures, "1b, compiled", FOUND, "eager", {**FOUND, "halvings": 2})
    notes = [row.note for row in figures.rows]
    assert notes == ["", "rows of a step halved 1 x, of eager 2 x"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("1b, compiled", r"needs a C compiler; install gcc, or name one in \$CC"),
        (f"1b, {ACCELERATE}", "accelerate is not installed; pip install -e"),
        (SHAKESPEARE, "there is no .*give Shakespeare's text as --text FILE"),
    ],
)
def test_a_row_that_lacks_something_is_left_out(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda found: None if name == "1b, compiled" else "cc")
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    gpu.check_possible("1b, eager", False)
    with pytest.raises(gpu.LeftOut, match=message):
        gpu.check_possible(name, False, tmp_path / "no.txt")


def test_figures_are_in_the_file_after_each_row(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "benchmarks.json"
    seen: list[int] = []

    def measure(name: str, is_small: bool, limit_s: float) -> dict[str, Any]:
        seen.append(len(json.loads(path.read_text())["figures"]) if path.exists() else 0)
        return {"product": 1e12, "copy": 1e12} if name == CEILINGS else {**FOUND, **PUBLISHED}

    suite = Suite(True, measure, lambda: 0.0, Console(quiet=True), path)
    suite.is_small = False  # and so kept
    suite.run()
    assert seen == sorted(set(seen))
    assert seen[:2] == [0, 2]


@pytest.mark.parametrize(
    ("words", "halvings"), [("torch.OutOfMemoryError: 2 GiB", 1), ("a.BadError: no", None)]
)
def test_what_does_not_fit_is_tried_with_half_the_rows(
    words: str, halvings: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*command: str, timeout_s: float) -> subprocess.CompletedProcess:
        options = dict(word.split("=", 1) for word in command if "=" in word)
        if options["--halvings"] == "0":
            return subprocess.CompletedProcess(command, 1, f"Traceback\n{words}\na hint\n")
        Path(options["--to"]).write_text(json.dumps({"rates": [1.0]}))
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(gpu, "run", run)
    if halvings is None:
        with pytest.raises(gpu.RowFailed, match="^a.BadError: no$"):
            gpu.measured("1b, eager", False, 60.0)
    else:
        assert gpu.measured("1b, eager", False, 60.0) == {"rates": [1.0], "halvings": halvings}


def test_a_row_that_hangs_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*command: str, timeout_s: float) -> subprocess.CompletedProcess:
        raise subprocess.TimeoutExpired(command, timeout_s)

    monkeypatch.setattr(gpu, "run", run)
    with pytest.raises(gpu.OutOfTime, match="not done within 60 s"):
        gpu.measured("1b, eager", False, 60.0)
    suite = Suite(True, gpu.measured, lambda: 0.0, Console(quiet=True))
    assert suite.run() is False
    assert f"{ROWS[0]}: not done within {gpu.MOST_S} s" in suite.failed


def test_every_row_that_is_named_can_be_measured() -> None:
    assert set(ROWS) | {CEILINGS} == set(rows(True, 0)) - {f"7b, LoRA, {w}" for w in
           ("eager", gpu.NANOGPT, ACCELERATE)}  # fmt: skip
    assert ROWS[-1] == SHAKESPEARE
    assert rows(False, 1)["1b, eager"].args[0].rows == SIZES["1b"].rows // 2


def test_the_arithmetic_of_a_token_by_hand() -> None:
    config = DecoderConfig(10, 8, hidden_size=4, num_layers=2, num_heads=2, feed_forward=6)
    # a layer: 4 products of 4 x 4, 3 of 4 x 6, two norms; then a norm, and the tied head
    weights = 2 * (4 * 16 + 3 * 24 + 8) + 4 + 40
    attention = 12 * 2 * 4 * 8
    assert flops_per_token(config, 8) == 6 * weights + attention
    assert flops_per_token(config, 8, are_weights_learnt=False) == 4 * weights + attention


def test_what_a_row_says_by_hand() -> None:
    figures = Figures()
    add_row(figures, "1b, compiled", {**FOUND, "lines": [LINE]}, Limits(1e12, 0.4e12))
    found = {(row.what, row.unit): row for row in figures.rows}
    speed = found["1b, compiled", "tokens/s"]
    assert speed.note == "rows of a step halved 1 x; time: forward 59.5 %, other 40.0 %, data 0.5 %"
    assert found["1b, compiled", "of the ceiling"].ours == pytest.approx([0.2, 0.24])
    share = found["1b, compiled", "MFU"]
    assert share.ours == pytest.approx([0.5, 0.6])
    assert share.aim == Aim(0.45, is_least=True, of="value")
    assert share.is_met
    step = found["1b, compiled, a step, all on", "ms"]
    assert step.of("ratio") == pytest.approx([1.03, 1.01])
    assert step.is_met  # 1.02 of the median
    assert found["1b, compiled, time waited for data", "share"].ours == [0.005]
    assert found["1b, compiled, positions of padding", "share"].is_met is False


def test_shares_of_what_a_run_counts_itself() -> None:
    figures = Figures()
    add_row(figures, "coder", {**FOUND, "flops": None, "lines": [LINE]}, Limits(1e12, None))
    units = {row.unit: row for row in figures.rows if row.what == "coder"}
    assert units.keys() == {"tokens/s", "MFU"}  # the ceiling's share was not known
    assert units["MFU"].ours == [0.5]


@pytest.mark.filterwarnings("ignore:.*have no `validation_step`")
def test_a_language_model_is_measured_at_a_toy_size(tmp_path: Path) -> None:
    found = language_model(SIZES["1b"].small(), False, tmp_path)
    assert len(found.rates) == len(found.loop_ms) == len(found.lines) == ROUNDS
    assert all(rate > 0 for rate in found.rates)
    assert [line["padding_share"] for line in found.lines] == [0.0] * ROUNDS
    json.dumps(found._asdict())


def test_rounds_leave_the_warm_up_out() -> None:
    rounds = Rounds()
    for _ in range(40):
        rounds.note(7)
    assert rounds.amounts == [70] * 3
