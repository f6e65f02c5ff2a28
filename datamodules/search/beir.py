"""The layout of BEIR: corpus.jsonl, queries.jsonl, qrels/*.tsv with a header; or parquet.

Source: https://github.com/beir-cellar/beir, and the folders corpus, queries and qrels (or default,
data) of parquet files that newer copies of its data sets have.
"""

from collections.abc import Iterator
from pathlib import Path

from datamodules.files.rows import BadRows, read_json_rows
from datamodules.files.splitting import PART_NAMES
from datamodules.files.tables import PARQUET_SUFFIXES, Table
from datamodules.search.collection_writer import JudgementRows
from datamodules.search.layouts import (
    cut_three,
    decoded,
    judgement_files,
    judgement_lines,
    named_or_found,
)
from datamodules.search.request import CollectionFiles
from datamodules.search.text_writer import TextTableWriter
from datamodules.search.texts import LineError, TextTable, record_of

HEADER = ("query-id", "corpus-id", "score")
ROWS_PER_BLOCK = 65_536


class BeirReader:
    """Reads a folder in the layout of BEIR.

    Args:
        folder: with the files; none where all are named.
        files: those that lie elsewhere.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: it is not clear what a file holds.
    """

    def __init__(self, folder: str | None, files: CollectionFiles) -> None:
        place = Path(folder).expanduser() if folder else None
        self.documents = named_or_found(
            place, files.documents, "documents", ("corpus.jsonl", "corpus/*.parquet")
        )
        self.queries = named_or_found(
            place, files.queries, "queries", ("queries.jsonl", "queries/*.parquet")
        )
        patterns = ("qrels/*.tsv", "qrels/*.parquet", "default/*.parquet", "data/*.parquet")
        self.qrels = judgement_files(place, files, patterns)
        for paths in (self.documents, self.queries):
            if len({is_parquet(path) for path in paths}) > 1:
                raise ValueError(
                    f"{paths[0]} and others are jsonl and parquet; write all files of one kind of "
                    "text in one format."
                )

        for path in (path for paths in self.qrels.values() for path in paths):
            if not is_parquet(path):
                _check_header(path)

    def files(self) -> dict[str, list[Path]]:
        judged = {PART_NAMES[part]: paths for part, paths in self.qrels.items()}
        return {"documents": self.documents, "queries": self.queries, **judged}

    def index_documents(self, table: TextTableWriter) -> None:
        _index(self.documents, table)

    def index_queries(self, table: TextTableWriter) -> None:
        _index(self.queries, table)

    def judgements(self, bad_rows: BadRows) -> Iterator[JudgementRows]:
        for part, paths in self.qrels.items():
            for path in paths:
                if is_parquet(path):
                    yield from _parquet_judgements(path, part)
                else:
                    yield from judgement_lines(path, part, cut_three, bad_rows, first_line=2)

    def write_triples(
        self, path: Path, queries: TextTable, documents: TextTable, bad_rows: BadRows
    ) -> int:
        return 0


def is_parquet(path: Path) -> bool:
    """Whether a file is parquet, by its name."""
    return path.suffix.lower() in PARQUET_SUFFIXES


def _index(paths: list[Path], table: TextTableWriter) -> None:
    for path in paths:
        if not is_parquet(path):
            table.add_file(path, "jsonl")
            continue
        columns = Table(path)
        columns.check(["_id" if "_id" in columns.names else "id", "text"], "texts")
        for row in read_json_rows(path):
            try:
                record = record_of(row.values)
            except LineError as error:
                table.refuse(str(path), row.line, error)
                continue
            table.add_record(record, path, row.line)


def _parquet_judgements(path: Path, part: int) -> Iterator[JudgementRows]:
    Table(path).check(HEADER, "judgements")
    rows: list[tuple[int, str, str, str | float]] = []
    for row in read_json_rows(path, columns=HEADER):
        query, document, grade = (row.values[name] for name in HEADER)
        is_number = isinstance(grade, int | float)
        rows.append((row.line, str(query), str(document), grade if is_number else str(grade)))
        if len(rows) == ROWS_PER_BLOCK:
            yield JudgementRows(part, str(path), *zip(*rows, strict=True))
            rows = []
    if rows:
        yield JudgementRows(part, str(path), *zip(*rows, strict=True))


def _check_header(path: Path) -> None:
    with path.open("rb") as file:
        first = decoded(file.readline(), 1)
    values = first.split("\t")
    if len(values) == len(HEADER) and _is_no_number(values[-1]):
        return
    raise ValueError(
        f'{path}:1: "{first}" is no header; the first line of this file must name its columns, '
        f"{', '.join(HEADER)}, with tabs between them: write it above the first judgement."
    )


def _is_no_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return True
    return False
