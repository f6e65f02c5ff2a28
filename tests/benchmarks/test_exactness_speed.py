"""What exact dropout and bitwise sums cost: milliseconds a step of the coder's hisco network.

pytest -m benchmark tests/benchmarks/test_exactness_speed.py

Rows are the processor's time of rank 0: on a shared machine the clock is that of its neighbours,
and stands in the note.
"""

import json
import statistics
import time
from itertools import pairwise
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from tests.benchmarks.figures import Figures
from tests.distributed.launch import run

STEPS, WARM, REPEATS = 35, 5, 3
NETWORK = "width: 128, num_heads: 4, num_layers: 1, feed_forward: 256"
CODER = (
    *("-m", "lit_models", "fit", "--config", "occupation_coder/debug.yaml"),
    f"--model.encoder.init_args={{{NETWORK}, ngram_sizes: [1, 2, 3, 4, 5], num_buckets: 32768}}",
    f"--model.decoder.init_args={{{NETWORK}}}",
    *("--model.optimizer.fused=true", "--data.global_batch_size=64", "--trainer.accelerator=cpu"),
    *("--trainer.limit_val_batches=0", f"--trainer.limit_train_batches={STEPS}"),
    *("--trainer.gradient_clip_val=1.0", "--trainer.enable_progress_bar=false"),
    "--trainer.callbacks+=tests.benchmarks.test_exactness_speed.StepClock",
)
DROPOUT = tuple(
    f"--model.{part}dropout={rate}"
    for part, rate in (("encoder.", 0.2), ("decoder.", 0.2), ("loss.flat_", 0.3))
)
TWO = ("--trainer.devices=2", "--trainer.strategy=ddp")
FOURTHS, BITWISE = "--data.micro_batch_size=16", "--exactness=bitwise"
ROWS = {
    "no dropout": (),
    "dropout": DROPOUT,
    "exact dropout": (*DROPOUT, "--exact_dropout=true"),
    "4 chunks": (FOURTHS,),
    "4 chunks, bitwise": (FOURTHS, BITWISE),
    "4 chunks, 2 x ddp": (FOURTHS, *TWO),
    "4 chunks, 2 x ddp, bitwise": (FOURTHS, *TWO, BITWISE),
}
BESIDE = {
    "dropout": "no dropout",
    "exact dropout": "dropout",
    "4 chunks, bitwise": "4 chunks",
    "4 chunks, 2 x ddp, bitwise": "4 chunks, 2 x ddp",
}


class StepClock(Callback):
    """Writes steps.json: seconds of each step, by the clock and of this process's processor."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step > len(self.times):
            self.times.append((time.perf_counter(), time.process_time()))

    def on_train_end(self, trainer, *_):
        if trainer.is_global_zero:
            path = Path(trainer.default_root_dir) / "steps.json"
            path.write_text(json.dumps(self.times))


def step_ms(folder: Path, *options: str) -> tuple[float, float]:
    """Return the median step of a run, by the clock and of rank 0's processor."""
    done = run(*CODER, f"--trainer.default_root_dir={folder}", *options)
    assert done.returncode == 0, done.stdout
    times = json.loads((folder / "steps.json").read_text())[WARM:]
    clock, processor = (
        [1000 * (after[i] - before[i]) for before, after in pairwise(times)] for i in range(2)
    )
    return statistics.median(clock), statistics.median(processor)


@pytest.mark.benchmark
def test_exact_dropout_and_bitwise_sums(tmp_path: Path, figures: Figures) -> None:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ROWS}
    for repeat in range(REPEATS):  # in turns, so that a busy neighbour slows all alike
        for name, options in ROWS.items():
            found[name].append(step_ms(tmp_path / name / str(repeat), *options))
    for name, peer in BESIDE.items():
        clocks, processors = (
            [[value[i] for value in found[each]] for each in (name, peer)] for i in range(2)
        )
        medians = [f"{statistics.median(each):.1f}" for each in clocks]
        note = f"by the clock {medians[0]} beside {medians[1]} ms"
        ours, theirs = processors
        figures.add("shared", f"a step of the coder, {name}", "ms", ours, peer, theirs, note=note)
    assert len(found["exact dropout"]) == REPEATS
