"""Which file of a folder is what, and lines of judgements: what the formats share."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from datamodules.files.rows import BadRow, BadRows
from datamodules.files.splitting import PART_ALIASES, PART_NAMES
from datamodules.files.tables import expand_files
from datamodules.search.collection_writer import JudgementRows
from datamodules.search.request import CollectionFiles, Files
from datamodules.search.texts import LineError

SUFFIXES = (".jsonl", ".tsv", ".txt", ".parquet", ".pq")
LINES_PER_BLOCK = 65_536
SHARD = re.compile(r"-\d+-of-\d+$")


class JudgementLine(NamedTuple):
    """One judgement, as it is written."""

    query: str
    document: str
    grade: str


def named_or_found(
    folder: Path | None, named: Files, role: str, patterns: Sequence[str]
) -> list[Path]:
    """Return the named files, or those of the first pattern that the folder has.

    Raises:
        FileNotFoundError: there are none.
    """
    if named:
        return expand_files(named, f"data.collection.files.{role}", SUFFIXES)
    if folder is not None:
        for pattern in patterns:
            if found := sorted(folder.glob(pattern)):
                return found
        for pattern in patterns:
            if packed := sorted(folder.glob(f"{pattern}.gz")):
                raise FileNotFoundError(f"{packed[0]} is compressed; unpack it with gunzip.")
    raise FileNotFoundError(
        f"{folder or 'the request'} has no {role} ({' or '.join(patterns)}); check the folder, or "
        f"name them with data.collection.files.{role}."
    )


def judgement_files(
    folder: Path | None, files: CollectionFiles, patterns: Sequence[str]
) -> dict[int, list[Path]]:
    """Return the files of judgements per part: the named ones, or by their names in the folder.

    Raises:
        FileNotFoundError: there are none.
        ValueError: a name tells no part, or two tell the same.
    """
    if named := files.judgements():
        return {
            part: expand_files(paths, f"data.collection.files.{PART_NAMES[part]}", SUFFIXES)
            for part, paths in named.items()
        }
    parts: dict[int, list[Path]] = {}
    for path in named_or_found(folder, None, "judgements", patterns):
        part = _part_of(path)
        others = parts.setdefault(part, [])
        if others and not (SHARD.search(path.stem) and SHARD.search(others[0].stem)):
            raise ValueError(
                f"{others[0]} and {path} both hold judgements of {PART_NAMES[part]}; name one of "
                f"them with data.collection.files.{PART_NAMES[part]}."
            )
        others.append(path)
    return {part: parts[part] for part in sorted(parts)}


def _part_of(path: Path) -> int:
    for word in re.split(r"[._-]", path.stem.lower()):
        if word in PART_ALIASES:
            return PART_ALIASES[word]
    raise ValueError(
        f"{path}: its name tells no part, which is one of train, validation (or dev) and test; "
        "rename it, or name the files of all parts with data.collection.files.train, .validation "
        "and .test."
    )


def judgement_lines(
    path: Path, part: int, cut: Callable[[str], JudgementLine], bad_rows: BadRows, first_line: int
) -> Iterator[JudgementRows]:
    """Yield the judgements of a file of lines, some at a time.

    Args:
        path: the file.
        part: what it judges.
        cut: finds the values of a line, or raises LineError.
        bad_rows: takes lines that cannot be cut.
        first_line: number of the first line that is a judgement, from 1.
    """
    rows: list[tuple[int, JudgementLine]] = []
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if line < first_line or not raw.strip():
                continue
            try:
                rows.append((line, cut(decoded(raw, line))))
            except LineError as error:
                bad_rows.add(BadRow(str(path), line, error.value, error.rule))
            if len(rows) == LINES_PER_BLOCK:
                yield _rows_of(path, part, rows)
                rows = []
    if rows:
        yield _rows_of(path, part, rows)


def decoded(raw: bytes, line: int) -> str:
    """Return a line as text, without its end.

    Raises:
        LineError: it is not UTF-8.
    """
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        rule = "the line is not UTF-8; convert it, such as with iconv -f latin1 -t utf-8."
        raise LineError(raw.decode(errors="replace").strip(), rule) from error


def cut_three(text: str) -> JudgementLine:
    """Cut a line of query, document and grade at its tabs."""
    values = text.split("\t")
    if len(values) != 3:
        raise LineError(
            text,
            f"the line has {len(values)} columns, and must have 3 with tabs between them: query, "
            "document, grade.",
        )
    return JudgementLine(*values)


def cut_trec(text: str) -> JudgementLine:
    """Cut a line of TREC's qrels at blanks or tabs: query, a column without use, document, grade.

    A line of three columns with tabs is query, document, grade.
    """
    values = text.split()
    if len(values) == 4:
        return JudgementLine(values[0], values[2], values[3])
    if len(values) == 3:
        return cut_three(text)
    raise LineError(
        text,
        f"the line has {len(values)} columns, and must have TREC's 4 (query, 0, document, grade) "
        "or 3 with tabs between them (query, document, grade).",
    )


def _rows_of(path: Path, part: int, rows: list[tuple[int, JudgementLine]]) -> JudgementRows:
    columns = zip(*(values for _, values in rows), strict=True)
    return JudgementRows(part, str(path), [line for line, _ in rows], *columns)
