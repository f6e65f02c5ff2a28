"""Files of a collection in their formats: lines of BEIR, and folders of pages."""

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from datamodules.files.documents import files_in
from datamodules.files.html import decoded_html, parsed, visible_lines
from datamodules.files.rows import (
    HALF_RULE,
    JSON_SUFFIXES,
    BadRow,
    BadRows,
    JsonRow,
    RowFault,
    half_character,
    read_json_rows,
    sound_rows,
)
from datamodules.files.splitting import PART_ALIASES, PART_NAMES, TEST, TRAIN, VALIDATION
from datamodules.files.tables import Table, expand_files

Files = str | list[str] | None
LINES_AT_ONCE = 65_536
GRADE_NAMES = ("score", "grade", "relevance", "label")  # at the end of a header of judgements
BEIR_SUFFIXES = (".jsonl", ".tsv", ".txt")
HTML_SUFFIXES = (".html", ".htm", ".xhtml")
PAGE_SUFFIXES = (*HTML_SUFFIXES, ".md", ".txt")
QUERY_TABLES = (*JSON_SUFFIXES, ".csv", ".tsv", ".xlsx", ".parquet")
QUERY_COLUMNS = ("query", "question", "search", "text")
PAGE_COLUMNS = ("page", "pages", "url", "address", "document", "relevant")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
MARKUP = re.compile(
    r"!?\[([^\]\n]{0,1000})\]\([^)\n]{0,1000}\)|^#{1,6}\s+|(?<!\w)[*_`]{1,3}|[*_`]{1,3}(?!\w)",
    re.MULTILINE,
)
LONGEST_TITLE = 120  # characters of a first line that is taken for one


class TextRecord(NamedTuple):
    """One text with its id; title and address (a url) are "" where a format has none."""

    id: str
    title: str
    text: str
    address: str = ""


class TextRow(NamedTuple):
    """A text, and where it stands in the user's files."""

    record: TextRecord
    path: Path
    line: int


class JudgementRows(NamedTuple):
    """Some judgements of one file and part, as ids, and grades as text or numbers."""

    part: int
    file: str
    lines: list[int]
    queries: list[str]
    documents: list[str]
    grades: list[Any]


@dataclass(frozen=True)
class CollectionFiles:
    """Files of a collection, where they are not those that its folder names by their layout.

    Args:
        queries: jsonl; of pages a table or jsonl with query, page and maybe grade.
        train: judgements of the training queries; named judgements replace all of the folder's.
        validation: of the validation queries.
        test: of the test queries.
    """

    queries: Files = None
    train: Files = None
    validation: Files = None
    test: Files = None

    def judgements(self) -> dict[int, Files]:
        """Return the named files of judgements per part; empty where none is named."""
        named = {TRAIN: self.train, VALIDATION: self.validation, TEST: self.test}
        return {part: files for part, files in named.items() if files}


