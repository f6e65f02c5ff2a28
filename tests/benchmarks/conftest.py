"""The rows of all benchmarks of one call: printed at its end, and kept in runs/benchmarks.json.

Where a call names several, each has a process of its own: what the allocator and oneDNN keep of the
benchmarks before made a plain loop a fifth faster, and memory 10 % more.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich.console import Console

from tests.benchmarks.figure_tables import show
from tests.benchmarks.figures import FILE, Figures, measured_since, now

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


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run each of several benchmarks by itself; a call of one, or of other tests, is pytest's."""
    here, options, begun = Path(__file__).parent, session.config.option, now()
    is_ours = all(item.path.parent == here for item in session.items)
    if len(session.items) < 2 or not is_ours or options.collectonly:
        return None
    for number, item in enumerate(session.items, 1):
        print(f"\n{number} of {len(session.items)}: {item.nodeid}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "benchmark", item.nodeid]
        if subprocess.run(command, cwd=session.config.rootpath, check=False).returncode != 0:
            session.testsfailed += 1
            session.config.stash.setdefault(FAILED, []).append(item.nodeid)
        if options.maxfail and session.testsfailed >= options.maxfail:
            break
    session.config.stash[ROWS] = measured_since(begun, session.config.rootpath / FILE)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for node_id in terminalreporter.config.stash.get(FAILED, []):
        terminalreporter.write_line(f"FAILED {node_id}")
    found = terminalreporter.config.stash.get(ROWS, None)
    if found is not None and found.rows:
        terminalreporter.write_line("")
        show(found.rows, Console(highlight=False))
        terminalreporter.write_line(f"kept in {FILE}")
        gpu = "there is one" if torch.cuda.is_available() else "there is none here"
        terminalreporter.write_line(f"CPU rows; those of a GPU: python -m {GPU} ({gpu})")
