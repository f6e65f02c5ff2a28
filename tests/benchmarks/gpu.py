"""What one GPU reaches: its ceilings, then the training of every family at a real size.

python -m tests.benchmarks.gpu            needs one GPU and the packages; ends within 9 minutes
python -m tests.benchmarks.gpu --go-on    takes what earlier calls measured, and measures the rest
python -m tests.benchmarks.gpu --small    the same rows at toy sizes, also on a CPU: do they run?

Each row has a process of its own, is shown when it ends, and is then in runs/benchmarks.json, and
as it was measured in runs/gpu/. A row that does not fit in memory is tried again with half the
rows; one that fails, or for which no time is left, is named, and loses no other.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from lit_models.training.throughput import peak_of
from tests.benchmarks.figures import FILE, Aim, Figures, machine, show
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

BUDGET_S, LEAST_S, MOST_S = 520, 25, 160  # of all rows, to begin one, of one
SHAKESPEARE_S = 150  # to begin the row that trains until its loss is the published one
MOST_HALVINGS = 2
OUT_OF_MEMORY = "OutOfMemoryError"
ERROR = re.compile(r"[\w.]+(Error|Exception)\b.*")  # the line of a traceback that says what failed
CEILINGS, SHAKESPEARE = "ceilings", "shakespeare_gpu.yaml"
NANOGPT, ACCELERATE = "nanoGPT's loop", "transformers + accelerate"
CODER, RETRIEVER = "occupation coder of CANINE's size", "retriever of MiniLM's size"
ROWS = (  # those with an aim first; one call may not have the time for all
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
Measure = Callable[[str, bool, float], dict[str, Any]]


class LeftOut(Exception):
    """A row that cannot be had here; its words say why."""


class OutOfTime(RuntimeError):
    """A row that did not end within its limit."""


class RowFailed(RuntimeError):
    """A row that failed; its words are the error of the last traceback, or else the last line.

    Args:
        printed: all that it printed, kept as an attribute.
    """

    def __init__(self, printed: str) -> None:
        lines = [line.strip() for line in printed.strip().splitlines()] or ["no word"]
        super().__init__(([line for line in lines if ERROR.match(line)] or lines)[-1])
        self.printed = printed


def rows(
    is_small: bool, halvings: int, text: Path = SHAKESPEARE_TEXT
) -> dict[str, Callable[[Path], Any]]:
    """Return name -> the function that measures it in a folder.

    Args:
        is_small: at toy sizes.
        halvings: of the rows of a step.
        text: of the Shakespeare run.
    """
    found: dict[str, Callable[[Path], Any]] = {}
    for name, full in SIZES.items():
        size = full.small() if is_small else full.halved(halvings)
        found[f"{name}, compiled"] = partial(language_model, size, True)
        found[f"{name}, eager"] = partial(language_model, size, False)
        found[f"{name}, {NANOGPT}"] = partial(nanogpt_loop, size)
        found[f"{name}, {ACCELERATE}"] = partial(transformers_loop, size)
    number = 16 if is_small else 512 >> halvings
    coder, retriever = ({}, {}) if is_small else (CODER_SIZE, RETRIEVER_SIZE)
    found[CODER] = partial(of_config, "occupation_coder/demo.yaml", coder, number)
    found[RETRIEVER] = partial(of_config, "seo/retriever_demo.yaml", retriever, number)
    found[CEILINGS] = partial(ceilings, is_small)
    found[SHAKESPEARE] = partial(to_its_loss, text)
    return found


def check_possible(name: str, is_small: bool, text: Path = SHAKESPEARE_TEXT) -> None:
    """Raise LeftOut where a row needs what is not there."""
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    is_compiled = name == SHAKESPEARE or name.endswith(("compiled", NANOGPT))
    if is_compiled and not any(shutil.which(compiler) for compiler in compilers):
        raise LeftOut("torch.compile needs a C compiler; install gcc, or name one in $CC")
    if name.endswith(ACCELERATE) and find_spec("accelerate") is None:
        raise LeftOut("accelerate is not installed; pip install -e '.[bench]'")
    if name == SHAKESPEARE and is_small:
        raise LeftOut("it has no toy size")
    if name == SHAKESPEARE and not text.exists():
        raise LeftOut(f"there is no {text}; give Shakespeare's text as --text FILE")


def measured(
    name: str, is_small: bool, limit_s: float, text: Path = SHAKESPEARE_TEXT
) -> dict[str, Any]:
    """Return what a row found, in a process of its own.

    Raises:
        OutOfTime: it did not end within the limit.
        RowFailed: it failed.
    """
    end = time.monotonic() + limit_s
    for halvings in range(MOST_HALVINGS + 1):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "found.json"
            command = ["-m", "tests.benchmarks.gpu", f"--row={name}", f"--to={path}"]
            command += [f"--halvings={halvings}", f"--text={text}"]
            command += ["--small"] if is_small else []
            try:
                done = run(*command, timeout_s=max(1.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise OutOfTime(f"not done within {limit_s:.0f} s") from None
            if done.returncode == 0:
                return {**json.loads(path.read_text("utf-8")), "halvings": halvings}
            if OUT_OF_MEMORY not in done.stdout or halvings == MOST_HALVINGS:
                raise RowFailed(done.stdout)
    raise AssertionError


class Limits(NamedTuple):
    """FLOP/s of a matrix product that was measured, and of the data sheet; none where unknown."""

    ceiling: float | None = None
    peak: float | None = None


def add_row(figures: Figures, name: str, found: dict[str, Any], limits: Limits) -> None:
    """Add all that a training says. Args: found, fields of `gpu_rows.Found`, and `halvings`."""
    memory = (found["memory_gib"],) * 2 if found["memory_gib"] else None
    halved = f"rows of a step halved {found['halvings']} x; " if found.get("halvings") else ""
    note = halved + split(found["lines"])
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

    Memory is that of both. Where one of them had to take fewer rows in a step, the note says so.
    """
    aim = None if peer == "eager" else Aim(1.0, is_least=True)
    memory = (ours["memory_gib"], theirs["memory_gib"])
    rates = (ours["rates"], peer, theirs["rates"])
    halvings = [found.get("halvings", 0) for found in (ours, theirs)]
    words = f"rows of a step halved {halvings[0]} x, of {peer} {halvings[1]} x"
    note = words if len(set(halvings)) > 1 else ""
    options = {"aim": aim, "memory_gib": memory if all(memory) else None, "note": note}
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


