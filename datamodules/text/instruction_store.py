"""Instructions in memory-mapped files, tokenised once, with the mark of what is trained on."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from datamodules.core.store import mapped
from datamodules.files.bad_rows import BadRow, read_rejected
from datamodules.files.splitting import PART_NAMES
from datamodules.text.token_store import TokenisedFolder

PER_SAMPLE = {
    "starts": np.int64,
    "sizes": np.int64,
    "keys": np.uint64,
    "files": np.int32,
    "lines": np.int64,
}


@dataclass(frozen=True)
class InstructionPart:
    """The samples of one part: N of them, n tokens in all.

    Args:
        tokens: [n] uint16 or uint32.
        is_trained: [n] bool.
        starts: [N] int64, first token of each sample.
        sizes: [N] int64, its tokens.
        keys: [N] uint64, equal for exact duplicates.
        files: [N] int32, index in `InstructionStore.files`.
        lines: [N] int64.
    """

    tokens: np.ndarray
    is_trained: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    keys: np.ndarray
    files: np.ndarray
    lines: np.ndarray


class InstructionStore(TokenisedFolder):
    """A folder of tokenised instructions, as `open_instruction_store` makes it."""

    @cached_property
    def bad_rows(self) -> list[BadRow]:
        """The rows that are left out because they break a rule."""
        return read_rejected(self.folder)

    def part(self, part: int) -> InstructionPart:
        """Return the samples of one part: 0 train, 1 validation, 2 test."""
        name = PART_NAMES[part]
        streams = [
            mapped(self.folder / f"{name}.{kind}.bin", np.dtype(dtype))
            for kind, dtype in (("tokens", self.facts["dtype"]), ("is_trained", bool))
        ]
        arrays = [np.load(self.folder / f"{name}.{kind}.npy") for kind in PER_SAMPLE]
        return InstructionPart(*streams, *arrays)

    def place(self, part: InstructionPart, sample: int) -> str:
        """Return the file and line of a sample."""
        return f"{self.file_of(part, sample)}:{part.lines[sample]}"

    def file_of(self, part: InstructionPart, sample: int) -> str:
        """Return the file of a sample."""
        return self.facts["files"][part.files[sample]]
