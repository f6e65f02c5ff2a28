"""Two ddp processes of one thread each beside two unconnected plain loops.

pytest -m benchmark tests/benchmarks/test_two_processes.py
"""

import json
import re
from pathlib import Path

import pytest
import torch

from datamodules.demo import demo_text
from lit_models.causal_lm.network import Decoder, DecoderConfig
from tests.benchmarks.figures import Aim, Figures
from tests.benchmarks.language_models import adamw, plain_loop
from tests.distributed.launch import in_world, run
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
    torch.set_num_threads(1)
    network = Decoder(DecoderConfig(max_positions=WIDTH, **SHAPE))
    text = torch.randint(SHAPE["vocab_size"], (200_000,))
    seconds = plain_loop(network, text, ROWS, WIDTH, STEPS, adamw)[WARM_UP:]
    print(f"samples/s {ROWS * len(seconds) / sum(seconds)}", flush=True)


def side_by_side() -> float:
    """Return samples per second of two loops together, whose processes share the cores."""
    rates = re.findall(r"^samples/s ([\d.]+)$", in_world(2, one_loop), re.MULTILINE)
    assert len(rates) == 2
    return sum(map(float, rates))


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
