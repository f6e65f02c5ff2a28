"""What exact dropout and bitwise sums cost: milliseconds a step of the coder's hisco network.

pytest -m benchmark tests/benchmarks/test_exactness_speed.py -s
"""

import platform
import statistics
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table

from tests.distributed.launch import run
from tests.toy import ledger_lines

STEPS, WARM, REPEATS = 45, 5, 5
NETWORK = "width: 128, num_heads: 4, num_layers: 1, feed_forward: 256"
CODER = (
    *("-m", "lit_models", "fit", "--config", "occupation_coder/debug.yaml"),
    f"--model.encoder.init_args={{{NETWORK}, ngram_sizes: [1, 2, 3, 4, 5], num_buckets: 32768}}",
    f"--model.decoder.init_args={{{NETWORK}}}",
    *("--model.optimizer.fused=true", "--data.global_batch_size=64", "--trainer.accelerator=cpu"),
    *("--trainer.limit_val_batches=0", f"--trainer.limit_train_batches={STEPS}"),
    "--trainer.gradient_clip_val=1.0",
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


def step_ms(folder: Path, *options: str) -> float:
    """Return the median of a run's steps; one thread a process."""
    done = run(*CODER, f"--trainer.default_root_dir={folder}", *options)
    assert done.returncode == 0, done.stdout
    return 1000 * statistics.median(line["seconds"] for line in ledger_lines(folder)[WARM:])


@pytest.mark.benchmark
def test_exact_dropout_and_bitwise_sums(tmp_path: Path) -> None:
    found: dict[str, list[float]] = {name: [] for name in ROWS}
    for repeat in range(REPEATS):  # in turns, so that a busy neighbour slows all alike
        for name, options in ROWS.items():
            found[name].append(step_ms(tmp_path / name / str(repeat), *options))
    title = f"{platform.machine()}, torch {torch.__version__}: ms a step of 64 rows"
    table = Table("run", "median", "lowest", "highest", title=title)
    for name, values in found.items():
        figures = (statistics.median(values), min(values), max(values))
        table.add_row(name, *(f"{value:.1f}" for value in figures))
    Console().print(table)
    assert len(found["exact dropout"]) == REPEATS
