"""A folder of pages (html, md, txt) as a collection, with a table of queries or without one."""

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from datamodules.files.documents import files_in
from datamodules.files.html import decoded_html, parsed, visible_lines
from datamodules.files.rows import JSON_SUFFIXES, BadRow, BadRows, read_json_rows
from datamodules.files.splitting import TRAIN
from datamodules.files.tables import Table, expand_files
from datamodules.search.collection_writer import JudgementRows
from datamodules.search.queries import QUERY_COLUMNS
from datamodules.search.request import PAGE_SUFFIXES, CollectionFiles
from datamodules.search.text_writer import TextTableWriter
from datamodules.search.texts import TextRecord, TextTable

HTML_SUFFIXES = (".html", ".htm", ".xhtml")
QUERY_SUFFIXES = (*JSON_SUFFIXES, ".csv", ".tsv", ".xlsx", ".parquet")
QUERY_FILES = tuple(f"queries{suffix}" for suffix in QUERY_SUFFIXES)
PAGE_COLUMNS = ("page", "pages", "url", "address", "document", "relevant")
GRADE_COLUMNS = ("grade", "relevance", "score")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
MARKUP = re.compile(
    r"!?\[([^\]\n]{0,1000})\]\([^)\n]{0,1000}\)|^#{1,6}\s+|(?<!\w)[*_`]{1,3}|[*_`]{1,3}(?!\w)",
    re.MULTILINE,
)
LONGEST_TITLE = 120  # characters of a first line that is taken for one


class _Asked(NamedTuple):
    """A query with one relevant page, as a row of a table says it."""

    file: Path
    line: int
    query: str
    page: str
    grade: str | float


