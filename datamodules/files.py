"""What stores, checkpoints and exports do to files alike."""

import hashlib
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Let the content of a file, or the names in a folder, reach the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(path: Path) -> str:
    """Return the hex digest of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
