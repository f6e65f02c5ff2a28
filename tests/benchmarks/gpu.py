"""What one GPU reaches: its ceilings, then the training of every family at a real size.

python -m tests.benchmarks.gpu            needs one GPU and the packages; ends within 9 minutes
python -m tests.benchmarks.gpu --small    the same rows at toy sizes, also on a CPU: do they run?

Each row has a process of its own and is kept in runs/benchmarks.json when it ends.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lit_models.training.throughput.peaks import peak_of
from tests.benchmarks.figures import FILE, Aim, Figures
from tests.benchmarks.test_gpu_pretraining import ROOT, matmul_ceiling

BUDGET_S, LEAST_S = 520, 25
AIMS = {
    "gpt2-124m, compiled": ("of the ceiling", 0.50),
    "1b, compiled": ("MFU", 0.45),
    "7b, LoRA, compiled": ("TFLOP/s", 400.0),
}
CODER = {
    "model.init_args.encoder.init_args": {"num_layers": 12, "width": 768, "num_heads": 12,
                                          "feed_forward": 3072},
    "model.init_args.decoder.init_args": {"num_layers": 6, "width": 768, "num_heads": 12,
                                          "feed_forward": 3072},
}  # fmt: skip
RETRIEVER = {
    "model.init_args.encoder.init_args": {"width": 384, "num_layers": 6, "num_heads": 12,
                                          "feed_forward": 1536},
}  # fmt: skip


def rows(is_small: bool) -> dict[str, Callable[[Path], dict[str, Any]]]:
    """Return name -> the function that trains it in a folder."""
    from tests.benchmarks import gpu_rows as made

    sizes = {n: size.small() if is_small else size for n, size in made.SIZES.items()}
    found: dict[str, Callable[[Path], dict[str, Any]]] = {}
    for name in ("gpt2-124m", "1b"):
        found[f"{name}, eager"] = partial(made.ours, sizes[name], compiles=False)
        found[f"{name}, compiled"] = partial(made.ours, sizes[name], compiles=True)
        found[f"{name}, plain loop"] = partial(made.loop, sizes[name])
        if made.has_accelerate():
            peer = partial(made.transformers_model, sizes[name])
            found[f"{name}, transformers + accelerate"] = peer
    found["7b, LoRA, compiled"] = partial(made.ours, sizes["7b, LoRA"], compiles=True)
    coder, retriever = ({}, {}) if is_small else (CODER, RETRIEVER)
    demo = "occupation_coder/demo.yaml"
    found["occupation coder of CANINE's size"] = partial(made.of_config, demo, coder)
    demo = "seo/retriever_demo.yaml"
    found["retriever of MiniLM's size"] = partial(made.of_config, demo, retriever)
    return found


def ceilings(figures: Figures, is_small: bool) -> float:
    """Add what the device does at most; return FLOP/s of a matrix product."""
    name = "cuda" if torch.cuda.is_available() else "cpu"
    product = matmul_ceiling(name, 512 if is_small else 8192, rounds=5 if is_small else 20)
    figures.add("GPU", "product of two square matrices, bfloat16", "TFLOP/s", [product / 1e12])
    source = torch.empty((1 if is_small else 1024) * 2**20, device=name)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(10):
        begun = time.perf_counter()
        target.copy_(source)
        if name == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    moved = 2 * source.nbytes / best / 1e9
    figures.add("GPU", "copy within memory, read and written", "GB/s", [moved])
    return product


def measured(name: str, is_small: bool, limit_s: float) -> dict[str, Any]:
    """Return what a row printed, or why there is nothing."""
    command = [sys.executable, "-m", "tests.benchmarks.gpu", f"--row={name}"]
    command += ["--small"] if is_small else []
    environ = {**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=limit_s
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done within {limit_s:.0f} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no word"])[-1]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def add(figures: Figures, name: str, found: dict[str, Any], ceiling: float) -> None:
    """Add the row's speed and, where its arithmetic is known, its shares of what can be."""
    memory = (found["memory_gib"],) * 2 if found["memory_gib"] else None
    figures.add("GPU", name, found["unit"], found["rates"], memory_gib=memory)
    if not found["flops"]:
        return
    used = [rate * found["flops"] for rate in found["rates"]]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = peak_of(device, "bf16-mixed")
    shares = {"of the ceiling": ceiling, "TFLOP/s": 1e12, **({"MFU": peak} if peak else {})}
    for unit, limit in shares.items():
        of, least = AIMS.get(name, ("", 0.0))
        aim = Aim(least, is_least=True, of="value") if of == unit else None
        figures.add("GPU", name, unit, [value / limit for value in used], aim=aim)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="toy sizes, also without a GPU")
    parser.add_argument("--row", help="one row, by its name; prints JSON")
    options = parser.parse_args()
    if options.row:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(rows(options.small)[options.row](Path(folder))))
        return
    if not torch.cuda.is_available() and not options.small:
        sys.exit("There is no GPU here; --small runs the rows at toy sizes on the CPU.")
    begun, console = time.monotonic(), Console(highlight=False)
    figures = Figures()
    ceiling = ceilings(figures, options.small)
    for name in rows(options.small):
        left = BUDGET_S - (time.monotonic() - begun)
        found = measured(name, options.small, left) if left > LEAST_S else {"error": "no time left"}
        if "error" in found:
            console.print(f"{name}: {found['error']}", markup=False)
            continue
        add(figures, name, found, ceiling)
        if not options.small:  # toy sizes are no figures to keep
            figures.write(FILE)
    figures.show(console)


if __name__ == "__main__":
    main()
