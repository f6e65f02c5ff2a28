"""Where a run comes from: its command line, the code that ran, and what it is judged by."""

import hashlib
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lightning.pytorch import Trainer

PACKAGES = ("datamodules", "lit_models")


def command_line() -> str:
    """Return the command line of this process, as one would type it."""
    program = Path(sys.argv[0])
    is_own = program.name == "unisono" or program.parts[-2:] == ("lit_models", "__main__.py")
    return shlex.join([*(["unisono"] if is_own else ["python", str(program)]), *sys.argv[1:]])


def code_facts() -> dict[str, str]:
    """Return the version of the package, and a digest of its source files' names and bytes."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for path in sorted(p for package in PACKAGES for p in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    try:
        number = version("unisono")
    except PackageNotFoundError:  # run from a checkout that was never installed
        number = "of unknown version"
    return {"version": number, "digest": digest.hexdigest()[:16]}


def monitored(trainer: Trainer) -> dict[str, str] | None:
    """Return name and mode of the metric by which the best checkpoint is chosen."""
    for callback in trainer.checkpoint_callbacks:
        if getattr(callback, "monitor", None):
            return {"name": callback.monitor, "mode": callback.mode}
    return None
