"""A SLURM cluster for the tests that need one, with a folder for each."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.distributed.slurm import cluster, install


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a cluster of two loopback nodes; skips if SLURM cannot be installed."""
    with FileLock(Path(tempfile.gettempdir()) / "unisono-slurm.lock"):  # apt runs one at a time
        cannot = install()
    if cannot:
        pytest.skip(cannot)
    with cluster(tmp_path_factory.mktemp("slurm")) as environ:
        yield {**environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
