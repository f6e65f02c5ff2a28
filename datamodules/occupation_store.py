"""Job descriptions with codes, in memory-mapped arrays, as `occupation_writer` makes them.

Shapes: T distinct texts, P their characters, N rows, K all codes of all rows.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

ARRAYS = (
    "code_points",  # [P] uint32, the texts one behind the other
    "text_offsets",  # [T + 1] int64
    "is_truncated",  # [T] bool
    "text_id",  # [N] int32
    "language_id",  # [N] int16, index in the recipe's languages
    "code_ids",  # [K] int32
    "code_offsets",  # [N + 1] int64
    "part",  # [N] int8: train, validation, test
    "is_seen_text",  # [N] bool: the text occurs in a training row
    "is_seen_code",  # [N] bool: every code of the row occurs in a training row
)


class OccupationStore:
    """The arrays of one cache folder, memory-mapped; pickled as the name of the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        self.recipe: dict[str, Any] = facts["recipe"]
        self.fingerprint: str = facts["fingerprint"]
        self.arrays = {name: _open(folder / f"{name}.npy") for name in ARRAYS}

    def __reduce__(self) -> tuple[Any, ...]:
        return OccupationStore, (self.folder,)

    def rows(self, part: int) -> np.ndarray:
        """[rows] int64: the rows of one part, in input order."""
        return np.flatnonzero(self.arrays["part"] == part)

    def code_points(self, row: int) -> np.ndarray:
        """[S] uint32: the text of a row."""
        text = self.arrays["text_id"][row]
        offsets = self.arrays["text_offsets"]
        return self.arrays["code_points"][offsets[text] : offsets[text + 1]]

    def code_ids(self, row: int) -> np.ndarray:
        """[1 …] int32: the codes of a row."""
        offsets = self.arrays["code_offsets"]
        return self.arrays["code_ids"][offsets[row] : offsets[row + 1]]

    def texts(self, rows: np.ndarray) -> list[np.ndarray]:
        """[S] uint32 for each of these rows: its text."""
        return _parts(self.arrays, "code_points", "text_offsets", self.arrays["text_id"][rows])

    def code_sets(self, rows: np.ndarray) -> list[np.ndarray]:
        """[1 …] int32 for each of these rows: its codes."""
        return _parts(self.arrays, "code_ids", "code_offsets", rows)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """[rows] int64: characters of each row's text."""
        return np.diff(self.arrays["text_offsets"])[self.arrays["text_id"][rows]]


def _parts(
    arrays: dict[str, np.ndarray], values: str, offsets: str, places: np.ndarray
) -> list[np.ndarray]:
    """Return what lies from one offset to the next, at each of these places."""
    ends = arrays[offsets]
    pairs = zip(ends[places].tolist(), ends[places + 1].tolist(), strict=True)
    return [arrays[values][start:end] for start, end in pairs]


def _open(path: Path) -> np.ndarray:
    mapped = np.load(path, mmap_mode="r")
    # Seen as a plain array, of which a slice takes a tenth of the time; an empty file has no map.
    return np.asarray(mapped) if mapped.size else np.array(mapped)
