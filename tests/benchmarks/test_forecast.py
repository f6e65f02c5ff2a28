"""What `unisono plan --rehearse` says of a run, beside that run: memory and seconds of a step.

pytest -m benchmark tests/benchmarks/test_forecast.py -s; on a machine that does nothing else.
GATHERED_ON_CPU (lit_models/forecasting/prediction.py) was chosen from the fsdp figures of the
language model and of the occupation coder together; only the retriever was held out, and the scorer
was looked at by nobody before. The language model's rows in the card were put together from
separate runs. Plans and runs take turns; figures are medians over the rounds.
"""

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.figures import Aim, Figures
from tests.distributed.launch import run
from tests.toy import ledger_lines

pytestmark = pytest.mark.benchmark
ROUNDS, WARM_UP, GIB = 3, 3, 2**30
WORLDS = ((1, "ddp"), (2, "ddp"), (2, "fsdp"))
RUNS: dict[str, list[str]] = {
    "causal_lm": [
        *("--config", "causal_lm/demo.yaml", "--trainer.max_steps=16"),
        *("--model.network.hidden_size=384", "--data.global_batch_size=4"),
    ],
    "occupation_coder": ["--config", "occupation_coder/demo.yaml", "--trainer.max_epochs=1"],
    "seo retriever": ["--config", "seo/retriever_demo.yaml", "--trainer.max_steps=60"],
    "seo scorer": ["--config", "seo/scorer_demo.yaml", "--trainer.max_steps=60"],
}
QUIET = ("--trainer.accelerator=cpu",)
TRAINING = ("--trainer.limit_val_batches=0", "--test_after_fit=false", "--trainer.strategy=")
AIMS = (("memory", "GiB", 0.10), ("seconds of a step", "s", 0.25))
Rounds = dict[tuple[str, int, str], list[tuple[float, float]]]  # GiB, seconds


def planned(options: list[str]) -> dict[tuple[int, str], tuple[float, float]]:
    """Return (devices, strategy) -> (GiB, seconds) that a plan predicts."""
    done = run(
        *("-m", "lit_models", "plan", *options, *QUIET, "--devices=1,2", "--rehearse", "--json"),
        timeout_s=600,
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


def add_rows(
    figures: Figures,
    name: str,
    planned_rounds: list[tuple[float, float]],
    measured_rounds: list[tuple[float, float]],
) -> None:
    """Add how far memory and seconds are planned from what was measured, a row each.

    Args:
        figures: takes the rows.
        name: of the run and its world.
        planned_rounds: GiB and seconds of each round.
        measured_rounds: the same of the runs, in turns with the plans.
    """
    for index, (kind, unit, bound) in enumerate(AIMS):
        before = [values[index] for values in planned_rounds]
        after = [values[index] for values in measured_rounds]
        apart = [abs(a / b - 1) for a, b in zip(before, after, strict=True)]
        a, b = statistics.median(before), statistics.median(after)
        note = f"planned {a:.4g} {unit}, measured {b:.4g} {unit}"
        what = f"{kind} planned apart from measured, {name}"
        figures.add("forecast", what, "share", apart, aim=Aim(bound, of="value"), note=note)


def test_predictions_beside_measurements(tmp_path: Path, figures: Figures) -> None:
    predicted: Rounds = defaultdict(list)
    measured: Rounds = defaultdict(list)
    for number in range(ROUNDS):
        for name, options in RUNS.items():
            for (devices, strategy), foretold in planned(options).items():
                predicted[name, devices, strategy].append(foretold)
                folder = tmp_path / f"{number}-{name}-{devices}-{strategy}"
                found = trained(folder, options, devices, strategy)
                measured[name, devices, strategy].append(found)
    for key, rounds in predicted.items():
        name, devices, strategy = key
        world = f"{devices} {strategy}" if devices > 1 else "1 process"
        add_rows(figures, f"{name}, {world}", rounds, measured[key])
