"""Fixtures of all tests: no network, a separate cache, and two ways to run the command line."""

import gc
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Set before torch is imported: more threads than cores slow down two-process tests.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Checkpoints are synced: with the tests' folders in /dev/shm, none of them waits for a disk.
if Path("/dev/shm").is_dir():
    room = os.statvfs("/dev/shm")
    if room.f_bavail * room.f_frsize > 4 << 30 and not room.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

TOY = """
seed_everything: 1
model:
  class_path: tests.toy.LitToy
  init_args:
    optimizer:
      class_path: torch.optim.AdamW
      init_args: {lr: 0.01}
data:
  class_path: tests.toy.ToyData
trainer:
  max_epochs: 1
  accelerator: cpu
  devices: 1
  enable_model_summary: false
"""


MOST_WORKERS = 4
ALONE = ("soak", "smoke", "benchmark", "gpu")
# Files that take a minute or more start first: the last of them would occupy one worker alone.
LONGEST = (
    *("test_matrix", "test_chaos", "test_torchrun", "test_on_ray", "test_sharding"),
    *("test_tensor_parallel", "test_slurm", "test_slurm_submit", "test_own_parts"),
    *("test_cluster_readme", "test_gpt2_chain", "test_gpu_benchmark"),
)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of workers; 0 for markers in ALONE, whose tests need all cores."""
    markers = config.getoption("markexpr").replace("not ", "not_")
    if any(marker in markers.split() for marker in ALONE):
        return 0
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)

    items.sort(key=place)
    gc.collect()
    gc.freeze()  # each search of the imported modules takes a quarter of a second
    gc.set_threshold(20_000, 20)  # tests make small objects, or large tensors that are no garbage


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # workers share it
    os.environ["UNISONO_CACHE"] = str(folder / "cache")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def _same_beginning() -> Iterator[None]:
    """Start each test with the same random state, import path (commands extend it) and handler of
    SIGUSR1 (stopped runs leave it ignored), whatever tests came before."""
    handler, path = signal.getsignal(signal.SIGUSR1), [*sys.path]
    if torch := sys.modules.get("torch"):
        # Without a GPU `torch.manual_seed` is slow: it queues a stack trace for each absent device.
        (torch if torch.cuda.is_available() else torch.default_generator).manual_seed(1)
    yield
    signal.signal(signal.SIGUSR1, handler)
    sys.path[:] = path


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else ""
        is_local = self.family == socket.AF_UNIX or host in (
            "localhost",
            "::1",
            socket.gethostname(),
        )
        if not is_local and not str(host).startswith("127."):
            raise OSError(f"a test wanted to connect to {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's temporary folder, made the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores the environment after a run in this process, and ends the process group of one that
    the run may leave; launchers' variables are unset."""
    before = dict(os.environ)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_NTASKS", "SLURM_JOB_NAME", "NODE_RANK"):
        os.environ.pop(name, None)
    yield
    from lit_models.training.strategies import leave_group

    leave_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def folder_with_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with valid tables and a run of two training steps; copy it, do not change it."""
    from tests.wrong_inputs import make_run

    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def copied_run(folder_with_run: Path, own_folder: Path) -> Path:
    """The working folder, with a copy of `folder_with_run`."""
    shutil.copytree(folder_with_run, own_folder, dirs_exist_ok=True)
    return own_folder


@pytest.fixture
def toy_config(own_folder: Path) -> Path:
    """Makes the temporary folder the working folder and writes a toy.yaml into it."""
    path = own_folder / "toy.yaml"
    path.write_text(TOY)
    return path


@pytest.fixture
def unisono(
    own_environment: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs a command line in this process; returns the exit status and all output."""

    def run(*arguments: str) -> tuple[int, str]:
        import lightning  # noqa: F401

        from lit_models.__main__ import main

        # Lightning's loggers keep the standard error stream of their import, and perhaps pytest's
        # handlers of that time, which are of other classes.
        for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
            for handler in logging.getLogger(name).handlers:
                if type(handler) is logging.StreamHandler:
                    handler.stream = sys.stderr
        monkeypatch.setattr(sys, "argv", ["unisono", *arguments])
        capfd.readouterr()
        try:
            status = main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        out, err = capfd.readouterr()
        return status, out + err

    return run


@pytest.fixture
def done(unisono: Callable[..., tuple[int, str]]) -> Callable[..., str]:
    """Runs a command line that must end with this exit status; returns all output."""

    def run(*arguments: str, status: int = 0) -> str:
        found_status, output = unisono(*arguments)
        assert found_status == status, output
        return output

    return run
