"""What stores, checkpoints and exports do to files alike."""

import hashlib
import os
from pathlib import Path

import numpy as np


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


def mapped(path: Path, dtype: np.dtype | type) -> np.ndarray:
    """Return a file of plain numbers, memory-mapped."""
    if not path.stat().st_size:  # nothing to map
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, "r").view(np.ndarray)  # slices of a memmap take 4 times as long


def mapped_array(path: Path) -> np.ndarray:
    """Return an array of a npy file, memory-mapped."""
    return np.load(path, mmap_mode="r").view(np.ndarray)
