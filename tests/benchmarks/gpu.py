"""What one GPU reaches: its ceilings, then the training of every family at a real size.

python -m tests.benchmarks.gpu            needs one GPU and the packages
python -m tests.benchmarks.gpu 1b         the rows alone whose names begin so
python -m tests.benchmarks.gpu --small    the same rows at toy sizes, also on a CPU: do they run?

Each row has a process of its own; its figures are in runs/benchmarks.json when it ends. A row that
fails is named, and loses no other.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from lit_models.training.throughput import peak_of
from tests.benchmarks.figures import FILE, Aim, Figures, show
from tests.benchmarks.gpu_rows import CODER as CODER_SIZE
from tests.benchmarks.gpu_rows import RETRIEVER as RETRIEVER_SIZE
from tests.benchmarks.gpu_rows import SHAKESPEARE as SHAKESPEARE_TEXT
from tests.benchmarks.gpu_rows import (
    SIZES,
    ceilings,
    language_model,
    nanogpt_loop,
    of_config,
    to_its_loss,
    transformers_loop,
)
from tests.distributed.launch import run

MOST_S, SHAKESPEARE_S = 160, 600  # of one row, and of the one that trains to the published loss
ERROR = re.compile(r"[\w.]+(Error|Exception)\b.*")  # the line of a traceback that says what failed
CEILINGS, SHAKESPEARE = "ceilings", "shakespeare_gpu.yaml"
NANOGPT, ACCELERATE = "nanoGPT's loop", "transformers + accelerate"
CODER, RETRIEVER = "occupation coder of CANINE's size", "retriever of MiniLM's size"
ROWS = (  # those with an aim first
    *("gpt2-124m, compiled", "1b, compiled", "7b, LoRA, compiled"),
    *(f"gpt2-124m, {NANOGPT}", f"1b, {NANOGPT}", CODER, RETRIEVER),
    *(f"gpt2-124m, {ACCELERATE}", f"1b, {ACCELERATE}"),
    *("gpt2-124m, eager", "1b, eager", SHAKESPEARE),
)
FAMILY, OF_CEILING = "GPU", "of the ceiling"
AIMS = {
    ("gpt2-124m, compiled", OF_CEILING): 0.50,
    ("1b, compiled", "MFU"): 0.45,
    ("7b, LoRA, compiled", "TFLOP/s"): 400.0,
}
MOST_OVERHEAD, MOST_PADDING, MOST_WAIT = 1.02, 0.02, 0.01
SHAKESPEARE_NATS = 1.47  # what nanoGPT states for this size
LEAST_SHOWN = 0.001  # of the time
Measure = Callable[[str, argparse.Namespace, float], dict[str, Any]]


class RowFailed(RuntimeError):
    """A row that failed; its words are the error of the last traceback, or else the last line.

    Args:
        printed: all that it printed, kept as an attribute.
    """

    def __init__(self, printed: str) -> None:
        lines = [line.strip() for line in printed.strip().splitlines()] or ["no word"]
        super().__init__(([line for line in lines if ERROR.match(line)] or lines)[-1])
        self.printed = printed


def rows(is_small: bool, text: Path = SHAKESPEARE_TEXT) -> dict[str, Callable[[Path], Any]]:
    """Return name -> the function that measures it in a folder.

    Args:
        is_small: at toy sizes.
        text: of the Shakespeare run.
    """
    found: dict[str, Callable[[Path], Any]] = {}
    for name, full in SIZES.items():
        size = full.small() if is_small else full
        found[f"{name}, compiled"] = partial(language_model, size, True)
        found[f"{name}, eager"] = partial(language_model, size, False)
        found[f"{name}, {NANOGPT}"] = partial(nanogpt_loop, size)
        found[f"{name}, {ACCELERATE}"] = partial(transformers_loop, size)
    number = 16 if is_small else 512
    coder, retriever = ({}, {}) if is_small else (CODER_SIZE, RETRIEVER_SIZE)
    found[CODER] = partial(of_config, "occupation_coder/demo.yaml", coder, number)
    found[RETRIEVER] = partial(of_config, "seo/retriever_demo.yaml", retriever, number)
    found[CEILINGS] = partial(ceilings, is_small)
    found[SHAKESPEARE] = partial(to_its_loss, text)
    return found


def measured(name: str, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Return what a row found, in a process of its own.

    Raises:
        RowFailed: it failed, or did not end within the limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = ["-m", "tests.benchmarks.gpu", f"--row={name}", f"--to={path}"]
        command += [f"--text={options.text}", *(["--small"] if options.small else [])]
        try:
            done = run(*command, timeout_s=limit_s)
        except subprocess.TimeoutExpired:
            raise RowFailed(f"not done within {limit_s:.0f} s") from None
        if done.returncode:
            raise RowFailed(done.stdout)
        return json.loads(path.read_text("utf-8"))


class Limits(NamedTuple):
    """FLOP/s of a matrix product that was measured, and of the data sheet; none where unknown."""

    ceiling: float | None = None
    peak: float | None = None


def add_row(figures: Figures, name: str, found: dict[str, Any], limits: Limits) -> None:
    """Add all that a training says. Args: found, fields of `gpu_rows.Found`."""
    memory = (found["memory_gib"],) * 2 if found["memory_gib"] else None
    note = split(found["lines"])
    figures.add(FAMILY, name, found["unit"], found["rates"], memory_gib=memory, note=note)
    shares: dict[str, list[float]] = {}
    if found["flops"]:
        used = [rate * found["flops"] for rate in found["rates"]]
        shares["TFLOP/s"] = [value / 1e12 for value in used]
        for unit, limit in ((OF_CEILING, limits.ceiling), ("MFU", limits.peak)):
            if limit is not None:
                shares[unit] = [value / limit for value in used]
    elif found["lines"] and all("mfu" in line for line in found["lines"]):
        shares["MFU"] = [line["mfu"] for line in found["lines"]]  # by the throughput's own count
    for unit, values in shares.items():
        least = AIMS.get((name, unit))
        aim = None if least is None else Aim(least, is_least=True, of="value")
        figures.add(FAMILY, name, unit, values, aim=aim)
    if found["loop_ms"]:
        figures.add(
            *(FAMILY, f"{name}, a step, all on", "ms", found["steps_ms"]),
            *("plain loop over its module and batches", found["loop_ms"], Aim(MOST_OVERHEAD)),
        )
    if lines := found["lines"]:
        padding = [line["padding_share"] for line in lines]
        waits = [_share([line], "data") for line in lines]
        for what, values, most in (
            ("positions of padding", padding, MOST_PADDING),
            ("time waited for data", waits, MOST_WAIT),
        ):
            figures.add(FAMILY, f"{name}, {what}", "share", values, aim=Aim(most, of="value"))


def beside(
    figures: Figures, name: str, ours: dict[str, Any], peer: str, theirs: dict[str, Any]
) -> None:
    """Add our speed beside that of a peer on the same shape; rows were measured one by one.

    Memory is that of both.
    """
    aim = None if peer == "eager" else Aim(1.0, is_least=True)
    memory = (ours["memory_gib"], theirs["memory_gib"])
    rates = (ours["rates"], peer, theirs["rates"])
    options = {"aim": aim, "memory_gib": memory if all(memory) else None}
    figures.add(FAMILY, name, ours["unit"], *rates, **options)


def split(lines: list[dict[str, Any]]) -> str:
    """Return where the time went, the longest first, such as `backward 61 %, forward 30 %`."""
    if not lines:
        return ""
    shares = {phase: _share(lines, phase) for phase in lines[0]["split"]}
    shown = sorted((s, name) for name, s in shares.items() if s >= LEAST_SHOWN)
    return "time: " + ", ".join(f"{name} {100 * s:.1f} %" for s, name in reversed(shown))


def _share(lines: list[dict[str, Any]], phase: str) -> float:
    spent = sum(line["split"][phase] or 0.0 for line in lines)
    return spent / sum(line["seconds"] for line in lines)


def figures_of(found: dict[str, dict[str, Any]]) -> Figures:
    """Return the figures of all rows that were measured, by name."""
    figures, limits = Figures(), Limits()
    for name, each in found.items():
        if name == CEILINGS:
            gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
            limits = Limits(each["product"], gpu and peak_of(gpu, "bf16-mixed"))
            for what, unit, value in (
                ("product of two square matrices, bfloat16", "TFLOP/s", each["product"] / 1e12),
                ("copy within memory, read and written", "GB/s", each["copy"] / 1e9),
            ):
                figures.add(FAMILY, what, unit, [value])
        elif name == SHAKESPEARE:
            aim = Aim(SHAKESPEARE_NATS, of="value")
            figures.add(FAMILY, f"{name}, best val/loss", "nats", [each["loss"]], aim=aim)
            figures.add(FAMILY, f"{name}, start and end included", "s", [each["seconds"]])
            figures.add(FAMILY, name, "tokens/s", [each["rate"]])
        else:
            add_row(figures, name, each, limits)
            size, _, kind = name.rpartition(", ")
            ours = found.get(f"{size}, compiled")
            if kind in (NANOGPT, ACCELERATE, "eager") and ours is not None:
                beside(figures, f"{size}, compiled", ours, kind, each)
    return figures


def measure_all(
    options: argparse.Namespace, path: Path = FILE, measure: Measure = measured
) -> list[str]:
    """Measure the rows, and keep and show their figures; those of toy sizes are shown alone,
    without aims.

    Args:
        options: `small`, `only` and `text` of the command line.
        path: that keeps the figures; what failed rows printed is in gpu/ beside it.
        measure: of a row, see `measured`.

    Returns:
        a line for each row that failed.
    """
    console = Console(highlight=False)
    found: dict[str, dict[str, Any]] = {}
    missing: list[str] = []
    for name in (CEILINGS, *(row for row in ROWS if row.startswith(options.only))):
        is_long = name == SHAKESPEARE
        if is_long and options.small:
            continue
        try:
            found[name] = measure(name, options, SHAKESPEARE_S if is_long else MOST_S)
        except RowFailed as error:
            log = path.parent / "gpu" / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(error.printed, "utf-8")
            missing.append(f"{name}: {error}; all that it printed is in {log}")
            continue
        figures = figures_of(found)
        if options.small:  # no aim is meant for these sizes
            figures.rows = [replace(row, aim=None) for row in figures.rows]
        else:
            figures.write(path)
        shown = [row for row in figures.rows if row.what.startswith(name) or name == CEILINGS]
        show(shown, console)
        for row in shown:
            memory = f"{row.memory_gib[0]:.1f} GiB; " if row.memory_gib else ""
            if row.note:
                line = f"  {row.what}, {row.unit}: {memory}{row.note}"
                console.print(line, markup=False, soft_wrap=True)
    show(figures_of(found).rows, console)
    for line in missing:
        console.print(line, markup=False, soft_wrap=True)
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="?", default="", help="rows whose names begin so; else all")
    parser.add_argument("--small", action="store_true", help="toy sizes, also without a GPU")
    parser.add_argument("--text", type=Path, default=SHAKESPEARE_TEXT, help="of Shakespeare")
    parser.add_argument("--row", choices=(CEILINGS, *ROWS), help="this one alone, unkept")
    parser.add_argument("--to", type=Path, help="JSON that the row writes; else it is printed")
    options = parser.parse_args()
    if options.row:
        with tempfile.TemporaryDirectory() as folder:
            row = rows(options.small, options.text)[options.row]
            found = row(Path(folder))
        content = json.dumps(found if isinstance(found, dict) else found._asdict())
        options.to.write_text(content, "utf-8") if options.to else print(content)
        return
    if not torch.cuda.is_available() and not options.small:
        sys.exit("There is no GPU here; --small runs the rows at toy sizes on the CPU.")
    sys.exit(1 if measure_all(options) else 0)


if __name__ == "__main__":
    main()
