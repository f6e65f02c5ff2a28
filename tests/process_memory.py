"""What of this process's memory is its own, and what is a file that other processes map as well."""

import mmap
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules.core.planned import PlannedDataset

SMAPS = Path("/proc/self/smaps")
READER = """
import mmap, sys
kept = []
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        kept.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        sum(kept[-1][:: mmap.PAGESIZE])
print("ready", flush=True)
sys.stdin.read()
"""


def buffers(thing: Any) -> Iterator[tuple[int, int, bool]]:
    """Yield address, bytes, and whether a file is mapped there, of all that a thing holds."""
    seen, left = set(), [thing]
    while left:
        part = left.pop()
        if id(part) in seen or isinstance(part, type | re.Pattern):
            continue
        seen.add(id(part))
        if isinstance(part, torch.Tensor):
            yield part.data_ptr(), part.nbytes, False
        elif isinstance(part, np.ndarray):
            base: Any = part
            while isinstance(base, np.ndarray) and base.base is not None:
                base = base.base
            yield part.__array_interface__["data"][0], part.nbytes, isinstance(base, mmap.mmap)
        elif isinstance(part, str | bytes | bytearray):
            yield id(part), len(part), False
        elif isinstance(part, dict):
            left += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set | frozenset):
            left += part
        elif type(part).__module__.startswith("datamodules"):
            left.append(vars(part))


def private_bytes(dataset: PlannedDataset) -> int:
    """Return what it holds that is no mapped file, each memory once."""
    sizes: dict[int, int] = {}
    for address, size, is_mapped in buffers(dataset):
        if not is_mapped:
            sizes[address] = max(size, sizes.get(address, 0))
    return sum(sizes.values())


def mappings(folder: Path) -> dict[Path, dict[str, int]]:
    """Return file below a folder -> KiB of this process's mappings of it, by kind."""
    found: dict[Path, dict[str, int]] = {}
    kinds: dict[str, int] = {}
    for line in SMAPS.read_text().splitlines():
        name, *rest = line.split(None, 5)
        if not name.endswith(":"):
            path = Path(rest[-1]) if len(rest) == 5 else Path("/")
            kinds = found.setdefault(path, {}) if path.is_relative_to(folder) else {}
        elif len(rest) == 2:
            kinds[name[:-1]] = kinds.get(name[:-1], 0) + int(rest[0])
    return found


def read_elsewhere(paths: Iterable[Path]) -> subprocess.Popen:
    """Return a process that has read all of these files, and maps them until its input ends."""
    command = [sys.executable, "-S", "-c", READER, *map(str, paths)]
    reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdout.readline() == "ready\n"
    return reader
