"""Files of a collection in their formats: lines of BEIR or MS MARCO, and folders of pages."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from datamodules.files.documents import files_in
from datamodules.files.html import decoded_html, parsed, visible_lines
from datamodules.files.rows import (
    HALF_RULE,
    JSON_SUFFIXES,
    BadRow,
    BadRows,
    half_character,
    read_json_rows,
)
from datamodules.files.splitting import PART_ALIASES, PART_NAMES, TEST, TRAIN, VALIDATION
from datamodules.files.tables import Table, expand_files
from datamodules.search.texts import LineError, TextRecord, TextTableWriter

Files = str | list[str] | None
LineKind = Literal["jsonl", "tsv"]
SUFFIXES = (".jsonl", ".tsv", ".txt")
LINES_AT_ONCE = 65_536
BOM = b"\xef\xbb\xbf"
GRADE_NAMES = ("score", "grade", "relevance", "label")  # at the end of a header of judgements
HTML_SUFFIXES = (".html", ".htm", ".xhtml")
PAGE_SUFFIXES = (*HTML_SUFFIXES, ".md", ".txt")
PAGE_QUERY_SUFFIXES = (*JSON_SUFFIXES, ".csv", ".tsv", ".xlsx", ".parquet")
QUERY_COLUMNS = ("query", "question", "search")
PAGE_COLUMNS = ("page", "pages", "url", "address", "document", "relevant")
GRADE_COLUMNS = ("grade", "relevance", "score")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
MARKUP = re.compile(
    r"!?\[([^\]\n]{0,1000})\]\([^)\n]{0,1000}\)|^#{1,6}\s+|(?<!\w)[*_`]{1,3}|[*_`]{1,3}(?!\w)",
    re.MULTILINE,
)
LONGEST_TITLE = 120  # characters of a first line that is taken for one


@dataclass(frozen=True)
class CollectionFiles:
    """Files of a collection, where they are not those that its folder names by their layout.

    Args:
        documents: corpus.jsonl or collection.tsv; one, or several.
        queries: the same for queries; of pages a table or jsonl with query, page and maybe grade.
        train: judgements of the training queries; named judgements replace all of the folder's.
        validation: of the validation queries.
        test: of the test queries.
    """

    documents: Files = None
    queries: Files = None
    train: Files = None
    validation: Files = None
    test: Files = None

    def judgements(self) -> dict[int, Files]:
        """Return the named files of judgements per part; empty where none is named."""
        named = {TRAIN: self.train, VALIDATION: self.validation, TEST: self.test}
        return {part: files for part, files in named.items() if files}


class FileLayout(NamedTuple):
    """Names of the files of a format in their folder, and how a line of text is written.

    Source: https://github.com/beir-cellar/beir; https://microsoft.github.io/msmarco/Datasets.
    """

    kind: LineKind
    documents: str
    queries: str
    judgements: tuple[str, ...]


LAYOUTS = {
    "beir": FileLayout("jsonl", "corpus.jsonl", "queries.jsonl", ("qrels/*.tsv",)),
    "msmarco": FileLayout("tsv", "collection.tsv", "queries*.tsv", ("*qrels*.tsv", "*qrels*.txt")),
}


class JudgementRows(NamedTuple):
    """Some judgements of one file and part, as ids, and grades as text or numbers."""

    part: int
    file: str
    lines: list[int]
    queries: list[str]
    documents: list[str]
    grades: list[str | float]


class LinesReader:
    """Reads documents, queries and judgements, one a line.

    Args:
        layout: of the files.
        folder: with the files; `None` where all are named.
        files: those that lie elsewhere.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: it is not clear what a file holds.
    """

    def __init__(self, layout: FileLayout, folder: str | None, files: CollectionFiles) -> None:
        self.kind = layout.kind
        self.folder = Path(folder).expanduser() if folder else None
        self.documents = self._files(files.documents, "documents", (layout.documents,))
        self.queries = self._files(files.queries, "queries", (layout.queries,))
        self.judged: dict[int, list[Path]] = {}
        if named := files.judgements():
            for part, paths in named.items():
                self.judged[part] = self._files(paths, PART_NAMES[part], ())
            return
        for path in self._files(None, "judgements", layout.judgements):
            part = part_of(path)
            if part in self.judged:
                raise ValueError(
                    f"{self.judged[part][0]} and {path} both hold judgements of "
                    f"{PART_NAMES[part]}; name one of them with "
                    f"data.collection.files.{PART_NAMES[part]}."
                )
            self.judged[part] = [path]

    def files(self) -> dict[str, list[Path]]:
        """Return all files by their role; all are part of the fingerprint."""
        judged = {PART_NAMES[part]: self.judged[part] for part in sorted(self.judged)}
        return {"documents": self.documents, "queries": self.queries, **judged}

    def add_documents(self, table: TextTableWriter) -> None:
        """Hand over every document."""
        self._add(self.documents, table)

    def add_queries(self, table: TextTableWriter) -> None:
        """Hand over every query."""
        self._add(self.queries, table)

    def judgements(self, bad_rows: BadRows) -> Iterator[JudgementRows]:
        """Yield every judgement that can be cut into its values, some at a time."""
        for part in sorted(self.judged):
            for path in self.judged[part]:
                with path.open("rb") as file:
                    numbered = enumerate(file, start=1)
                    while block := list(islice(numbered, LINES_AT_ONCE)):
                        yield self._judged_block(block, part, path, bad_rows)

    def _judged_block(
        self, block: list[tuple[int, bytes]], part: int, path: Path, bad_rows: BadRows
    ) -> JudgementRows:
        rows = JudgementRows(part, str(path), [], [], [], [])
        for line, raw in block:
            if not raw.strip():
                continue
            try:
                values = cut_judgement(decoded(raw.removeprefix(BOM) if line == 1 else raw))
            except LineError as error:
                bad_rows.add(BadRow(str(path), line, error.value, error.rule))
                continue
            if line > 1 or values[-1].lower() not in GRADE_NAMES:
                rows.lines.append(line)
                rows.queries.append(values[0])
                rows.documents.append(values[1])
                rows.grades.append(values[2])
        return rows

    def _files(self, named: Files, role: str, patterns: Sequence[str]) -> list[Path]:
        """Return the named files, or those of the first pattern that the folder has."""
        if named:
            return expand_files(named, f"data.collection.files.{role}", SUFFIXES)
        if self.folder is not None:
            for pattern in patterns:
                if found := sorted(self.folder.glob(pattern)):
                    return found
            for pattern in patterns:
                if packed := sorted(self.folder.glob(f"{pattern}.gz")):
                    raise FileNotFoundError(f"{packed[0]} is compressed; unpack it with gunzip.")
        raise FileNotFoundError(
            f"{self.folder or 'the request'} has no {role} ({' or '.join(patterns)}); check the "
            f"folder, or name them with data.collection.files.{role}."
        )

    def _add(self, paths: list[Path], table: TextTableWriter) -> None:
        for path in paths:
            with path.open("rb") as file:
                for line, raw in enumerate(file, start=1):
                    content = raw.removeprefix(BOM) if line == 1 else raw
                    if not content.strip():
                        continue
                    try:
                        record = parse_line(self.kind, content)
                    except LineError as error:
                        table.refuse(path, line, error)
                    else:
                        table.add(record, path, line)


def part_of(path: Path) -> int:
    """Return the part that a file's name has as a word.

    Raises:
        ValueError: it has none.
    """
    for word in re.split(r"[._-]", path.stem.lower()):
        if word in PART_ALIASES:
            return PART_ALIASES[word]
    raise ValueError(
        f"{path}: its name tells no part, which is one of train, validation (or dev) and test; "
        "rename it, or name the files of all parts with data.collection.files.train, .validation "
        "and .test."
    )


def parse_line(kind: LineKind, raw: bytes) -> TextRecord:
    """Return the text of a line: {"_id", "text"} with perhaps title and url; or id, tab, text.

    Raises:
        LineError: it breaks a rule.
    """
    content = decoded(raw)
    if kind == "tsv":
        values = content.split("\t")
        if len(values) != 2:
            raise LineError(
                content,
                f"the line has {len(values)} columns, and must have 2, id and text, with one tab "
                "between them; replace tabs inside the text by blanks.",
            )
        record = TextRecord(values[0], "", values[1])
    else:
        try:
            row = json.loads(content)
        except json.JSONDecodeError as error:
            rule = f"the line is no JSON ({error.msg}); every line must be one JSON object."
            raise LineError(content, rule) from error
        if not isinstance(row, dict):
            rule = 'every line must be an object such as {"_id": "1", "text": "…"}.'
            raise LineError(content, rule)
        record = record_of(row)
    if not record.id.strip():
        raise LineError(record.id, "the id is empty; give every document and query its own.")
    return record


def record_of(row: dict[str, Any]) -> TextRecord:
    """Return the text of a row with _id (or id), text, and title and url where it has them.

    Raises:
        LineError: a value is missing or no text.
    """
    key = "_id" if "_id" in row else "id"
    is_number = isinstance(row.get(key), int) and not isinstance(row[key], bool)
    values: dict[str, Any] = {
        key: str(row[key]) if is_number else row.get(key),
        "title": "" if row.get("title") is None else row["title"],
        "text": "" if row.get("text", 0) is None else row.get("text"),
    }
    values["url"] = row["url"] if isinstance(row.get("url"), str) else ""
    for name, value in values.items():
        if not isinstance(value, str):
            shown = f'has no "{name}"' if value is None else f'has a "{name}" that is no text'
            raise LineError(
                "" if value is None else str(value),
                f"the row {shown}; it must have _id and text, and may have title; it has "
                f"{', '.join(map(str, row)) or 'nothing'}.",
            )
        if half := half_character(value):
            raise LineError(half, f"it {HALF_RULE}")
    return TextRecord(*values.values())


def decoded(raw: bytes) -> str:
    """Return a line as text, without its end.

    Raises:
        LineError: it is not UTF-8.
    """
    try:
        return raw.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise LineError(
            raw.decode(errors="replace").strip(),
            f"byte 0x{raw[error.start]:02X} at place {error.start + 1} of the line is not UTF-8, "
            "which every file must be; convert it, such as with iconv -f latin1 -t utf-8.",
        ) from error


def cut_judgement(text: str) -> tuple[str, str, str]:
    """Cut a line of judgements: query, document and grade with tabs, or TREC's four columns."""
    values = text.split("\t")
    if len(values) == 3:  # an id may hold a blank
        return values[0], values[1], values[2]
    trec = text.split()
    if len(trec) == 4:
        return trec[0], trec[2], trec[3]
    raise LineError(
        text,
        f"the line has {len(values)} columns, and must have 3 with tabs between them (query, "
        "document, grade) or TREC's 4 (query, 0, document, grade).",
    )


