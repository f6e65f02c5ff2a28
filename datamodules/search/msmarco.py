"""MS MARCO passages: lines of id and text with one tab, no header and no quoting.

Source: https://microsoft.github.io/msmarco/Datasets, passage ranking. A quote is a quote.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from datamodules.files.rows import BadRow, BadRows
from datamodules.files.splitting import PART_NAMES
from datamodules.files.tables import expand_files
from datamodules.search.collection_writer import JudgementRows
from datamodules.search.layouts import (
    SUFFIXES,
    cut_trec,
    decoded,
    judgement_files,
    judgement_lines,
    named_or_found,
)
from datamodules.search.request import CollectionFiles
from datamodules.search.text_writer import TextTableWriter
from datamodules.search.texts import LineError, TextTable

LINES_PER_BLOCK = 65_536


class MsMarcoReader:
    """Reads collection.tsv, queries.*.tsv and qrels; triples only where they are named.

    Args:
        folder: with the files; none where all are named.
        files: those that lie elsewhere, and triples.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: it is not clear what a file holds.
    """

    def __init__(self, folder: str | None, files: CollectionFiles) -> None:
        place = Path(folder).expanduser() if folder else None
        self.documents = named_or_found(place, files.documents, "documents", ("collection.tsv",))
        self.queries = named_or_found(place, files.queries, "queries", ("queries*.tsv",))
        self.qrels = judgement_files(place, files, ("*qrels*.tsv", "*qrels*.txt"))
        self.triples = expand_files(files.triples, "data.collection.files.triples", SUFFIXES)

    def files(self) -> dict[str, list[Path]]:
        judged = {PART_NAMES[part]: paths for part, paths in self.qrels.items()}
        texts = {"documents": self.documents, "queries": self.queries}
        return {**texts, **judged, "triples": self.triples}

    def index_documents(self, table: TextTableWriter) -> None:
        for path in self.documents:
            table.add_file(path, "tsv")

    def index_queries(self, table: TextTableWriter) -> None:
        for path in self.queries:
            table.add_file(path, "tsv")

    def judgements(self, bad_rows: BadRows) -> Iterator[JudgementRows]:
        for part, paths in self.qrels.items():
            for path in paths:
                yield from judgement_lines(path, part, cut_trec, bad_rows, first_line=1)

    def write_triples(
        self, path: Path, queries: TextTable, documents: TextTable, bad_rows: BadRows
    ) -> int:
        count = 0
        with path.open("wb") as target:
            for source in self.triples:
                for lines, ids in _id_triples(source, bad_rows):
                    tables = (queries, documents, documents)
                    found = np.stack([t.indices_of(i) for t, i in zip(tables, ids, strict=True)], 1)
                    for row in np.flatnonzero((found < 0).any(1)).tolist():
                        column = int(np.argmin(found[row]))
                        rule = "is unknown; take the triple out, or add what it names."
                        kind = "document" if column else "query"
                        bad = BadRow(
                            str(source), lines[row], ids[column][row], f"this {kind} {rule}", "id"
                        )
                        bad_rows.add(bad)
                    sound = found[(found >= 0).all(1)].astype(np.int32)
                    sound.tofile(target)
                    count += len(sound)
        return count


def _id_triples(
    path: Path, bad_rows: BadRows
) -> Iterator[tuple[list[int], tuple[tuple[str, ...], ...]]]:
    """Yield lines and ids of query, relevant and other document, some at a time."""
    with path.open("rb") as file:
        numbered = enumerate(file, start=1)
        while block := list(islice(numbered, LINES_PER_BLOCK)):
            lines, rows = [], []
            for line, raw in block:
                try:
                    rows.append(_cut_triple(decoded(raw, line)))
                    lines.append(line)
                except LineError as error:
                    bad_rows.add(BadRow(str(path), line, error.value, error.rule))
            if rows:
                yield lines, tuple(zip(*rows, strict=True))


def _cut_triple(text: str) -> list[str]:
    values = text.split("\t")
    if len(values) != 3:
        raise LineError(
            text,
            f"the line has {len(values)} columns, and must have 3 ids with tabs between them: "
            "query, relevant document, other document.",
        )
    return values
