"""The benchmark of one GPU, at toy sizes and with rows that only pretend to be measured."""

import json
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_models.causal_lm.network import PRESETS, DecoderConfig
from lit_models.config_files import find_config
from tests.benchmarks import gpu
from tests.benchmarks.figures import Aim, Figures
from tests.benchmarks.gpu import (
    ACCELERATE,
    CEILINGS,
    CODER,
    ROWS,
    SHAKESPEARE,
    Limits,
    add_row,
    measure_all,
    rows,
)
from tests.benchmarks.gpu_rows import ROUNDS, SIZES, Rounds, flops_per_token, language_model
from tests.distributed.launch import run

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
}
PUBLISHED = {"loss": 1.5, "seconds": 60.0, "rate": 1e6}


def options(small: bool = False, only: str = "") -> Namespace:
    return Namespace(small=small, only=only, text=Path("input.txt"))


class Measure:
    """Pretends to measure; rows of the names in `broken` fail with those words."""

    def __init__(self, **broken: str) -> None:
        self.broken, self.asked = broken, []

    def __call__(self, name: str, options: Namespace, limit_s: float) -> dict[str, Any]:
        self.asked.append(name)
        if name in self.broken:
            raise gpu.RowFailed(self.broken[name])
        return {"product": 1e12, "copy": 1e12} if name == CEILINGS else {**FOUND, **PUBLISHED}


def kept_rows(path: Path) -> set[str]:
    return {row["what"] for row in json.loads(path.read_text())["figures"]}


def test_a_row_that_fails_is_named_keeps_what_it_printed_and_loses_no_other(tmp_path):
    printed = "Traceback\nRuntimeError: the cause\n\nrank 0, step 1. `unisono replay X`\n"
    path, log = tmp_path / "x.json", tmp_path / "gpu" / "1b-compiled.log"
    missing = measure_all(options(), path, Measure(**{"1b, compiled": printed}))
    assert missing == [f"1b, compiled: RuntimeError: the cause; all that it printed is in {log}"]
    assert log.read_text() == printed
    assert {"gpt2-124m, compiled", "7b, LoRA, compiled", "1b, eager"} <= kept_rows(path)
    assert "1b, compiled" not in kept_rows(path)  # its peers have nothing to stand beside


def test_rows_of_one_name_are_measured_beside_those_that_are_kept(tmp_path):
    path, first, second = tmp_path / "x.json", Measure(**{CODER: "busy"}), Measure()
    assert len(measure_all(options(), path, first)) == 1
    assert measure_all(options(only=CODER), path, second) == []
    assert second.asked == [CEILINGS, CODER]
    assert {CODER, SHAKESPEARE, "1b, compiled"} <= kept_rows(path)


def test_figures_of_toys_are_not_kept(tmp_path):
    assert measure_all(options(small=True), tmp_path / "x.json", Measure()) == []
    assert list(tmp_path.rglob("*.json")) == []


def test_a_row_that_hangs_is_ended_in_time(monkeypatch):
    def run(*command: str, timeout_s: float) -> subprocess.CompletedProcess:
        raise subprocess.TimeoutExpired(command, timeout_s)

    monkeypatch.setattr(gpu, "run", run)
    with pytest.raises(gpu.RowFailed, match="not done within 60 s"):
        gpu.measured("1b, eager", options(), 60.0)


def test_every_row_that_is_named_can_be_measured():
    assert set(ROWS) | {CEILINGS} == set(rows(True)) - {
        f"7b, LoRA, {w}" for w in ("eager", gpu.NANOGPT, ACCELERATE)
    }
    assert ROWS[-1] == SHAKESPEARE


def test_the_row_of_gpt2_trains_what_is_shipped():
    path = find_config("causal_lm/pretrain_gpt2_124m.yaml")
    size, shipped = SIZES["gpt2-124m"], yaml.safe_load(path.read_text("utf-8"))
    module, data = (shipped[part]["init_args"] for part in ("model", "data"))
    assert (size.config, module["computation"]) == (PRESETS[module["network"]], {"compile": True})
    assert (size.rows, size.length) == (data["micro_batch_size"], data["context_length"])
    assert size.filled_vocabulary == 50_304  # of the peers


def test_the_arithmetic_of_a_token_by_hand():
    config = DecoderConfig(10, 8, hidden_size=4, num_layers=2, num_heads=2, feed_forward=6)
    # a layer: 4 products of 4 x 4, 3 of 4 x 6, two norms; then a norm, and the tied head
    weights = 2 * (4 * 16 + 3 * 24 + 8) + 4 + 40
    attention = 12 * 2 * 4 * 8
    assert flops_per_token(config, 8) == 6 * weights + attention
    assert flops_per_token(config, 8, are_weights_learnt=False) == 4 * weights + attention


def test_what_a_row_says_by_hand():
    figures = Figures()
    add_row(figures, "1b, compiled", {**FOUND, "lines": [LINE]}, Limits(1e12, 0.4e12))
    found = {(row.what, row.unit): row for row in figures.rows}
    speed = found["1b, compiled", "tokens/s"]
    assert speed.note == "time: forward 59.5 %, other 40.0 %, data 0.5 %"
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


def test_shares_of_what_a_run_counts_itself():
    figures = Figures()
    add_row(figures, "coder", {**FOUND, "flops": None, "lines": [LINE]}, Limits(1e12, None))
    units = {row.unit: row for row in figures.rows if row.what == "coder"}
    assert units.keys() == {"tokens/s", "MFU"}  # the ceiling's share was not known
    assert units["MFU"].ours == [0.5]


@pytest.mark.filterwarnings("ignore:.*have no `validation_step`")
def test_a_language_model_is_measured_at_a_toy_size(tmp_path):
    found = language_model(SIZES["1b"].small(), False, tmp_path)
    assert len(found.rates) == len(found.loop_ms) == len(found.lines) == ROUNDS
    assert all(rate > 0 for rate in found.rates)
    assert [line["padding_share"] for line in found.lines] == [0.0] * ROUNDS
    json.dumps(found._asdict())


def test_rounds_leave_the_warm_up_out():
    rounds = Rounds()
    for _ in range(40):
        rounds.note(7)
    assert rounds.amounts == [70] * 3


@pytest.mark.slow
def test_what_is_tested_on_a_gpu_runs_on_a_cpu():
    few = "not compiled and (Qwen2 or snippet_writer or twenty or fsdp or bits or masks)"
    command = ["-m", "pytest", "-q", "-n0", "-m", "gpu", "tests/gpu", "-k", few]
    done = run(*command, ACCELERATOR="cpu", PYTHONWARNINGS="")
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
