"""Documents in: txt, jsonl and parquet files become texts with the place where they stand."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple

from datamodules.files.html import first_bad_byte
from datamodules.files.rows import JSON_SUFFIXES, read_json_rows
from datamodules.files.tables import PARQUET_SUFFIXES, expand_files

TEXT_SUFFIXES = (".txt",)
SUFFIXES = (*TEXT_SUFFIXES, *JSON_SUFFIXES, *PARQUET_SUFFIXES)
DocumentsBy = Literal["file", "blank_line", "line"]


@dataclass(frozen=True)
class Reading:
    """Where documents stand in files.

    Args:
        text_column: of jsonl and parquet files, whose rows are documents.
        documents_by: a txt file is one document (`file`), or holds several, between blank lines
            (`blank_line`) or one in each line (`line`).
    """

    text_column: str = "text"
    documents_by: DocumentsBy = "file"


class Document(NamedTuple):
    """A text and its place, file:line."""

    place: str
    text: str


def text_files(
    files: str | Sequence[str] | None, option: str, suffixes: Sequence[str] = SUFFIXES
) -> list[Path]:
    """Return the files that these paths, patterns and folders name; folders with all theirs.

    Arguments and errors as of `expand_files` and `files_in`.
    """
    found: list[str] = []
    for entry in [files] if isinstance(files, str | Path) else list(files or []):
        folder = Path(entry).expanduser()
        inside = files_in(folder, suffixes, option) if folder.is_dir() else [entry]
        found += map(str, inside)
    return expand_files(found, option, suffixes)


def files_in(folder: Path, suffixes: Sequence[str], option: str) -> list[Path]:
    """Return the files in a folder and below it with these suffixes, sorted, without hidden ones.

    Raises:
        FileNotFoundError: there is none, or a link leads nowhere: its text would be missing.
    """
    found = []
    for path in sorted(folder.rglob("*")):
        if any(name[0] == "." for name in path.relative_to(folder).parts):
            continue
        if path.is_symlink() and not path.exists():
            raise FileNotFoundError(
                f"{option}: the link {path} leads to {path.readlink()}, which is not there; mend "
                "or delete it."
            )
        if path.suffix.lower() in suffixes and path.is_file():
            found.append(path)
    if not found:
        raise FileNotFoundError(
            f"{option}: the folder {folder} holds no text; its files must end in "
            f"{', '.join(suffixes)}."
        )
    return found


def read_documents(path: Path, reading: Reading) -> Iterator[Document]:
    """Yield the documents of a file, one at a time in memory.

    Raises:
        ValueError: a row has no such column or no text in it, or the text is not UTF-8.
    """
    if path.suffix.lower() not in TEXT_SUFFIXES:
        column = reading.text_column
        for row in read_json_rows(path, columns=(column,)):
            yield Document(row.place, _text_of(row.values, column, row.place))
        return
    try:
        with path.open(encoding="utf-8-sig") as file:  # which reads every line break as \n
            if reading.documents_by == "file":
                yield Document(f"{path}:1", file.read())
                return
            block: list[str] = []  # successive lines of one document
            for number, line in enumerate(chain(file, [""]), start=1):
                if block and (reading.documents_by == "line" or not line.strip()):
                    yield Document(f"{path}:{number - len(block)}", "".join(block).strip("\n"))
                    block = []
                if line.strip():
                    block.append(line)
    except UnicodeDecodeError as error:
        content = path.read_bytes()
        start = first_bad_byte(content) or 0
        number = content.count(b"\n", 0, start) + 1
        raise ValueError(
            f"{path}:{number}: the text is not UTF-8 (byte {start} of "
            "the file); convert it, such as with iconv -f latin1 -t utf-8."
        ) from error


def _text_of(values: dict[str, object], column: str, place: str) -> str:
    if column not in values:
        raise ValueError(
            f'{place}: the row has no "{column}"; it has: {", ".join(values) or "nothing"}. Name '
            "the column of the texts with data.text_column."
        )
    text = values[column]
    if text is not None and not isinstance(text, str):
        raise ValueError(
            f'{place}: "{column}" holds {type(text).__name__} ({str(text)[:40]}), and a document '
            "must be a text; write it as one, or name another column with data.text_column."
        )
    return text or ""  # a missing one is counted with the empty ones