class BeirReader:
    """Reads `corpus.jsonl`, `queries.jsonl` and `qrels/*.tsv` of a folder.

    Source: https://github.com/beir-cellar/beir.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: it is not clear what a file holds.
    """

    def __init__(self, folder: Path, named: CollectionFiles) -> None:
        def files(pattern: str, role: str) -> list[Path]:
            if given := asdict(named).get(role):
                return expand_files(given, f"data.collection.files.{role}", BEIR_SUFFIXES)
            if not (found := sorted(folder.glob(pattern))):
                packed = (
                    " It is compressed; unpack it." if any(folder.glob(f"{pattern}.gz")) else ""
                )
                raise FileNotFoundError(f"{folder} has no {role} ({pattern}).{packed}")
            return found

        self.texts = {"documents": files("corpus.jsonl", "documents")}
        self.texts["queries"] = files("queries.jsonl", "queries")
        self.judged: dict[int, list[Path]] = {}
        for part in named.judgements():
            self.judged[part] = files("", PART_NAMES[part])
        for path in [] if self.judged else files("qrels/*.tsv", "judgements"):
            if (part := part_of(path)) in self.judged:
                raise ValueError(
                    f"{self.judged[part][0]} and {path} both hold judgements of "
                    f"{PART_NAMES[part]}; name one with data.collection.files.{PART_NAMES[part]}."
                )
            self.judged[part] = [path]

    def files(self) -> dict[str, list[Path]]:
        """Return all files by their role; all are part of the fingerprint."""
        return {
            **self.texts,
            **{PART_NAMES[part]: self.judged[part] for part in sorted(self.judged)},
        }

    def rows(self, role: str, bad_rows: BadRows) -> Iterator[TextRow]:
        """Yield every sound row of `documents` or `queries`."""

        def row_of(row: JsonRow) -> TextRow:
            return TextRow(record_of(row.values), row.file, row.line)

        for path in self.texts[role]:
            yield from sound_rows(path, row_of, bad_rows)

    def judgements(self, bad_rows: BadRows) -> Iterator[JudgementRows]:
        """Yield every judgement that can be cut into its values, some at a time: query, document
        and grade with tabs, or TREC's four columns."""
        for part in sorted(self.judged):
            for path in self.judged[part]:
                # What is not UTF-8 becomes an id that no text has.
                with path.open(encoding="utf-8-sig", errors="replace") as file:
                    numbered = enumerate(file, start=1)
                    while block := list(islice(numbered, LINES_AT_ONCE)):
                        yield self._cut(block, part, path, bad_rows)

    def _cut(
        self, block: list[tuple[int, str]], part: int, path: Path, bad_rows: BadRows
    ) -> JudgementRows:
        rows = JudgementRows(part, str(path), [], [], [], [])
        for line, text in block:
            values, words = text.strip("\r\n").split("\t"), text.split()
            if not words:
                continue
            if len(values) != 3:  # an id may hold a blank
                if len(words) != 4:
                    rule = (
                        f"the line has {len(values)} columns, and must have 3 with tabs between "
                        "them (query, document, grade) or TREC's 4 (query, 0, document, grade)."
                    )
                    bad_rows.add(BadRow(str(path), line, text.strip(), rule))
                    continue
                values = [words[0], words[2], words[3]]
            if line > 1 or values[2].lower() not in GRADE_NAMES:
                rows.lines.append(line)
                for column, value in zip(rows[3:], values, strict=True):
                    column.append(value)
        return rows


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
        "rename it, or name the files of all parts with data.collection.files.train and so on."
    )


def record_of(row: dict[str, Any]) -> TextRecord:
    """Return the text of a row with _id (or id), text, and title and url where it has them.

    Raises:
        RowFault: a value is missing or no text.
    """
    key = "_id" if "_id" in row else "id"
    is_number = isinstance(row.get(key), int) and not isinstance(row[key], bool)
    url = row.get("url")
    values: dict[str, Any] = {
        key: str(row[key]) if is_number else row.get(key),
        "title": "" if row.get("title") is None else row["title"],
        "text": "" if row.get("text", 0) is None else row.get("text"),
        "url": url if isinstance(url, str) else "",
    }
    for name, value in values.items():
        if not isinstance(value, str) or (name == key and not value.strip()):
            rule = f'"{name}" is missing or no text; a row has _id and text, and may have title.'
            raise RowFault("columns", "" if value is None else str(value), rule)
        if half := half_character(value):
            raise RowFault("columns", half, f"it {HALF_RULE}")
    return TextRecord(*values.values())


