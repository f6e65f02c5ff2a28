"""The layout of BEIR: corpus.jsonl, queries.jsonl, qrels/*.tsv with a header; or parquet."""

from collections.abc import Iterator
from pathlib import Path

from datamodules.bad_rows import BadRows
from datamodules.relevance.collection_writer import JudgementRows
from datamodules.relevance.layouts import judgement_files, judgement_lines, named_or_found
from datamodules.relevance.request import CollectionFiles
from datamodules.relevance.text_writer import TextTableWriter
from datamodules.relevance.texts import TextTable
from datamodules.splitting import PART_NAMES

HEADER = ("query-id", "corpus-id", "score")


class BeirReader:
    """Reads a folder in the layout of BEIR.

    Args:
        folder: with the files; none where all are named.
        files: those that lie elsewhere.
    """

    def __init__(self, folder: str | None, files: CollectionFiles) -> None:
        place = Path(folder).expanduser() if folder else None
        self.documents = named_or_found(place, files.documents, "documents", ("corpus.jsonl",))
        self.queries = named_or_found(place, files.queries, "queries", ("queries.jsonl",))
        self.qrels = judgement_files(place, files, ("qrels/*.tsv",))

    def files(self) -> dict[str, list[Path]]:
        judged = {PART_NAMES[part]: paths for part, paths in self.qrels.items()}
        return {"documents": self.documents, "queries": self.queries, **judged}

    def index_documents(self, table: TextTableWriter) -> None:
        for path in self.documents:
            table.add_file(path, "jsonl")

    def index_queries(self, table: TextTableWriter) -> None:
        for path in self.queries:
            table.add_file(path, "jsonl")

    def judgements(self, bad_rows: BadRows) -> Iterator[JudgementRows]:
        for part, paths in self.qrels.items():
            for path in paths:
                yield from judgement_lines(path, part, HEADER, bad_rows)

    def write_triples(
        self, path: Path, queries: TextTable, documents: TextTable, bad_rows: BadRows
    ) -> int:
        return 0
