"""Rows of all benchmarks of one call: printed at its end, and kept in runs/benchmarks.json.

If a call selects several benchmarks, each runs in a process of its own: what the allocator and
oneDNN keep from earlier benchmarks made a plain loop a fifth faster, and memory 10 % higher.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.benchmarks.figures import FILE, Figures, read, table

ROWS = pytest.StashKey[Figures]()
IN_PROCESSES = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def figures(request: pytest.FixtureRequest) -> Figures:
    """Collects rows through `figures.add(…)`; see `tests.benchmarks.figures.Figure`."""
    return request.config.stash.setdefault(ROWS, Figures())


@pytest.fixture(autouse=True)
def _kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Writes the rows after each benchmark, so that an interrupted call keeps those that ended."""
    yield
    found = request.config.stash.get(ROWS, None)
    if found is not None and found.rows:
        found.write(request.config.rootpath / FILE)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Run each of several benchmarks in a process of its own; leave a single one to pytest."""
    session, here = item.session, Path(__file__).parent
    is_skipped = any(mark.args[0] for mark in item.iter_markers("skipif"))  # as pytest reads it
    if len(session.items) < 2 or item.path.parent != here or is_skipped:
        return None
    session.config.stash[IN_PROCESSES] = True
    place = (item.nodeid, item.location)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    print(f"\n{session.items.index(item) + 1} of {len(session.items)}: {item.nodeid}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "benchmark", item.nodeid]
    begun = time.perf_counter()
    status = subprocess.run(command, cwd=session.config.rootpath, check=False).returncode
    outcome, why = ("failed", f"exit status {status}, see above") if status else ("passed", None)
    seconds, marks = time.perf_counter() - begun, dict.fromkeys(item.keywords, 1)
    report = pytest.TestReport(*place, marks, outcome, why, "call", duration=seconds)
    item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    found = config.stash.get(ROWS, None)
    rows = found.rows if found is not None else []
    if config.stash.get(IN_PROCESSES, False):
        rows = [row for row, _ in read(config.rootpath / FILE)]
    if rows:
        for family in dict.fromkeys(row.family for row in rows):
            lines = table([row for row in rows if row.family == family])
            terminalreporter.write_line(f"\n{lines}")
        gpu = "there is one" if torch.cuda.is_available() else "there is none here"
        terminalreporter.write_line(f"\nkept in {FILE}; CPU rows: those of a GPU ({gpu}) come from")
        terminalreporter.write_line("python -m tests.benchmarks.gpu")