class PagesReader:
    """Reads a folder of pages; a page's id is its path in the folder, blanks as %20.

    Queries and their pages stand in `queries.csv` (or .tsv, .xlsx, .jsonl, .parquet) of the folder,
    or in a named file: a row has query and page (its path, name or address), perhaps a grade above
    0. Without a file each title is a query, and its page, which is read without it, the answer.

    Args:
        folder: with the pages.
        files: queries, where they lie elsewhere.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: no folder is named, or other files than queries.
    """

    def __init__(self, folder: str | None, files: CollectionFiles) -> None:
        if folder is None or files.documents or files.judgements():
            raise ValueError(
                "format pages reads data.collection.folder, and data.collection.files.queries "
                "alone; name the folder, and leave the other files out."
            )
        self.folder = Path(folder).expanduser()
        named = files.queries or [
            str(self.folder / name) for name in QUERY_FILES if (self.folder / name).is_file()
        ]
        self.queries = expand_files(named, "data.collection.files.queries", QUERY_SUFFIXES)
        own = {path.resolve() for path in self.queries}
        found = files_in(self.folder, PAGE_SUFFIXES, "data.collection.folder")
        self.pages = [path for path in found if path.resolve() not in own]
        self._names: dict[str, str] = {}

    def files(self) -> dict[str, list[Path]]:
        return {"documents": self.pages, "queries": self.queries}

    def index_documents(self, table: TextTableWriter) -> None:
        by_name: dict[str, list[str]] = {}
        for page in self.pages:
            record = self._record(page)
            table.add_record(record, page, 1)
            by_name.setdefault(page.name, []).append(record.id)
            place = page.relative_to(self.folder).as_posix()
            names = (record.id, place, record.address, record.address.rpartition("://")[2])
            self._names |= {name.strip("/"): record.id for name in names if name}
        for name, ids in by_name.items():
            if len(ids) == 1:
                self._names.setdefault(name, ids[0])

    def index_queries(self, table: TextTableWriter) -> None:
        if not self.queries:
            for page in self.pages:
                record = self._record(page)
                table.add_record(TextRecord(record.id, "", record.title), page, 1)
            return
        for number, (query, first) in enumerate(self._first_rows.items(), start=1):
            table.add_record(TextRecord(str(number), "", query), first.file, first.line)

    def judgements(self, bad_rows: BadRows) -> Iterator[JudgementRows]:
        if not self.queries:
            ids = [_id_of(page, self.folder) for page in self.pages]
            lines, grades = [1] * len(ids), [1.0] * len(ids)
            yield JudgementRows(TRAIN, str(self.folder), lines, ids, ids, grades)
            return
        numbers = {query: str(n) for n, query in enumerate(self._first_rows, start=1)}
        for path in self.queries:
            rows = []
            for row in (row for row in self._asked() if row.file == path):
                if (page := self._names.get(row.page.strip("/"))) is None:
                    rule = "no page has this path, name or address; correct it, or add the page."
                    bad_rows.add(BadRow(str(path), row.line, row.page, rule, "unknown document"))
                else:
                    rows.append((row.line, numbers[row.query], page, row.grade))
            if rows:
                yield JudgementRows(TRAIN, str(path), *zip(*rows, strict=True))

    def write_triples(
        self, path: Path, queries: TextTable, documents: TextTable, bad_rows: BadRows
    ) -> int:
        return 0

    def _record(self, page: Path) -> TextRecord:
        return page_record(page, _id_of(page, self.folder))

    @cached_property
    def _first_rows(self) -> dict[str, _Asked]:
        """The first row of each query, without spaces around it."""
        first: dict[str, _Asked] = {}
        for row in self._asked():
            first.setdefault(row.query, row)
        return first

    def _asked(self) -> Iterator[_Asked]:
        for path in self.queries:
            if path.suffix.lower() in JSON_SUFFIXES:
                rows = ((row.line, row.values) for row in read_json_rows(path))
            else:
                rows = (
                    (int(line), values)
                    for batch in Table(path).rows()
                    for line, values in zip(batch.line, batch.rows.to_pylist(), strict=True)
                )
            for line, values in rows:
                asked, pages, grade = (
                    next(
                        (values[name] for name in names if values.get(name) not in (None, "")), None
                    )
                    for names in (QUERY_COLUMNS, PAGE_COLUMNS, GRADE_COLUMNS)
                )
                if not isinstance(asked, str) or not asked.strip() or not pages:
                    raise ValueError(
                        f"{path}:{line}: the row needs a query and its page (columns query and "
                        f"page); it has {', '.join(map(str, values)) or 'nothing'}."
                    )
                for page in pages if isinstance(pages, list) else [pages]:
                    yield _Asked(
                        path, line, asked.strip(), str(page), 1.0 if grade is None else grade
                    )


def page_record(path: Path, id: str) -> TextRecord:
    """Return title, text and address of a page; the title is no line of the text.

    The title is `<title>`, else the first heading, of text a short first line, else the name of the
    file; the address is that of a canonical link, else "".
    """
    source, address = decoded_html(path.read_bytes()), ""
    if path.suffix.lower() in HTML_SUFFIXES:
        tree = parsed(source)
        nodes = [tree.css_first("title"), tree.css_first("h1")]
        title = next((text for n in nodes if n and (text := " ".join(n.text().split()))), "")
        lines = visible_lines(tree)
        link = tree.css_first('link[rel="canonical"]')
        address = "" if link is None else (link.attributes.get("href") or "").strip()
    else:
        is_markdown = path.suffix.lower() == ".md"
        heading = HEADING.search(source) if is_markdown else None
        plain = MARKUP.sub(r"\1", source) if is_markdown else source
        lines = [" ".join(line.split()) for line in plain.splitlines()]
        lines = [line for line in lines if line]
        title = lines[0] if len(lines) > 1 and len(lines[0]) <= LONGEST_TITLE else ""
        title = MARKUP.sub(r"\1", heading[1]) if heading else title
    title = title or path.stem.replace("-", " ").replace("_", " ")
    text = "\n".join(line for line in lines if line.casefold() != title.casefold())
    return TextRecord(id, title, text, address)


def _id_of(page: Path, folder: Path) -> str:
    """Return the path of a page in its folder as one word."""
    return re.sub(r"\s", "%20", page.relative_to(folder).as_posix())
