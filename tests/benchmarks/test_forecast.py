"""What `unisono plan --rehearse` says of a run, beside that run: memory and seconds of a step.

pytest -m benchmark tests/benchmarks/test_forecast.py -s; on a machine that does nothing else. Its
constants (lit_models/forecasting/prediction.py) were fitted on the first family alone. Plans and
runs take turns; figures are medians over the rounds.
"""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from tests.distributed.launch import run
from tests.toy import ledger_lines

pytestmark = pytest.mark.benchmark
ROUNDS, WARM_UP, GIB = 3, 3, 2**30
WORLDS = ((1, "ddp"), (2, "ddp"), (2, "fsdp"))
RUNS: dict[str, list[str]] = {
    "causal_lm (fitted)": [
        *("--config", "causal_lm/demo.yaml", "--trainer.max_steps=16"),
        *("--model.network.hidden_size=384", "--data.global_batch_size=4"),
    ],
    "occupation_coder": ["--config", "occupation_coder/demo.yaml", "--trainer.max_epochs=1"],
    "seo retriever": ["--config", "seo/retriever_demo.yaml", "--trainer.max_steps=60"],
}
QUIET = ("--trainer.accelerator=cpu",)
TRAINING = ("--trainer.limit_val_batches=0", "--test_after_fit=false", "--trainer.strategy=")
Rounds = dict[tuple[str, int, str], list[tuple[float, float]]]  # GiB, seconds


def planned(options: list[str]) -> dict[tuple[int, str], tuple[float, float]]:
    """Return (devices, strategy) -> (GiB, seconds) that a plan predicts."""
    done = run(
        "-m", "lit_models", "plan", *options, *QUIET, "--devices=1,2", "--rehearse", "--json"
    )
    assert done.returncode == 0, done.stdout
    rows: dict[str, list[Any]] = json.loads(done.stdout[done.stdout.index("{") :])
    found = {}
    for devices, strategy in WORLDS:
        column = rows["devices"].index(devices)
        seconds = "s per step" if strategy == "ddp" else "s per step, fsdp"
        found[devices, strategy] = rows[f"GiB, {strategy}"][column], rows[seconds][column]
    return found


def trained(folder: Path, options: list[str], devices: int, strategy: str) -> tuple[float, float]:
    """Return the memory of the largest rank, GiB, and the seconds of a step, the first left out."""
    place = f"--trainer.default_root_dir={folder}"
    world = ("auto" if devices == 1 else strategy, f"--trainer.devices={devices}")
    settings = [*TRAINING[:-1], TRAINING[-1] + world[0], world[1], place]
    done = run("-m", "lit_models", "fit", *options, *QUIET, *settings, timeout_s=600)
    assert done.returncode == 0, done.stdout[-3000:]
    facts = json.loads((folder / "topology.json").read_text())
    seconds = [line["seconds"] for line in ledger_lines(folder)[WARM_UP:]]
    return max(rank["resident_bytes"] for rank in facts["memory"]) / GIB, statistics.fmean(seconds)


def medians(rounds: list[tuple[float, float]]) -> list[float]:
    return [statistics.median(values) for values in zip(*rounds, strict=True)]


def test_predictions_beside_measurements(tmp_path: Path) -> None:
    predicted: Rounds = defaultdict(list)
    measured: Rounds = defaultdict(list)
    for number in range(ROUNDS):
        for name, options in RUNS.items():
            for (devices, strategy), figures in planned(options).items():
                predicted[name, devices, strategy].append(figures)
                folder = tmp_path / f"{number}-{name}-{devices}-{strategy}"
                found = trained(folder, options, devices, strategy)
                measured[name, devices, strategy].append(found)
    table = Table("run", "devices", "GiB planned", "measured", "ratio", "s planned", "measured",
                  "ratio")  # fmt: skip
    for key, rounds in predicted.items():
        name, devices, strategy = key
        cells = []
        for before, after in zip(medians(rounds), medians(measured[key]), strict=True):
            cells += [f"{before:.3f}", f"{after:.3f}", f"{before / after:.2f}"]
        table.add_row(name, f"{devices} {strategy if devices > 1 else ''}", *cells)
    Console(width=110).print(table)
