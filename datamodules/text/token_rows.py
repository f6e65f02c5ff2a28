"""Texts as rows of tokens in memory-mapped files, tokenised once for all epochs and ranks."""

from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from datamodules.core.store import mapped
from datamodules.text.token_store import token_dtype


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
