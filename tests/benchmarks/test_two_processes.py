"""Two processes of one thread each: ddp beside two loops that know nothing of each other, and fsdp.

pytest -m benchmark tests/benchmarks/test_two_processes.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from datamodules.core.store import cache_root
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
    *(f"--trainer.max_steps={STEPS}", "--trainer.limit_val_batches=0", "--test_after_fit=false"),
    "--model.optimizer={class_path: torch.optim.AdamW, init_args: {lr: 0.001, fused: true}}",
)


def ours(folder: Path, strategy: str) -> tuple[float, float]:
    """Return samples per second of both processes together, and GiB of the larger one."""
    done = run(
        *FIT,
        f"--trainer.strategy={strategy}",
        f"--trainer.default_root_dir={folder}",
        timeout_s=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    lines = ledger_lines(folder)[WARM_UP:]
    facts = json.loads((folder / "topology.json").read_text())
    largest = max(rank["resident_bytes"] for rank in facts["memory"])
    rate = sum(line["samples"] for line in lines) / sum(line["seconds"] for line in lines)
    return rate, largest / 2**30


def one_loop() -> None:
    """Train after the word to start, so that both loops share the cores; print samples/s."""
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
    demo_text(cache_root())
    rates: dict[str, list[float]] = {"alone": [], "ddp": [], "fsdp": []}
    memory: dict[str, float] = {}
    for turn in range(ROUNDS):
        rates["alone"].append(side_by_side())
        for strategy in ("ddp", "fsdp"):
            rate, memory[strategy] = ours(tmp_path / f"{strategy}{turn}", strategy)
            rates[strategy].append(rate)
    what, peer = "two ddp processes x one thread", "two unconnected plain loops"
    at_least = Aim(0.95, is_least=True)
    figures.add("shared", what, "samples/s", rates["ddp"], peer, rates["alone"], at_least)
    both = (memory["fsdp"], memory["ddp"])
    figures.add(
        *("shared", "two fsdp processes x one thread", "samples/s"),
        *(rates["fsdp"], "two ddp processes", rates["ddp"], None, both),
    )


if __name__ == "__main__":
    one_loop()
