"""The rows of all benchmarks of one call: printed at its end, and kept in runs/benchmarks.json.

Where a call names several files, each has a process of its own: what the allocator and oneDNN keep
of the benchmarks before made a plain loop a fifth faster, and memory 10 % more.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.benchmarks.figure_tables import show
from tests.benchmarks.figures import FILE, Figures

GPU = "tests.benchmarks.gpu"
ROWS = pytest.StashKey[Figures]()
FAILED = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Figures:
    """Takes a row with `figures.add(…)`, as `tests.benchmarks.figures.Figure` has it."""
    return request.config.stash.setdefault(ROWS, Figures())


@pytest.fixture(autouse=True)
def _kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Writes after each benchmark: a call that is broken off has lost none that ended."""
    yield
    found = request.config.stash.get(ROWS, None)
    if found is not None and found.rows:
        found.write(request.config.invocation_params.dir / FILE)


def items_by_file(session: pytest.Session) -> dict[Path, list[str]]:
    """Return file -> node ids of the tests that a call has selected."""
    found: dict[Path, list[str]] = {}
    for item in session.items:
        found.setdefault(item.path, []).append(item.nodeid)
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run each of several files by itself; a call of one file, or of other tests, is pytest's."""
    files = items_by_file(session)
    here = Path(__file__).parent
    is_ours = all(path.parent == here for path in files)
    if len(files) < 2 or not is_ours or session.config.option.collectonly:
        return None
    for node_ids in files.values():
        command = [sys.executable, "-m", "pytest", "-q", "-m", "benchmark", *node_ids]
        done = subprocess.run(command, cwd=session.config.rootpath, check=False)
        if done.returncode != 0:
            session.testsfailed += 1
            session.config.stash.setdefault(FAILED, []).extend(node_ids)
        if session.config.option.maxfail and session.testsfailed >= session.config.option.maxfail:
            break
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for node_id in terminalreporter.config.stash.get(FAILED, []):
        terminalreporter.write_line(f"in a file that failed: {node_id}")
    found = terminalreporter.config.stash.get(ROWS, None)
    if found is not None and found.rows:
        terminalreporter.write_line("")
        show(found.rows, Console(highlight=False))
        terminalreporter.write_line(f"kept in {FILE}")
        gpu = "there is one" if torch.cuda.is_available() else "there is none here"
        terminalreporter.write_line(f"CPU rows; those of a GPU: python -m {GPU} ({gpu})")