class _Wish(NamedTuple):
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
        beside = (self.folder / f"queries{suffix}" for suffix in PAGE_QUERY_SUFFIXES)
        named = files.queries or [str(path) for path in beside if path.is_file()]
        self.queries = expand_files(named, "data.collection.files.queries", PAGE_QUERY_SUFFIXES)
        own = {path.resolve() for path in self.queries}
        found = files_in(self.folder, PAGE_SUFFIXES, "data.collection.folder")
        self.pages = [path for path in found if path.resolve() not in own]
        self._names: dict[str, str] = {}

    def files(self) -> dict[str, list[Path]]:
        """Return all files by their role."""
        return {"documents": self.pages, "queries": self.queries}

    def add_documents(self, table: TextTableWriter) -> None:
        """Hand over every page."""
        by_name: dict[str, list[str]] = {}
        for page in self.pages:
            record = page_record(page, self.folder)
            table.add(record, page, 1)
            by_name.setdefault(page.name, []).append(record.id)
            place = page.relative_to(self.folder).as_posix()
            names = (record.id, place, record.address, record.address.rpartition("://")[2])
            self._names |= {name.strip("/"): record.id for name in names if name}
        for name, ids in by_name.items():
            if len(ids) == 1:
                self._names.setdefault(name, ids[0])

    def add_queries(self, table: TextTableWriter) -> None:
        """Hand over every query, or every title."""
        if not self.queries:
            for page in self.pages:
                record = page_record(page, self.folder)
                table.add(TextRecord(record.id, "", record.title), page, 1)
        for number, (query, first) in enumerate(self._first_wishes.items(), start=1):
            table.add(TextRecord(str(number), "", query), first.file, first.line)

    def judgements(self, bad_rows: BadRows) -> Iterator[JudgementRows]:
        """Yield every pair of a query and a page that is there."""
        if not self.queries:
            ids = [page_id(page, self.folder) for page in self.pages]
            ones = [1] * len(ids)
            yield JudgementRows(TRAIN, str(self.folder), ones, ids, ids, [1.0] * len(ids))
        numbers = {query: str(n) for n, query in enumerate(self._first_wishes, start=1)}
        for wish in self._wishes():
            if (page := self._names.get(wish.page.strip("/"))) is None:
                rule = "no page has this path, name or address; correct it, or add the page."
                bad_rows.add(BadRow(str(wish.file), wish.line, wish.page, rule, "unknown document"))
                continue
            values = [wish.line], [numbers[wish.query]], [page], [wish.grade]
            yield JudgementRows(TRAIN, str(wish.file), *values)

    @cached_property
    def _first_wishes(self) -> dict[str, _Wish]:
        """The first row of each query, without spaces around it."""
        first: dict[str, _Wish] = {}
        for wish in self._wishes():
            first.setdefault(wish.query, wish)
        return first

    def _wishes(self) -> Iterator[_Wish]:
        for path in self.queries:
            rows: Iterator[tuple[int, dict[str, Any]]]
            if path.suffix.lower() in JSON_SUFFIXES:
                rows = ((row.line, row.values) for row in read_json_rows(path))
            else:
                rows = (
                    (int(line), values)
                    for batch in Table(path).rows()
                    for line, values in zip(batch.line, batch.rows.to_pylist(), strict=True)
                )
            for line, values in rows:
                query, pages, grade = (
                    next((values[n] for n in names if values.get(n) not in (None, "")), None)
                    for names in (QUERY_COLUMNS, PAGE_COLUMNS, GRADE_COLUMNS)
                )
                if not isinstance(query, str) or not query.strip() or not pages:
                    raise ValueError(
                        f"{path}:{line}: the row needs a query and its page (columns query and "
                        f"page); it has {', '.join(map(str, values)) or 'nothing'}."
                    )
                for page in pages if isinstance(pages, list) else [pages]:
                    yield _Wish(
                        path, line, query.strip(), str(page), 1.0 if grade is None else grade
                    )


