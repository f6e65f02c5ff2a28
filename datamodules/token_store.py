"""The tokens of a corpus in memory-mapped files, tokenised once.

Each part is one stream of tokens; document d of it owns the positions starts[d] … starts[d] +
num_positions[d] - 1, and the token after a position is what the position predicts.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.splitting import PART_NAMES
from datamodules.tokenizers.text_tokenizer import TextTokenizer


@dataclass(frozen=True)
class TokenStream:
    """The tokens of one part.

    Args:
        tokens: [n] uint16 or uint32.
        starts: [D] int64, first position of each document.
        num_positions: [D] int64, positions that predict a token.
    """

    tokens: np.ndarray
    starts: np.ndarray
    num_positions: np.ndarray


class TokenStore:
    """A folder of token streams, opened read-only.

    Args:
        folder: complete, as `open_token_store` makes it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text("utf-8"))

    @property
    def fingerprint(self) -> str:
        """Hex digest of the tokens and of how they are divided."""
        return self.facts["fingerprint"]

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that made the tokens."""
        text = (self.folder / "tokenizer.json").read_text("utf-8")
        return TextTokenizer.from_dict(json.loads(text))

    def stream(self, part: int) -> TokenStream:
        """Return the stream of one part: 0 train, 1 validation, 2 test."""
        name = PART_NAMES[part]
        arrays = (
            np.load(self.folder / f"{name}.{kind}.npy", mmap_mode="r")
            for kind in ("tokens", "starts", "num_positions")
        )
        return TokenStream(*arrays)
