"""The published pre-training runs on one GPU: tokens per second and share of what it can do.

pytest -m benchmark tests/benchmarks/test_gpu_pretraining.py -s
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.table import Table

from datamodules.cache import cache_root
from datamodules.demo import demo_text
from lit_models.causal_lm.network import Decoder, DecoderConfig
from lit_models.causal_lm.presets import PRESETS

ROOT = Path(__file__).parents[2]
SHAKESPEARE = ROOT.parent / "shared" / "data" / "shakespeare" / "input.txt"
PEAK_FLOPS = 989e12  # dense bf16 of an H100 or H200 (SXM), from NVIDIA's data sheet
WARM_UP, STEPS = 20, 60


def matmul_ceiling(device: str, size: int, rounds: int = 20) -> float:
    """Return the FLOP/s of a bf16 product of two square matrices, the best of some rounds."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(rounds):
        _wait(device)
        start = time.perf_counter()
        a @ b
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def flops_per_token(config: DecoderConfig, length: int) -> float:
    """Return the FLOPs of forward and backward for one token, recomputation not counted.

    Source: Chowdhery et al. 2022, appendix B.
    """
    with torch.device("meta"):
        network = Decoder(config)
    looked_up = [network.positions.weight] if network.positions is not None else []
    if not config.tied:
        looked_up.append(network.embedding.weight)
    parameters = sum(p.numel() for p in network.parameters())
    multiplied = parameters - sum(p.numel() for p in looked_up)
    return 6 * multiplied + 12 * config.num_layers * config.hidden_size * length


def tokens_per_second(folder: Path, *options: str) -> float:
    """Return the median speed of a run of the command line, from its ledger."""
    command = [sys.executable, "-m", "lit_models", "fit", *options]
    done = subprocess.run(
        [*command, f"--trainer.default_root_dir={folder}", f"--trainer.max_steps={STEPS}"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "seconds" in line][WARM_UP:]
    return statistics.median(line["targets"]["tokens"] / line["seconds"] for line in steps)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.benchmark
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pretraining_on_one_gpu(tmp_path: Path) -> None:
    config = PRESETS["gpt2-124m"]
    text = f"--data.train_files={demo_text(cache_root())}"
    speed = tokens_per_second(tmp_path, "--config", "causal_lm/pretrain_gpt2_124m.yaml", text)
    used = speed * flops_per_token(config, config.max_positions)
    ceiling = matmul_ceiling("cuda", 8192)
    table = Table("tokens/s", "MFU of 989 TFLOP/s", "of the matmul ceiling", "ceiling, TFLOP/s")
    table.add_row(
        f"{speed:,.0f}",
        f"{used / PEAK_FLOPS:.3f}",
        f"{used / ceiling:.3f}",
        f"{ceiling / 1e12:.0f}",
    )
    Console().print(torch.cuda.get_device_name(), table)


@pytest.mark.benchmark
@pytest.mark.gpu
@pytest.mark.real_data
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="needs ../shared/data/shakespeare")
def test_shakespeare_on_one_gpu(tmp_path: Path) -> None:
    start = time.perf_counter()
    command = [sys.executable, "-m", "lit_models", "fit", "--config"]
    command += ["causal_lm/shakespeare_gpu.yaml", f"--data.train_files={SHAKESPEARE}"]
    subprocess.run([*command, f"--trainer.default_root_dir={tmp_path}"], cwd=ROOT, check=True)
    seconds = time.perf_counter() - start
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    column = rows[0].split(",").index("val/loss")
    losses = [float(row.split(",")[column]) for row in rows[1:] if row.split(",")[column]]
    Console().print(f"best val/loss {min(losses):.4f} nats after {seconds:.0f} s in all")