class Suite:
    """All rows, one after the other, within a budget of time.

    Args:
        is_small: at toy sizes, which are no figures to keep.
        measure: of a row, see `measured`.
        clock: seconds.
        console: to print to.
        path: that keeps the figures; what rows found, and what failed ones printed, is in gpu/
            beside it.
        goes_on: take what earlier calls found on this device.
        text: of the Shakespeare run.
    """

    def __init__(
        self,
        is_small: bool,
        measure: Measure = measured,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
        path: Path = FILE,
        goes_on: bool = False,
        text: Path = SHAKESPEARE_TEXT,
    ) -> None:
        self.is_small, self.measure, self.clock, self.path = is_small, measure, clock, path
        self.text, self.device = text, machine()["device"]
        self.earlier = self._read() if goes_on else {}
        self.console = console or Console(highlight=False)
        self.figures, self.limits = Figures(), Limits()
        self.found: dict[str, dict[str, Any]] = {}
        self.failed: list[str] = []
        self.left_out: list[str] = []
        self._end = clock() + BUDGET_S

    def run(self) -> bool:
        """Measure all that there is time for; return whether no row failed."""
        for name in (CEILINGS, *ROWS):
            shown, begun = len(self.figures.rows), self.clock()
            try:
                self._take(name)
            except LeftOut as why:
                self._say(self.left_out, f"{name}: left out, {why}")
            except RowFailed as error:
                log = self._keep(name, "log", error.printed)
                self._say(self.failed, f"{name}: {error}; all that it printed is in {log}")
            except OutOfTime as error:
                self._say(self.failed, f"{name}: {error}")
            except Exception as error:  # also of what it found: the other rows are worth their time
                self._say(self.failed, f"{name}: {type(error).__name__}: {error}")
            if len(self.figures.rows) == shown:
                continue
            self.console.print(f"{name}: {self.clock() - begun:.0f} s")
            if self.is_small:  # no aim is meant for these sizes
                rows = (replace(row, aim=None) for row in self.figures.rows[shown:])
                self.figures.rows[shown:] = rows
            show(self.figures.rows[shown:], self.console)
            for row in self.figures.rows[shown:]:
                memory = f"{row.memory_gib[0]:.1f} GiB; " if row.memory_gib else ""
                if row.note:
                    line = f"  {row.what}, {row.unit}: {memory}{row.note}"
                    self.console.print(line, markup=False, soft_wrap=True)
            if not self.is_small:
                self.figures.write(self.path)
        show(self.figures.rows, self.console)
        for line in (*self.left_out, *self.failed):
            self.console.print(line, markup=False, soft_wrap=True)
        return not self.failed

    def _take(self, name: str) -> None:
        """Measure one row, where no earlier call did, and add its figures."""
        found = self.earlier.get(name)
        if found is None:
            found = self._measured(name)
            if not self.is_small:
                self._keep(name, "json", json.dumps({"device": self.device, "found": found}))
        self.found[name] = found
        if name == CEILINGS:
            gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
            self.limits = Limits(found["product"], gpu and peak_of(gpu, "bf16-mixed"))
            for what, unit, value in (
                ("product of two square matrices, bfloat16", "TFLOP/s", found["product"] / 1e12),
                ("copy within memory, read and written", "GB/s", found["copy"] / 1e9),
            ):
                self.figures.add(FAMILY, what, unit, [value])
        elif name == SHAKESPEARE:
            aim = Aim(SHAKESPEARE_NATS, of="value")
            self.figures.add(FAMILY, f"{name}, best val/loss", "nats", [found["loss"]], aim=aim)
            seconds = [found["seconds"]]
            self.figures.add(FAMILY, f"{name}, start and end included", "s", seconds)
            self.figures.add(FAMILY, name, "tokens/s", [found["rate"]])
        else:
            add_row(self.figures, name, found, self.limits)
            size, _, kind = name.rpartition(", ")
            ours = self.found.get(f"{size}, compiled")
            if kind in (NANOGPT, ACCELERATE, "eager") and ours is not None:
                beside(self.figures, f"{size}, compiled", ours, kind, found)

    def _measured(self, name: str) -> dict[str, Any]:
        check_possible(name, self.is_small, self.text)
        left, is_long = self._end - self.clock(), name == SHAKESPEARE
        if left < (SHAKESPEARE_S if is_long else LEAST_S):
            raise LeftOut(f"{max(0, left):.0f} of {BUDGET_S} s are left; --go-on measures the rest")
        limit_s = left if is_long else min(left, MOST_S)
        try:
            return self.measure(name, self.is_small, limit_s)
        except OutOfTime as error:
            if limit_s == MOST_S:
                raise
            raise LeftOut(f"{error}, which were left of {BUDGET_S} s") from error

    def _keep(self, name: str, ending: str, content: str) -> Path:
        """Write something of a row and return the file."""
        path = self._path(name, ending)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, "utf-8")
        return path

    def _read(self) -> dict[str, dict[str, Any]]:
        """Return what earlier calls found on this device."""
        written = {name: self._path(name, "json") for name in (CEILINGS, *ROWS)}
        read = {n: json.loads(p.read_text("utf-8")) for n, p in written.items() if p.exists()}
        return {n: each["found"] for n, each in read.items() if each["device"] == self.device}

    def _path(self, name: str, ending: str) -> Path:
        return self.path.parent / "gpu" / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.{ending}"

    def _say(self, kept: list[str], line: str) -> None:
        kept.append(line)
        self.console.print(line, markup=False, soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="toy sizes, also without a GPU")
    parser.add_argument("--go-on", action="store_true", help="measure what earlier calls have not")
    parser.add_argument("--text", type=Path, default=SHAKESPEARE_TEXT, help="of Shakespeare")
    parser.add_argument("--row", choices=(CEILINGS, *ROWS), help="this one alone, unkept")
    parser.add_argument("--halvings", type=int, default=0, help="of the rows of a step")
    parser.add_argument("--to", type=Path, help="JSON that the row writes; else it is printed")
    options = parser.parse_args()
    if options.row:
        with tempfile.TemporaryDirectory() as folder:
            row = rows(options.small, options.halvings, options.text)[options.row]
            found = row(Path(folder))
        content = json.dumps(found if isinstance(found, dict) else found._asdict())
        options.to.write_text(content, "utf-8") if options.to else print(content)
        return
    if not torch.cuda.is_available() and not options.small:
        sys.exit("There is no GPU here; --small runs the rows at toy sizes on the CPU.")
    measure = partial(measured, text=options.text)
    suite = Suite(options.small, measure, goes_on=options.go_on, text=options.text)
    sys.exit(0 if suite.run() else 1)


if __name__ == "__main__":
    main()
