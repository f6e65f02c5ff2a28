"""The tokens of a corpus in memory-mapped files, tokenised once.

Each part is one stream of tokens; document d of it owns the positions starts[d] … starts[d] +
num_positions[d] - 1, and the token after a position is what the position predicts.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.core.store import mapped_array
from datamodules.files.splitting import PART_NAMES
from datamodules.tokenizers.text_tokenizer import TextTokenizer


class PartFacts(NamedTuple):
    """What a part holds; bytes are those of the text in UTF-8."""

    num_documents: int
    num_tokens: int
    num_characters: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class TokenStream:
    """The tokens of one part.

    Args:
        tokens: [n] uint16 or uint32.
        starts: [D] int64, first position of each document.
        num_positions: [D] int64, positions that predict a token.
        place: store and part whose files these arrays map; pickled is then the place alone.
    """

    tokens: np.ndarray
    starts: np.ndarray
    num_positions: np.ndarray
    place: tuple[Path, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.place is None:
            return TokenStream, (self.tokens, self.starts, self.num_positions)
        return _stream, self.place


class TokenisedFolder:
    """What every store of tokens knows, opened read-only.

    Args:
        folder: complete, as the function made it that opens the store.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text("utf-8"))

    @property
    def fingerprint(self) -> str:
        """Hex digest of the tokens, of what is trained on and of how they are divided."""
        return self.facts["fingerprint"]

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that made the tokens."""
        text = (self.folder / "tokenizer.json").read_text("utf-8")
        return TextTokenizer.from_dict(json.loads(text))


class TokenStore(TokenisedFolder):
    """A folder of token streams, as `open_token_store` makes it."""

    def stream(self, part: int) -> TokenStream:
        """Return the stream of one part: 0 train, 1 validation, 2 test."""
        return _stream(self.folder, part)

    def hashes(self, part: int) -> np.ndarray:
        """Return [D] uint64, equal for documents whose text in this part is equal."""
        return _opened(self.folder, part, "hashes")

    def part_facts(self, part: int) -> PartFacts:
        """Return what one part holds."""
        return PartFacts(**self.facts["parts"][PART_NAMES[part]])


def _stream(folder: Path, part: int) -> TokenStream:
    tokens, starts, sizes = (
        _opened(folder, part, kind) for kind in ("tokens", "starts", "num_positions")
    )
    return TokenStream(tokens, starts, sizes, (folder, part))


def _opened(folder: Path, part: int, kind: str) -> np.ndarray:
    return mapped_array(folder / f"{PART_NAMES[part]}.{kind}.npy")


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the type in which tokens are kept."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32
