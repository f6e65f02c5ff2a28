"""Benchmark of one GPU: its ceilings, then every family at a real size.

python -m tests.benchmarks.gpu                  needs one GPU and the packages
python -m tests.benchmarks.gpu 1b               only the rows whose names begin so
python -m tests.benchmarks.gpu --trace FOLDER   also a profile of three steps of each row
python -m tests.benchmarks.gpu --small          toy sizes, also on a CPU: does every row run?

Each row has a process of its own; its figures are in runs/benchmarks.json when it ends. A row that
fails is reported by name and does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.benchmarks import gpu_rows
from tests.benchmarks.figures import FILE, Aim, Figure, Figures, figure_of, table
from tests.benchmarks.gpu_rows import GPU, SIZES, language_model
from tests.distributed.launch import run

MOST_S, LONG_S = 160, 600  # limits of a usual row, and of one that trains to a published figure
ERROR = re.compile(r"[\w.]+(Error|Exception)\b.*")  # the line of a traceback that names the error
CEILINGS, SHAKESPEARE, HISCO = "ceilings", "shakespeare_gpu.yaml", "hisco.yaml"
NANOGPT, ACCELERATE = "nanoGPT's loop", "transformers + accelerate"
CODER, RETRIEVER = "occupation coder of CANINE's size", "retriever of MiniLM's size"
OF_CEILING = "of the ceiling"
AT_LEAST = Aim(1.0, is_least=True)
AIMS = {  # (what, unit) -> least value
    (CEILINGS, "TFLOP/s"): 790.0,
    ("gpt2-124m, compiled", "tokens/s"): 462_000.0,
    ("1b, compiled", "tokens/s"): 54_000.0,
    ("7b, LoRA, compiled", "tokens/s"): 14_900.0,
    ("1b writes, 1 at once", OF_CEILING): 0.5,
}


class Row(NamedTuple):
    """One row.

    Args:
        measure: from a folder to figures, named after the row; peers compare with the first.
        limit_s: seconds after which its process is ended.
        peers: names of other rows -> the aim of our figure divided by theirs.
    """

    measure: Callable[[Path], list[Figure]]
    limit_s: float = MOST_S
    peers: Mapping[str, Aim | None] = {}


Rows = Mapping[str, Row]


class RowFailed(RuntimeError):
    """A row failed; the message is the error of the last traceback, or else the last line printed.

    Args:
        printed: all output of the row, kept as an attribute.
    """

    def __init__(self, printed: str) -> None:
        lines = [line.strip() for line in printed.strip().splitlines()] or ["no word"]
        super().__init__(([line for line in lines if ERROR.match(line)] or lines)[-1])
        self.printed = printed


def rows(options: argparse.Namespace) -> Rows:
    """Return the rows of this command by name, those with an aim first."""
    is_small = options.small
    sizes = {name: full.small() if is_small else full for name, full in SIZES.items()}
    table = {CEILINGS: Row(partial(gpu_rows.ceilings, is_small))}
    for name, size in sizes.items():
        peers = {NANOGPT: AT_LEAST, ACCELERATE: AT_LEAST, "eager": None} if not size.lora else {}
        aims = {f"{name}, {peer}": aim for peer, aim in peers.items()}
        limit_s = LONG_S if size.lora else MOST_S  # its base is first drawn on the host
        table[f"{name}, compiled"] = Row(partial(language_model, size, True), limit_s, aims)
    number = 16 if is_small else 512
    coder, retriever = ({}, {}) if is_small else (gpu_rows.CODER, gpu_rows.RETRIEVER)
    demo, pairs = "occupation_coder/demo.yaml", "seo/retriever_demo.yaml"
    table[CODER] = Row(partial(gpu_rows.of_config, demo, coder, number))
    table[RETRIEVER] = Row(partial(gpu_rows.of_config, pairs, retriever, number))
    for workers in (0, 4, 12):
        loader = {**coder, "data.init_args.loader": {"num_workers": workers}}
        of_workers = partial(gpu_rows.of_config, demo, loader, number)
        table[f"{CODER}, {workers} workers"] = Row(of_workers)
    texts = partial(gpu_rows.prediction, demo, coder, 100 if is_small else 200_000)
    table[f"{CODER}, prediction"] = Row(texts, LONG_S)
    for name in ("gpt2-124m", "1b"):
        table[f"{name}, {NANOGPT}"] = Row(partial(gpu_rows.nanogpt_loop, sizes[name]))
        table[f"{name}, {ACCELERATE}"] = Row(partial(gpu_rows.transformers_loop, sizes[name]))
        table[f"{name}, eager"] = Row(partial(language_model, sizes[name], False))
    for kind in ("file", "shards"):
        stalls = partial(gpu_rows.stalls, sizes["1b"], kind == "shards")
        table[f"1b, stands still for a checkpoint, {kind}"] = Row(stalls)
    for number in (1, 32):
        table[f"1b writes, {number} at once"] = Row(partial(gpu_rows.writing, sizes["1b"], number))
    documents = 10_000 if is_small else 10_000_000
    table["search"] = Row(partial(gpu_rows.searching, documents, True), peers={"float32 top": None})
    table["float32 top"] = Row(partial(gpu_rows.searching, documents, False))
    steps = 20 if is_small else 400
    curves = partial(gpu_rows.curves, sizes["gpt2-124m"], not is_small, steps)
    table["gpt2-124m, bfloat16 beside float32"] = Row(curves, LONG_S)
    if not is_small:
        table[HISCO] = Row(gpu_rows.hisco, LONG_S)
        table[SHAKESPEARE] = Row(partial(gpu_rows.shakespeare, options.text), LONG_S)
    return table


def measured(name: str, row: Row, options: argparse.Namespace) -> list[Figure]:
    """Return the figures of a row, measured in a process of its own.

    Raises:
        RowFailed: the process failed, or did not end within the limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = ["-m", options.module, f"--row={name}", f"--to={path}", f"--text={options.text}"]
        environ = {}
        if options.trace:
            options.trace.mkdir(parents=True, exist_ok=True)
            environ[gpu_rows.TRACE] = str((options.trace / f"{slug(name)}.json").resolve())
        try:
            command += ["--small"] if options.small else []
            done = run(*command, timeout_s=row.limit_s, **environ)
        except subprocess.TimeoutExpired:
            raise RowFailed(f"not done within {row.limit_s:.0f} s") from None
        if done.returncode:
            raise RowFailed(done.stdout)
        figures = [figure_of(each) for each in json.loads(path.read_text("utf-8"))]
        return [replace(row, what=name + row.what) for row in figures]


