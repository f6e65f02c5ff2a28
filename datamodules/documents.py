"""Documents in: txt files become texts with the place where they stand."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


SUFFIXES = (".txt",)


class Document(NamedTuple):
    """One text: the file, the line that it begins in, the text."""

    file: str
    line: int
    text: str


def read_documents(path: Path) -> Iterator[Document]:
    """Yield the documents of one file; a txt file is one document.

    Raises:
        ValueError: the file is not UTF-8.
    """
    try:
        yield Document(str(path), 1, path.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 (byte {error.start}); convert it, such as with iconv -t utf-8."
        ) from error
