"""Fixtures of all tests: no network, a cache of its own, and the command line in two ways."""

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Set before torch is imported: more threads than cores make two-process tests slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Checkpoints are synced: where the folders of tests are memory, none of them waits for a disk.
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
# Files of a minute and more begin first: the last of them would keep one worker alone.
LONGEST = (
    *("test_matrix", "test_chaos", "test_torchrun", "test_on_ray", "test_sharding"),
    *("test_tensor_parallel", "test_slurm", "test_slurm_submit", "test_own_parts"),
    *("test_cluster_readme", "test_matrix_spawn", "test_gpt2_chain", "test_gpu_benchmark"),
)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Files of tests share the cores; what measures, or is repeated often, has them all."""
    asked = config.getoption("markexpr").replace("not ", "not_")
    if any(marker in asked.split() for marker in ALONE):
        return 0
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)

    items.sort(key=place)
    gc.collect()
    gc.freeze()  # all is imported: to search it for garbage takes a quarter of a second each time
    gc.set_threshold(20_000, 20)  # what tests make is small, or large tensors that are no garbage


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
    """Begin each test with the same random numbers and search path, which commands lengthen, and
    with the handler of a signal that stopped runs leave ignored, whichever tests came before it."""
    handler, path = signal.getsignal(signal.SIGUSR1), [*sys.path]
    if torch := sys.modules.get("torch"):
        # Without a GPU `torch.manual_seed` keeps a stack for each kind of one, and takes longest.
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
    """The temporary folder, which is the working folder, too."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restores the environment after a run in this process, which may leave a process group of
    one; launchers' variables are unset."""
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
    """A folder with sound tables and a run that two steps have trained; copy it."""
    from tests.wrong_inputs import make_run

    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def toy_config(own_folder: Path) -> Path:
    """Makes the temporary folder the working folder, with a toy.yaml in it."""
    path = own_folder / "toy.yaml"
    path.write_text(TOY)
    return path


@pytest.fixture
def unisono(
    own_environment: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs a command line in this process; returns the exit status and all that was printed."""

    def run(*arguments: str) -> tuple[int, str]:
        import lightning  # noqa: F401

        from lit_models.__main__ import main

        # Lightning keeps the stream that was standard error when it was imported, and perhaps
        # pytest's own handlers of that moment, which are of other classes.
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
    """Runs a command line that ends with this exit status; returns all that was printed."""

    def run(*arguments: str, status: int = 0) -> str:
        found, output = unisono(*arguments)
        assert found == status, output
        return output

    return run