def slug(name: str) -> str:
    return re.sub("[^a-z0-9]+", "-", name.lower())


def figures_of(rows: Rows, by_row: dict[str, list[Figure]], aims: Mapping[Any, float]) -> Figures:
    """Return the figures of all measured rows, with their aims: each alone, as a share of the
    device's ceiling, and beside its peers. Rows were measured one after the other."""
    figures = Figures()
    ceilings = {row.unit: statistics.median(row.ours) for row in by_row.get(CEILINGS, [])}
    for name, own in by_row.items():
        shares = [
            Figure(GPU, row.what, OF_CEILING, [value / ceilings[row.unit] for value in row.ours])
            for row in own
            if row.unit in ceilings and name != CEILINGS
        ]
        for row in [*own, *shares]:
            least = aims.get((row.what, row.unit))
            aim = row.aim if least is None else Aim(least, is_least=True, of="value")
            figures.rows.append(replace(row, aim=aim))
        for peer, aim in rows[name].peers.items():
            if peer in by_row:
                ours, theirs = own[0], by_row[peer][0]
                both = [row.memory_gib and row.memory_gib[0] for row in (ours, theirs)]
                options = {"aim": aim, "memory_gib": both if all(both) else None}
                figures.add(GPU, name, ours.unit, ours.ours, peer, theirs.ours, **options)
    return figures


def measure_all(
    rows: Rows, options: argparse.Namespace, aims: Mapping[Any, float], path: Path = FILE
) -> list[str]:
    """Measure the rows; keep and show their figures, but only show those of toy sizes, without
    aims. Return a line for each row that failed; all output of the rows is in gpu/.

    Args:
        rows: of the command, by name.
        options: `small`, `only`, `trace` and `text` of the command line.
        aims: (what, unit) -> least value.
        path: of the file that keeps the figures.
    """
    figures = Figures()
    by_row: dict[str, list[Figure]] = {}
    failures: list[str] = []
    for name, row in rows.items():
        if name != CEILINGS and not name.startswith(options.only):
            continue
        try:
            by_row[name] = measured(name, row, options)
        except RowFailed as error:
            log = path.parent / "gpu" / f"{slug(name)}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(error.printed, "utf-8")
            failures.append(f"{name}: {error}; all that it printed is in {log}")
            continue
        figures = figures_of(rows, by_row, aims)
        if options.small:  # aims are not meant for toy sizes
            figures.rows = [replace(figure, aim=None) for figure in figures.rows]
        else:
            figures.write(path)
        shown = [figure for figure in figures.rows if figure.what.startswith(name)]
        print(table(shown))
        for figure in shown:
            memory = f"{figure.memory_gib[0]:.1f} GiB; " if figure.memory_gib else ""
            if figure.note:
                print(f"  {figure.what}, {figure.unit}: {memory}{figure.note}")
    print(table(figures.rows), *failures, sep="\n")
    return failures


def main(
    module: str,
    doc: str | None,
    rows: Callable[[argparse.Namespace], Rows],
    aims: Mapping[Any, float],
) -> None:
    """Run a benchmark module as a command: measure its rows for the options given, or a single row
    in this process. Args: aims, (what, unit) -> least."""
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("only", nargs="?", default="", help="rows whose names begin so; else all")
    parser.add_argument("--small", action="store_true", help="toy sizes, also without a GPU")
    parser.add_argument("--trace", type=Path, help="folder of profiles")
    parser.add_argument("--text", type=Path, default=gpu_rows.SHAKESPEARE, help="of Shakespeare")
    parser.add_argument("--row", help="this one alone, unkept")
    parser.add_argument("--to", type=Path, help="JSON that the row writes; else it is printed")
    options = parser.parse_args(namespace=argparse.Namespace(module=module))
    if options.row:
        with tempfile.TemporaryDirectory() as folder:
            figures = rows(options)[options.row].measure(Path(folder))
        content = json.dumps([asdict(row) for row in figures])
        options.to.write_text(content, "utf-8") if options.to else print(content)
        return
    if not torch.cuda.is_available() and not options.small:
        sys.exit("There is no GPU here; --small runs the rows at toy sizes on the CPU.")
    sys.exit(1 if measure_all(rows(options), options, aims) else 0)


if __name__ == "__main__":
    main("tests.benchmarks.gpu", __doc__, rows, AIMS)
