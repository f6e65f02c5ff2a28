"""Documents in: txt, jsonl and parquet files become texts with the place where they stand.

A file is read in sections, stretches of bounded size that begin where a document or a line does: no
more than a section of it is in memory.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, get_args

import pyarrow.parquet as pq

from datamodules.files.rows import JSON_SUFFIXES, open_parquet, read_json_rows
from datamodules.files.tables import PARQUET_SUFFIXES, expand_files

TEXT_SUFFIXES = (".txt",)
SUFFIXES = (*TEXT_SUFFIXES, *JSON_SUFFIXES, *PARQUET_SUFFIXES)
SECTION_BYTES = 4 << 20
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

    def __post_init__(self) -> None:
        if self.documents_by not in get_args(DocumentsBy):
            raise ValueError(
                f"documents_by must be one of {', '.join(get_args(DocumentsBy))}, got "
                f'"{self.documents_by}".'
            )


class Section(NamedTuple):
    """A stretch of a file: bytes start to end, of a parquet file row groups start to end.

    `line` is the number of its first line or row, from 1; `begins` and `ends` tell whether a
    document that is a whole file begins and ends in it.
    """

    path: str
    start: int
    end: int
    line: int
    begins: bool = True
    ends: bool = True


class Fragment(NamedTuple):
    """A document, or a section of one that is longer: its place and its text."""

    place: str
    text: str
    begins: bool = True
    ends: bool = True


def text_files(files: str | Sequence[str] | None, option: str) -> list[Path]:
    """Return the files that these paths, patterns and folders name; folders with all theirs.

    Args:
        files: a path, a pattern or a folder, or several.
        option: name of the option that holds them, for messages.

    Raises:
        FileNotFoundError: a path does not exist, or a pattern or folder holds no file.
        ValueError: a suffix is unknown, or a file is named twice.
    """
    found: list[str] = []
    for entry in [files] if isinstance(files, str | Path) else list(files or []):
        folder = Path(entry).expanduser()
        if not folder.is_dir():
            found.append(str(entry))
            continue
        found += map(str, files_in(folder, SUFFIXES, option))
    return expand_files(found, option, SUFFIXES)


def files_in(folder: Path, suffixes: Sequence[str], option: str) -> list[Path]:
    """Return the files in a folder and below it that end so, sorted; hidden ones are left out.

    Args:
        folder: to look into.
        suffixes: of the files that can be read.
        option: name of the option that holds it, for messages.

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


def sections_of(path: Path, reading: Reading) -> list[Section]:
    """Return the sections of a file, in order; an empty file has one, too."""
    if path.suffix.lower() in PARQUET_SUFFIXES:
        return _row_group_sections(path)
    is_text = path.suffix.lower() in TEXT_SUFFIXES
    unit = reading.documents_by if is_text else "line"
    ends = [*_cuts(path, unit), path.stat().st_size]
    starts, line, sections = [0, *ends[:-1]], 1, []
    for start, end in zip(starts, ends, strict=True):
        is_whole = unit != "file"
        begins, finishes = is_whole or start == 0, is_whole or end == ends[-1]
        sections.append(Section(str(path), start, end, line, begins, finishes))
        if len(ends) > 1:
            line += _num_lines(path, start, end)
    return sections


def read_section(section: Section, reading: Reading) -> Iterator[Fragment]:
    """Yield the documents of a section, or the stretch of a document that it is.

    Raises:
        ValueError: a row has no such column or no text in it, or the text is not UTF-8.
    """
    path = Path(section.path)
    if path.suffix.lower() not in TEXT_SUFFIXES:
        column = (reading.text_column,)
        for row in read_json_rows(path, section.start, section.end, section.line, column):
            yield Fragment(row.place, _text_of(row.values, reading.text_column, row.place))
        return
    text = _decoded(section)
    if reading.documents_by == "file":
        yield Fragment(f"{path}:{section.line}", text, section.begins, section.ends)
        return
    pattern = r"[^\n]+" if reading.documents_by == "line" else r"(?:[^\n]*\S[^\n]*(?:\n|$))+"
    line, counted = section.line, 0
    for match in re.finditer(pattern, text):
        if match[0].strip():
            line, counted = line + text.count("\n", counted, match.start()), match.start()
            yield Fragment(f"{path}:{line}", match[0].strip("\n"))


def _text_of(values: dict[str, object], column: str, place: str) -> str:
    text = values.get(column, "")
    if isinstance(text, str):
        if column in values:
            return text
        raise ValueError(
            f'{place}: the row has no "{column}"; it has: {", ".join(values) or "nothing"}. Name '
            "the column of the texts with data.text_column."
        )
    if text is None:
        return ""  # counted with the empty ones
    raise ValueError(
        f'{place}: "{column}" holds {type(text).__name__} ({str(text)[:40]}), and a document must '
        "be a text; write it as one, or name another column with data.text_column."
    )


def _decoded(section: Section) -> str:
    with Path(section.path).open("rb") as file:
        file.seek(section.start)
        content = file.read(section.end - section.start)
    try:
        text = content.decode("utf-8-sig" if section.start == 0 else "utf-8")
    except UnicodeDecodeError as error:
        line = section.line + content.count(b"\n", 0, error.start)
        raise ValueError(
            f"{section.path}:{line}: the text is not UTF-8 (byte {section.start + error.start} of "
            "the file); convert it, such as with iconv -f latin1 -t utf-8."
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _cuts(path: Path, unit: str) -> list[int]:
    """Return where a long file is cut, ascending byte positions."""
    size = path.stat().st_size
    cuts: list[int] = []
    with path.open("rb") as file:
        while size - (cuts[-1] if cuts else 0) > SECTION_BYTES:
            file.seek((cuts[-1] if cuts else 0) + SECTION_BYTES - 1)
            find = {"file": _end_of_stretch, "blank_line": _end_of_block}.get(unit, _end_of_line)
            cut = find(file)
            if cut >= size:
                break
            cuts.append(cut)
    return cuts


def _end_of_line(file: BinaryIO) -> int:
    file.readline()
    return file.tell()


def _end_of_block(file: BinaryIO) -> int:
    file.readline()
    while file.readline().strip():
        pass
    return file.tell()


def _end_of_stretch(file: BinaryIO) -> int:
    """A line's end, or a character's where the line is very long: seldom inside a token."""
    start = file.tell()
    limit = max(SECTION_BYTES, 8)
    line = file.readline(limit)
    if line.endswith(b"\n") or len(line) < limit:
        return file.tell()
    return start + next((i for i in range(1, 4) if line[i] & 0xC0 != 0x80), 4)


def _num_lines(path: Path, start: int, end: int) -> int:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(end - start).count(b"\n")


def _row_group_sections(path: Path) -> list[Section]:
    with open_parquet(path) as file:
        return _grouped(path, file.metadata)


def _grouped(path: Path, metadata: pq.FileMetaData) -> list[Section]:
    sections, start, row, num_rows, num_bytes = [], 0, 1, 0, 0
    for group in range(metadata.num_row_groups):
        num_rows += metadata.row_group(group).num_rows
        num_bytes += metadata.row_group(group).total_byte_size
        if num_bytes >= SECTION_BYTES or group == metadata.num_row_groups - 1:
            sections.append(Section(str(path), start, group + 1, row))
            start, row, num_rows, num_bytes = group + 1, row + num_rows, 0, 0
    return sections or [Section(str(path), 0, 0, 1)]
