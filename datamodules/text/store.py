"""Stores of tokens in memory-mapped files, tokenised once.

A stream has parts; document d of a part owns the positions starts[d] … starts[d] +
num_positions[d] - 1, and the token after a position is what the position predicts.
"""

import json
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from datamodules.core.store import mapped, mapped_array
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


class Tokens(Protocol):
    """Token ids of texts, by the number of the text."""

    def __getitem__(self, number: int) -> np.ndarray:
        """Return the token ids of one text, [n] integers, without marks."""
        ...


class TokenRows:
    """The tokens of N texts; pickled is their place alone.

    Attributes:
        tokens: [n] uint16 or uint32, those of all texts.
        starts: [N + 1] int64, the first token of each text, and the end of the last.

    Args:
        folder: in which `TokenRowsWriter` wrote them.
        name: of these rows in it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.place = folder, name
        (tokens,) = folder.glob(f"{name}.tokens.*")
        self.tokens = mapped(tokens, np.dtype(tokens.suffix.removeprefix(".")))
        self.starts = mapped(folder / f"{name}.starts", np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenRows, self.place

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        return self.tokens[self.starts[number] : self.starts[number + 1]]

    def between(self, first: int, end: int) -> np.ndarray:
        """Return the tokens of successive texts, one after the other, without that at `end`."""
        return self.tokens[self.starts[first] : self.starts[end]]


class TokenRowsWriter:
    """Writes rows of tokens, in a `with` block.

    Args:
        folder: in which they come.
        name: of these rows in it.
        vocab_size: of the tokenizer.
    """

    def __init__(self, folder: Path, name: str, vocab_size: int) -> None:
        self._dtype = np.dtype(token_dtype(vocab_size))
        self._file = (folder / f"{name}.tokens.{self._dtype.name}").open("wb")
        self._starts_path, self._starts = folder / f"{name}.starts", array("q", [0])

    def __enter__(self) -> "TokenRowsWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        np.array(self._starts, np.int64).tofile(self._starts_path)

    def add(self, rows: Iterable[np.ndarray]) -> None:
        """Take the tokens of the next texts."""
        for row in rows:
            self._file.write(row.astype(self._dtype).tobytes())
            self._starts.append(self._starts[-1] + len(row))


class ReadTokens:
    """Tokens that are made when they are asked for, where a text does not come again.

    Args:
        encode: a text -> its token ids.
        text: a number -> the text.
    """

    def __init__(self, encode: Callable[[str], np.ndarray], text: Callable[[int], str]) -> None:
        self.encode, self.text = encode, text

    def __getitem__(self, number: int) -> np.ndarray:
        return self.encode(self.text(number))