def page_id(page: Path, folder: Path) -> str:
    """Return the path of a page in its folder as one word."""
    return re.sub(r"\s", "%20", page.relative_to(folder).as_posix())


def page_record(page: Path, folder: Path) -> TextRecord:
    """Return id, title, text and address of a page; the title is no line of the text.

    The title is `<title>`, else the first heading, of text a short first line, else the name of the
    file; the address is that of a canonical link, else "".
    """
    source, address = decoded_html(page.read_bytes()), ""
    if page.suffix.lower() in HTML_SUFFIXES:
        tree = parsed(source)
        nodes = [tree.css_first("title"), tree.css_first("h1")]
        title = next((text for n in nodes if n and (text := " ".join(n.text().split()))), "")
        lines = visible_lines(tree)
        link = tree.css_first('link[rel="canonical"]')
        address = "" if link is None else (link.attributes.get("href") or "").strip()
    else:
        is_markdown = page.suffix.lower() == ".md"
        heading = HEADING.search(source) if is_markdown else None
        plain = MARKUP.sub(r"\1", source) if is_markdown else source
        lines = [" ".join(line.split()) for line in plain.splitlines()]
        lines = [line for line in lines if line]
        title = lines[0] if len(lines) > 1 and len(lines[0]) <= LONGEST_TITLE else ""
        title = MARKUP.sub(r"\1", heading[1]) if heading else title
    title = title or page.stem.replace("-", " ").replace("_", " ")
    text = "\n".join(line for line in lines if line.casefold() != title.casefold())
    return TextRecord(page_id(page, folder), title, text, address)
