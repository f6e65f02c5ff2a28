"""Two ddp processes of one thread each beside two unconnected plain loops.

pytest -m benchmark tests/benchmarks/test_two_processes.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from datamodules.demo import demo_text
from lit_models.causal_lm.network import Decoder, DecoderConfig
from tests.benchmarks.figures import Aim, Figures
from tests.benchmarks.language_models import adamw, plain_loop
from tests.distributed.launch import ROOT, run
from tests.toy import ledger_lines

STEPS, ROUNDS = 24, 3
SHAPE = {"vocab_size": 2000, "hidden_size": 256, "num_layers": 4, "num_heads": 4}
WIDTH, ROWS, WARM_UP = 256, 8, 4
NETWORK = {**{k: v for k, v in SHAPE.items() if k != "vocab_size"}, "max_positions": WIDTH}
FIT = (
    *("-m", "lit_models", "fit", "--config", "causal_lm/demo.yaml"),
    f"--model.network={json.dumps(NETWORK)}",
    f"--data.tokenizer.vocab_size={SHAPE['vocab_size']}",
    *("--data.layout=blocks", f"--data.global_batch_size={2 * ROWS}"),
    *(f"--data.micro_batch_size={ROWS}", "--trainer.devices=2", "--trainer.accelerator=cpu"),
    "--trainer.strategy=ddp",
    *(f"--trainer.max_steps={STEPS}", "--trainer.limit_val_batches=0", "--test_after_fit=false"),
    "--model.optimizer={class_path: torch.optim.AdamW, init_args: {lr: 0.001, fused: true}}",
)


def ours(folder: Path) -> float:
    """Return samples per second of both processes together."""
    done = run(*FIT, f"--trainer.default_root_dir={folder}", timeout_s=600)
    assert done.returncode == 0, done.stdout[-3000:]
    lines = ledger_lines(folder)[WARM_UP:]
    return sum(line["samples"] for line in lines) / sum(line["seconds"] for line in lines)


def one_loop() -> None:
    """Train after a start signal, so that both loops share the cores; print samples/s."""
    torch.set_num_threads(1)
    network = Decoder(DecoderConfig(max_positions=WIDTH, **SHAPE))
    text = torch.randint(SHAPE["vocab_size"], (200_000,))
    print("ready", flush=True)
    sys.stdin.readline()
    seconds = plain_loop(network, text, ROWS, WIDTH, STEPS, adamw)[WARM_UP:]
    print(ROWS * len(seconds) / sum(seconds), flush=True)


def side_by_side() -> float:
    """Return samples per second of two loops together."""
    command = [sys.executable, "-m", "tests.benchmarks.test_two_processes"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    loops = [
        subprocess.Popen(
            command, cwd=ROOT, env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    for loop in loops:
        assert loop.stdout.readline() == "ready\n"
    for loop in loops:
        loop.stdin.write("start\n")
        loop.stdin.flush()
    return sum(float(loop.communicate(timeout=600)[0]) for loop in loops)


@pytest.mark.benchmark
def test_two_processes_beside_two_loops(tmp_path: Path, figures: Figures) -> None:
    demo_text()
    together, alone = [], []
    for turn in range(ROUNDS):
        alone.append(side_by_side())
        together.append(ours(tmp_path / str(turn)))
    figures.add(
        *("shared", "two ddp processes x one thread", "samples/s", together),
        *("two unconnected plain loops", alone, Aim(0.95, is_least=True)),
    )


if __name__ == "__main__":
    one_loop()
