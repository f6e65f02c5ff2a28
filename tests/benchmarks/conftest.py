"""The rows of all benchmarks of one call: printed at its end, and kept in runs/benchmarks.json."""

from collections.abc import Iterator

import pytest
import torch
from rich.console import Console

from tests.benchmarks.figure_tables import show
from tests.benchmarks.figures import FILE, Figures

GPU = "tests.benchmarks.gpu"
ROWS = pytest.StashKey[Figures]()


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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    found = terminalreporter.config.stash.get(ROWS, None)
    if found is not None and found.rows:
        terminalreporter.write_line("")
        show(found.rows, Console(highlight=False))
        terminalreporter.write_line(f"kept in {FILE}")
        gpu = "there is one" if torch.cuda.is_available() else "there is none here"
        terminalreporter.write_line(f"CPU rows; those of a GPU: python -m {GPU} ({gpu})")
