"""Which file of a folder is what, and lines of judgements: what the formats share."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from datamodules.bad_rows import BadRows
from datamodules.relevance.collection_writer import JudgementRows
from datamodules.relevance.request import CollectionFiles, Files
from datamodules.sources import BadRow, expand_files
from datamodules.splitting import PART_ALIASES, PART_NAMES

SUFFIXES = (".jsonl", ".tsv", ".txt", ".parquet", ".pq")
LINES_PER_BLOCK = 65_536
SHARD = re.compile(r"-\d+-of-\d+$")


def named_or_found(
    folder: Path | None, named: Files, role: str, patterns: Sequence[str]
) -> list[Path]:
    """Return the named files, or those of the first pattern that the folder has.

    Raises:
        FileNotFoundError: there are none.
    """
    if named:
        return expand_files(named, f"files.{role}", SUFFIXES)
    for pattern in patterns if folder else ():
        assert folder is not None
        if found := sorted(folder.glob(pattern)):
            return found
    raise FileNotFoundError(
        f"{folder or 'the request'} has no {role} ({' or '.join(patterns)}); check the folder, or "
        f"name them with files.{role}."
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
            part: expand_files(paths, f"files.{PART_NAMES[part]}", SUFFIXES)
            for part, paths in named.items()
        }
    parts: dict[int, list[Path]] = {}
    for path in named_or_found(folder, None, "judgements", patterns):
        part = _part_of(path)
        others = parts.setdefault(part, [])
        if others and not (SHARD.search(path.stem) and SHARD.search(others[0].stem)):
            raise ValueError(
                f"{others[0]} and {path} both hold judgements of {PART_NAMES[part]}; name one of "
                f"them with files.{PART_NAMES[part]}."
            )
        others.append(path)
    return {part: parts[part] for part in sorted(parts)}


def _part_of(path: Path) -> int:
    for word in re.split(r"[._-]", path.stem.lower()):
        if word in PART_ALIASES:
            return PART_ALIASES[word]
    raise ValueError(
        f"{path}: its name tells no part, which is one of train, validation (or dev) and test; "
        "rename it, or name the files of all parts with files.train, files.validation, files.test."
    )


def judgement_lines(
    path: Path, part: int, header: Sequence[str], bad_rows: BadRows
) -> Iterator[JudgementRows]:
    """Yield the judgements of a file with tabs between three columns, below a header.

    Raises:
        ValueError: the header is missing.
    """
    rows: list[tuple[int, list[str]]] = []
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            values = _values(path, line, raw, bad_rows)
            if line == 1 and header:
                _check_header(path, values or [], header)
            elif values and len(values) == 3:
                rows.append((line, values))
            elif values:
                rule = (
                    f"the line has {len(values)} columns, and must have 3 with tabs between them: "
                    "query, document, grade."
                )
                bad_rows.add(BadRow(str(path), line, "\t".join(values), rule))
            if len(rows) == LINES_PER_BLOCK:
                yield _rows_of(path, part, rows)
                rows = []
    if rows:
        yield _rows_of(path, part, rows)


def _rows_of(path: Path, part: int, rows: list[tuple[int, list[str]]]) -> JudgementRows:
    columns = zip(*(values for _, values in rows), strict=True)
    return JudgementRows(part, str(path), [line for line, _ in rows], *columns)


def _values(path: Path, line: int, raw: bytes, bad_rows: BadRows) -> list[str] | None:
    if not raw.strip():
        return None
    try:
        return raw.decode("utf-8-sig" if line == 1 else "utf-8").rstrip("\r\n").split("\t")
    except UnicodeDecodeError:
        rule = "the line is not UTF-8; convert it, such as with iconv -f latin1 -t utf-8."
        bad_rows.add(BadRow(str(path), line, raw.decode(errors="replace").strip(), rule))
        return None


def _check_header(path: Path, values: list[str], header: Sequence[str]) -> None:
    if len(values) == len(header) and _grade_is_no_number(values[-1]):
        return
    raise ValueError(
        f'{path}:1: "{" ".join(values)}" is no header; the first line of this file must name its '
        f"columns, {', '.join(header)}, with tabs between them: write it above the first judgement."
    )


def _grade_is_no_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return True
    return False
