"""A run on one device without anything that only POSIX systems have, as on a Windows laptop."""

import importlib
import os
import pkgutil
import signal
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import in_world, unisono_here

LIBRARIES = ("lightning.pytorch", "platformdirs", "psutil", "torch.distributed.checkpoint")
NOT_IMPORTED = (
    "__main__",
    "on_ray",
    "prepare.steps",
    "evaluate.harness",
)  # `__main__` starts a run, the others need an extra
OF_POSIX = ("fcntl", "resource", "pwd", "grp", "termios")
NAMES = {
    os: ("fork", "getuid", "geteuid", "killpg", "getpgid", "posix_fallocate", "sched_getaffinity"),
    signal: ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGKILL", "SIGCONT", "SIGSTOP"),
}


def trained_without_posix(folder: Path) -> int:
    os.chdir(folder)
    for name in (*LIBRARIES, "transformers"):  # which check for POSIX features themselves
        importlib.import_module(name)
    for name in list(sys.modules):
        if name.partition(".")[0] in ("lit_models", "datamodules"):
            del sys.modules[name]
    sys.modules.update(dict.fromkeys(OF_POSIX))  # importing one of them fails
    for module, names in NAMES.items():
        for name in names:
            delattr(module, name)
    for package in map(importlib.import_module, ("datamodules", "lit_models")):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith(NOT_IMPORTED):
                importlib.import_module(found.name)
    return unisono_here("fit", "--config", "occupation_coder/debug.yaml", "--trainer.devices=1")


@pytest.mark.slow
def test_everything_imports_and_a_debug_run_trains_without_what_posix_alone_has(tmp_path):
    assert "best: val/" in in_world(1, trained_without_posix, tmp_path)
    assert (tmp_path / "runs/occupation_coder-debug/ledger.jsonl").is_file()