def table_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line and values of each row of a table or a jsonl file."""
    if path.suffix.lower() in JSON_SUFFIXES:
        yield from ((row.line, row.values) for row in read_json_rows(path))
        return
    for batch in Table(path).rows():
        yield from zip(batch.line.tolist(), batch.rows.to_pylist(), strict=True)


def value_of(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    """Return the first value of these columns that is there, `None` without one."""
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


class PageWish(NamedTuple):
    """A query with one relevant page, as a row of a table says it."""

    file: Path
    line: int
    query: str
    page: str
    grade: Any


class PagesReader:
    """Reads a folder of pages; a page's id is its path in the folder, blanks as %20.

    Queries and their pages stand in `queries.csv` (or .tsv, .xlsx, .jsonl, .parquet) of the folder,
    or in a named file: a row has query and page (its path, name or address), perhaps a grade above
    0. Without a file each title is a query, and its page, which is read without it, the answer.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: other files than queries are named.
    """

    def __init__(self, folder: Path, named: CollectionFiles) -> None:
        if named.judgements():
            raise ValueError(
                "format pages reads data.collection.folder and data.collection.files.queries "
                "alone; leave the other files out."
            )
        self.folder = folder
        beside = (folder / f"queries{suffix}" for suffix in QUERY_TABLES)
        files = named.queries or [str(path) for path in beside if path.is_file()]
        self.asked = expand_files(files, "data.collection.files.queries", QUERY_TABLES)
        own = {path.resolve() for path in self.asked}
        pages = files_in(folder, PAGE_SUFFIXES, "data.collection.folder")
        self.pages = [path for path in pages if path.resolve() not in own]
        self._ids: dict[str, str] = {}  # path, name or address -> id
        self._titles: list[TextRow] = []

    def files(self) -> dict[str, list[Path]]:
        """Return all files by their role."""
        return {"documents": self.pages, "queries": self.asked}

    def rows(self, role: str, bad_rows: BadRows) -> Iterator[TextRow]:
        """Yield every page, then every query or title; `documents` come first."""
        if role == "documents":
            yield from self._documents()
        elif not self.asked:
            yield from self._titles
        else:
            firsts: dict[str, PageWish] = {}
            for wish in self._wishes:
                firsts.setdefault(wish.query, wish)
            for query, first in firsts.items():
                record = TextRecord(self._numbers[query], "", query)
                yield TextRow(record, first.file, first.line)

    def judgements(self, bad_rows: BadRows) -> Iterator[JudgementRows]:
        """Yield every pair of a query and a page that is there."""
        if not self.asked:
            ids = [row.record.id for row in self._titles]
            ones = [1] * len(ids)
            yield JudgementRows(TRAIN, str(self.folder), ones, ids, ids, [1.0] * len(ids))
        for wish in self._wishes:
            if (page := self._ids.get(wish.page.strip("/"))) is None:
                rule = "no page has this path, name or address; correct it, or add the page."
                bad_rows.add(BadRow(str(wish.file), wish.line, wish.page, rule, "unknown document"))
                continue
            values = [wish.line], [self._numbers[wish.query]], [page], [wish.grade]
            yield JudgementRows(TRAIN, str(wish.file), *values)

    def _documents(self) -> Iterator[TextRow]:
        by_name: dict[str, list[str]] = {}
        for page in self.pages:
            record = page_record(page, self.folder)
            yield TextRow(record, page, 1)
            self._titles.append(TextRow(TextRecord(record.id, "", record.title), page, 1))
            by_name.setdefault(page.name, []).append(record.id)
            place = page.relative_to(self.folder).as_posix()
            names = (record.id, place, record.address, record.address.rpartition("://")[2])
            self._ids |= {name.strip("/"): record.id for name in names if name}
        for name, ids in by_name.items():
            if len(ids) == 1:
                self._ids.setdefault(name, ids[0])

    @cached_property
    def _numbers(self) -> dict[str, str]:
        """Query -> its id, a number from 1."""
        queries = dict.fromkeys(wish.query for wish in self._wishes)
        return {query: str(number) for number, query in enumerate(queries, start=1)}

    @cached_property
    def _wishes(self) -> list[PageWish]:
        wishes = []
        for path in self.asked:
            for line, row in table_rows(path):
                query, pages = value_of(row, QUERY_COLUMNS), value_of(row, PAGE_COLUMNS)
                if not isinstance(query, str) or not query.strip() or not pages:
                    raise ValueError(
                        f"{path}:{line}: the row needs a query and its page (columns query and "
                        f"page); it has {', '.join(map(str, row)) or 'nothing'}."
                    )
                grade = value_of(row, GRADE_NAMES)
                for page in pages if isinstance(pages, list) else [pages]:
                    values = (query.strip(), str(page), 1.0 if grade is None else grade)
                    wishes.append(PageWish(path, line, *values))
        return wishes


Reader = BeirReader | PagesReader
READERS: dict[str, Callable[[Path, CollectionFiles], Reader]] = {
    "beir": BeirReader,
    "pages": PagesReader,
}


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
        lines = [line for one in plain.splitlines() if (line := " ".join(one.split()))]
        title = lines[0] if len(lines) > 1 and len(lines[0]) <= LONGEST_TITLE else ""
        title = MARKUP.sub(r"\1", heading[1]) if heading else title
    title = title or page.stem.replace("-", " ").replace("_", " ")
    text = "\n".join(line for line in lines if line.casefold() != title.casefold())
    return TextRecord(
        re.sub(r"\s", "%20", page.relative_to(folder).as_posix()), title, text, address
    )
