"""A SLURM for the tests that need one; each has a folder of its own."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.distributed.slurm import cluster, install


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which two loopback nodes are found; skips where SLURM cannot be had."""
    with FileLock(Path(tempfile.gettempdir()) / "unisono-slurm.lock"):  # apt runs once at a time
        cannot = install()
    if cannot:
        pytest.skip(cannot)
    with cluster(tmp_path_factory.mktemp("slurm")) as environ:
        yield {**environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
