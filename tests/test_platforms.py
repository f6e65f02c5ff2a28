"""A run on one device where nothing is there that POSIX alone has, as on a laptop with Windows."""

import subprocess
import sys
from pathlib import Path

WITHOUT_POSIX = """
import os, signal, sys

# These ask for themselves.
import lightning.pytorch, platformdirs, psutil, torch.distributed.checkpoint, transformers

for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # an import of it fails
for module, names in (
    (os, ("fork", "getuid", "geteuid", "killpg", "getpgid", "posix_fallocate")),
    (os, ("sched_getaffinity",)),
    (signal, ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGKILL", "SIGCONT", "SIGSTOP")),
):
    for name in names:
        delattr(module, name)

import importlib, pkgutil
import datamodules, lit_models

for package in (datamodules, lit_models):
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
from lit_models.__main__ import main

sys.argv[1:] = ["fit", "--config", "occupation_coder/debug.yaml", "--trainer.devices=1"]
sys.exit(main())
"""


def test_everything_imports_and_a_debug_run_trains_without_what_posix_alone_has(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", WITHOUT_POSIX]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "best: val/" in done.stdout + done.stderr
    assert (tmp_path / "runs/occupation_coder-debug/ledger.jsonl").is_file()
