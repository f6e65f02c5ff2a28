"""Readers of collections: BEIR, MS MARCO passages, Amazon's shopping queries (ESCI), pages.

Sources: Bajaj et al. 2016, "MS MARCO"; Reddy et al. 2022, "Shopping Queries Dataset".
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from datamodules.files.documents import (
    decoded_html,
    files_in,
    line_of,
    page_bytes,
    parsed,
    read_documents,
    visible_lines,
)
from datamodules.files.rows import (
    JSON_SUFFIXES,
    BadRow,
    BadRows,
    JsonRow,
    RowFault,
    check_characters,
    kind_of,
    sound_rows,
)
from datamodules.files.splitting import PART_ALIASES, PART_NAMES, TEST, TRAIN, VALIDATION
from datamodules.files.tables import Files, Table, expand_files, text_lines, value_rows
from datamodules.search.cleaning import main_lines

NO_DOCUMENT = -1  # padding in rows of document numbers
GRADE_NAMES = ("score", "grade", "relevance", "label")  # of judgements, in headers
BEIR_SUFFIXES = (".jsonl", ".tsv", ".txt")
HTML_SUFFIXES = (".html", ".htm", ".xhtml")
PAGE_SUFFIXES = (*HTML_SUFFIXES, ".md", ".txt")
QUERY_TABLES = (*JSON_SUFFIXES, ".csv", ".tsv", ".xlsx", ".parquet")
QUERY_COLUMNS = ("query", "question", "search", "text", "keyword")
PAGE_COLUMNS = ("page", "pages", "url", "address", "document", "relevant")
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
# Front matter of Jekyll, Hugo and others: keys and indented values between two rules.
FRONT_MATTER = re.compile(r"(---|\+{3})\s?\n(?:(?:\w[\w-]* ?[:=]|[ \t#[\]]|- ).*\n|\r?\n)*\1(?!\S)")
FRONT_TITLE = re.compile(r"""^title ?[:=] ?["']?([^\s"'>|].*?)["']?\s*$""", re.MULTILINE)
MARKUP = re.compile(
    r"!?\[([^\]\n]{0,1000})\]\([^)\n]{0,1000}\)|^#{1,6}\s+|(?<!\w)[*_`]{1,3}|[*_`]{1,3}(?!\w)",
    re.MULTILINE,
)
PASSAGES = "collection.tsv"
PRODUCTS, EXAMPLES = (f"shopping_queries_dataset_{n}.parquet" for n in ("products", "examples"))
EXAMPLE_COLUMNS = ("query_id", "query", "product_locale", "product_id", "esci_label", "split")
GAINS = {"E": 1.0, "S": 0.1, "C": 0.01, "I": 0.0}  # exact, substitute, complement, irrelevant
PRODUCT_TEXT = ("product_brand", "product_color", "product_bullet_point", "product_description")
LONGEST_TITLE = 120  # characters of a first line that counts as a title


class TextRecord(NamedTuple):
    """One text with its id; title and address (a url) are "" in formats without them."""

    id: str
    title: str
    text: str
    address: str = ""

    @property
    def whole(self) -> str:
        """Title and, on the next line, text: the input of an encoder."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class TextRow(NamedTuple):
    """A text and its place in the user's files."""

    record: TextRecord
    path: Path
    line: int


class JudgementRow(NamedTuple):
    """A judgement with its place, ids of query and document, and grade as text or number."""

    part: int
    file: str
    line: int
    query: str
    document: str
    grade: Any


@dataclass(frozen=True)
class CollectionFiles:
    """Files to use instead of those that a collection's folder holds under standard names.

    Args:
        queries: jsonl; for pages, a table or jsonl with query, page and optionally grade.
        train: judgements of the training queries. Any judgement file named here replaces all of
            the folder's.
        validation: judgements of the validation queries.
        test: judgements of the test queries.
    """

    queries: Files = None
    train: Files = None
    validation: Files = None
    test: Files = None

    def judgements(self) -> dict[int, Files]:
        """Return the judgement files named for each part."""
        named = {TRAIN: self.train, VALIDATION: self.validation, TEST: self.test}
        return {part: files for part, files in named.items() if files}


class BeirReader:
    """Reader of `corpus.jsonl`, `queries.jsonl` and `qrels/*.tsv` of a folder.

    Source: https://github.com/beir-cellar/beir.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a judgement file names no part, or the part of another file.
    """

    patterns = {
        "documents": "corpus.jsonl",
        "queries": "queries.jsonl",
        "judgements": "qrels/*.tsv",
    }

    def __init__(self, folder: Path, named: CollectionFiles) -> None:
        def files(role: str, given: Files = None) -> list[Path]:
            if given:
                return expand_files(given, f"data.collection.files.{role}", BEIR_SUFFIXES)
            if not (found := sorted(folder.glob(self.patterns[role]))):
                raise FileNotFoundError(f"{folder} has no {role} ({self.patterns[role]}).")
            return found

        self.texts = {"documents": files("documents"), "queries": files("queries", named.queries)}
        self.judged = {
            part: files(PART_NAMES[part], given) for part, given in named.judgements().items()
        }
        for path in [] if self.judged else files("judgements"):
            words = re.split(r"[._-]", path.stem.lower())
            part = next((PART_ALIASES[word] for word in words if word in PART_ALIASES), None)
            if part is None:
                raise ValueError(
                    f"{path}: its name tells no part, which is one of train, validation (or dev) "
                    "and test; rename it, or name the files of all parts with "
                    "data.collection.files.train and so on."
                )
            if part in self.judged:
                raise ValueError(
                    f"{self.judged[part][0]} and {path} both hold judgements of "
                    f"{PART_NAMES[part]}; name one with data.collection.files.{PART_NAMES[part]}."
                )
            self.judged[part] = [path]

    def files(self) -> dict[str, list[Path]]:
        """Return all files by role; the fingerprint covers all of them."""
        return {**self.texts, **{PART_NAMES[part]: own for part, own in self.judged.items()}}

    def rows(self, role: str, bad_rows: BadRows) -> Iterator[TextRow]:
        """Yield every valid row of `documents` or `queries`."""
        for path in self.texts[role]:
            yield from sound_rows(path, text_row, bad_rows)

    def judgements(self, bad_rows: BadRows) -> Iterator[JudgementRow]:
        """Yield every line that can be parsed: query, document and grade separated by tabs, or
        TREC's four columns."""
        for part, paths in sorted(self.judged.items()):
            for path in paths:
                # Bytes that are not UTF-8 become an id that no text has.
                with path.open(encoding="utf-8-sig", errors="replace") as file:
                    for line, text in enumerate(file, start=1):
                        values, words = text.strip("\r\n").split("\t"), text.split()
                        if len(values) != 3 and len(words) == 4:  # an id may hold a blank
                            values = [words[0], words[2], words[3]]
                        if len(values) == 3:
                            if words and (line > 1 or values[2].lower() not in GRADE_NAMES):
                                yield JudgementRow(part, str(path), line, *values)
                        elif words:
                            rule = (
                                f"the line has {len(values)} columns, and must have 3 with tabs "
                                "between them (query, document, grade) or TREC's 4 (query, 0, "
                                "document, grade)."
                            )
                            bad_rows.add(BadRow(str(path), line, text.strip(), rule))


class MsMarcoReader(BeirReader):
    """Reader of `collection.tsv`, `queries*.tsv` (id, text) and `qrels*.tsv` of a folder.

    Arguments and errors as in `BeirReader`.
    """

    patterns = {"documents": PASSAGES, "queries": "queries*.tsv", "judgements": "qrels*.tsv"}

    def rows(self, role: str, bad_rows: BadRows) -> Iterator[TextRow]:
        """Yield every row of `documents` or `queries` that has an id and a text."""
        for path in self.texts[role]:
            for line, text in enumerate(text_lines(path, "utf-8-sig"), start=1):
                id, tab, own = text.partition("\t")
                if tab and id.strip():
                    yield TextRow(TextRecord(id.strip(), "", own.strip()), path, line)
                elif text.strip():
                    rule = "a row is an id and a text with a tab between them; correct it."
                    bad_rows.add(BadRow(str(path), line, text.strip(), rule))


class EsciReader:
    """Reader of ESCI's two parquet files. A product's id is its locale and number, its text is
    brand, color, bullet points and description. Grades are the gains of ESCI's ranking task.

    Raises:
        FileNotFoundError: the file of examples does not exist.
        ValueError: other files are named, or a column is missing.
    """

    def __init__(self, folder: Path, named: CollectionFiles) -> None:
        if named != CollectionFiles():
            raise ValueError("a folder of ESCI is read without data.collection.files; leave them.")
        self.products, self.examples = folder / PRODUCTS, folder / EXAMPLES
        if not self.examples.is_file():
            raise FileNotFoundError(f"{folder} has {PRODUCTS} and no {EXAMPLES}; copy it there.")
        Table(self.products).check(("product_locale", "product_id", "product_title"))
        Table(self.examples).check(EXAMPLE_COLUMNS)

    def files(self) -> dict[str, list[Path]]:
        """Return all files by role."""
        return {"documents": [self.products], "queries": [self.examples]}

    def rows(self, role: str, bad_rows: BadRows) -> Iterator[TextRow]:
        """Yield every product, or every example's query."""
        for line, row in value_rows(self.products if role == "documents" else self.examples):
            if role == "documents":
                text = "\n".join(row[name] for name in PRODUCT_TEXT if row.get(name))
                record = TextRecord(_product(row), row["product_title"] or "", text)
                yield TextRow(record, self.products, line)
            else:
                record = TextRecord(str(row["query_id"]), "", row["query"] or "")
                yield TextRow(record, self.examples, line)

    def judgements(self, bad_rows: BadRows) -> Iterator[JudgementRow]:
        """Yield the judgement of every example; an unknown split is a bad row."""
        for line, row in value_rows(self.examples):
            label, part = row["esci_label"], PART_ALIASES.get(row["split"])
            place = (str(self.examples), line)
            if part is None:
                rule = "its split is none of train and test; correct it."
                bad_rows.add(BadRow(*place, str(row["split"]), rule))
            else:
                values = (str(row["query_id"]), _product(row), GAINS.get(label, label))
                yield JudgementRow(part, *place, *values)


def _product(row: dict[str, Any]) -> str:
    return f"{row['product_locale']}-{row['product_id']}"


def text_row(row: JsonRow) -> TextRow:
    """Return the text of a row with _id (or id), text, and optionally title and url.

    Raises:
        RowFault: a value is missing or not a text.
    """
    cells = row.values
    key = "_id" if "_id" in cells else "id"
    id, text, url = cells.get(key), cells.get("text"), cells.get("url")
    values: dict[str, Any] = {
        key: str(id) if isinstance(id, int) else id,
        "title": cells.get("title") or "",
        "text": "" if text is None and "text" in cells else text,
        "url": url if isinstance(url, str) else "",
    }
    for name, value in values.items():
        if not isinstance(value, str) or (name == key and not value.strip()):
            rule = f'"{name}" is missing or no text; a row has _id and text, and may have title.'
            raise RowFault("columns", "" if value is None else str(value), rule)
        check_characters(value)
    return TextRow(TextRecord(*values.values()), row.file, row.line)


class QueryRow(NamedTuple):
    """A query; id, page (or a list of pages) and grade are `None` if the row lacks them."""

    line: int
    query: str
    id: Any = None
    page: Any = None
    grade: Any = None


def query_rows(path: Path, bad_rows: BadRows) -> Iterator[QueryRow]:
    """Yield the rows of a table or jsonl that hold a query in valid characters, or the lines of a
    .txt with their number as id."""
    if kind_of(path) == ".txt":
        for line, query in enumerate(next(read_documents(path)).text.split("\n"), start=1):
            if query.strip():
                yield QueryRow(line, query.strip(), str(line))
        return
    for line, row in value_rows(path, on_bad_row=bad_rows.add):
        query, id = value_of(row, QUERY_COLUMNS), value_of(row, ("_id", "id"))
        try:
            if not isinstance(query, str) or not query.strip():
                names = " or ".join(QUERY_COLUMNS)
                rule = f"no {names}, or an empty one; it has {', '.join(row) or 'nothing'}."
                raise RowFault("columns", "", rule)
            check_characters(f"{query}{id}")
            page, grade = value_of(row, PAGE_COLUMNS), value_of(row, GRADE_NAMES)
            yield QueryRow(line, query.strip(), id, page, grade)
        except RowFault as fault:
            bad_rows.add_fault(path, line, fault)


def value_of(row: dict[str, Any], names: Sequence[str]) -> Any:
    """Return the first non-empty value of these columns, in capitals or not, else `None`."""
    lower = {name.lower(): value for name, value in row.items() if value not in (None, "")}
    return next((lower[name] for name in names if name in lower), None)


class PagesReader:
    """Reader of a folder of pages; a page's id is its path in the folder, blanks as %20.

    Queries and their pages are in `queries.csv` (or .tsv, .xlsx, .jsonl, .parquet) of the folder,
    or in a named file; a row has query, page (its path, name or address), maybe grade (else 1).
    Without such a file every title is a query that its page, read without the title, answers.

    Args:
        main_text: whether only the main text of html pages is read, see `Cleaning`.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: other files than queries are named.
    """

    def __init__(self, folder: Path, named: CollectionFiles, main_text: bool = False) -> None:
        if named.judgements():
            raise ValueError(
                "a folder of pages is read with data.collection.files.queries alone; leave the "
                "other files out."
            )
        self.folder, self.main_text = folder, main_text
        beside = (folder / f"queries{suffix}" for suffix in QUERY_TABLES)
        files = named.queries or [str(path) for path in beside if path.is_file()]
        self.query_files = expand_files(files, "data.collection.files.queries", QUERY_TABLES)
        own = {path.resolve() for path in self.query_files}
        pages = files_in(folder, PAGE_SUFFIXES, "data.collection.folder")
        self.pages = [path for path in pages if path.resolve() not in own]
        self._ids: dict[str, str] = {}  # path, name or address -> id
        self._titles: list[TextRow] = []
        self._pairs: list[JudgementRow] = []  # document: the page as the user names it

    def files(self) -> dict[str, list[Path]]:
        """Return all files by role."""
        return {"documents": self.pages, "queries": self.query_files}

    def rows(self, role: str, bad_rows: BadRows) -> Iterator[TextRow]:
        """Yield every page (`documents`), or every query or title; call it for pages first."""
        if role == "documents":
            by_name: dict[str, list[str]] = {}  # or by address; shared ones name no page
            for page in self.pages:
                record = page_record(page, self.folder, self.main_text)
                yield TextRow(record, page, 1)
                self._titles.append(TextRow(TextRecord(record.id, "", record.title), page, 1))
                place = page.relative_to(self.folder).as_posix()
                self._ids |= {record.id: record.id, place: record.id}
                names = (place, page.name, record.address, record.address.rpartition("://")[2])
                for name in dict.fromkeys(_spelling(name) for name in names if name):
                    by_name.setdefault(name, []).append(record.id)
            for name, ids in by_name.items():
                if len(ids) == 1:
                    self._ids.setdefault(name, ids[0])
            return
        if not self.query_files:
            yield from self._titles
        numbers: dict[str, str] = {}  # id of each query, from 1 by first occurrence
        for path in self.query_files:
            for row in query_rows(path, bad_rows):
                if not row.page:
                    rule = "the row names no page (column page); name one, or take it out."
                    bad_rows.add(BadRow(str(path), row.line, row.query, rule))
                    continue
                number = numbers.setdefault(row.query, str(len(numbers) + 1))
                yield TextRow(TextRecord(number, "", row.query), path, row.line)
                grade = 1.0 if row.grade is None else row.grade
                for page in row.page if isinstance(row.page, list) else [row.page]:
                    values = (str(path), row.line, number, str(page), grade)
                    self._pairs.append(JudgementRow(TRAIN, *values))

    def judgements(self, bad_rows: BadRows) -> Iterator[JudgementRow]:
        """Yield every pair of a query and an existing page; call it after `rows`."""
        for title in () if self.query_files else self._titles:
            yield JudgementRow(TRAIN, str(self.folder), 1, title.record.id, title.record.id, 1.0)
        for row in self._pairs:
            exact, named = row.document.strip("/"), _spelling(row.document)
            if (page := self._ids.get(exact, self._ids.get(named))) is None:
                rule = (
                    "no page has this path, name or address, or several have; name its path, or "
                    "add the page."
                )
                bad_rows.add(BadRow(row.file, row.line, row.document, rule, "unknown document"))
            else:
                yield row._replace(document=page)


def _spelling(name: str) -> str:
    """Return a page's name without slashes at its ends, %20 and the like, and accents apart from
    their letters, as macOS stores them."""
    return unicodedata.normalize("NFC", unquote(name)).strip("/")


def page_record(page: Path, folder: Path, main_text: bool = False) -> TextRecord:
    """Return id, title, text and address of a page; the text does not contain the title's line.

    The title is `<title>` or the first `<h1>` of html, front matter's or the first heading of
    Markdown, or a short first line; else the file name. The address is the canonical link, or "".
    """
    source, address = decoded_html(page_bytes(page)), ""
    if kind_of(page) in HTML_SUFFIXES:
        tree = parsed(source)
        title = line_of(tree.css_first("title:not(svg *)")) or line_of(tree.css_first("h1"))
        lines = main_lines(source) if main_text else visible_lines(tree.body)
        link = tree.css_first('link[rel~="canonical" i]')
        address = "" if link is None else (link.attributes.get("href") or "").strip()
    else:
        is_markdown = kind_of(page) == ".md"
        front = (FRONT_MATTER.match(source) or [""])[0] if is_markdown else ""
        source = source.removeprefix(front)
        heading = (FRONT_TITLE.search(front) or HEADING.search(source)) if is_markdown else None
        plain = MARKUP.sub(r"\1", source) if is_markdown else source
        lines = [line for one in plain.splitlines() if (line := " ".join(one.split()))]
        title = lines[0] if len(lines) > 1 and len(lines[0]) <= LONGEST_TITLE else ""
        title = MARKUP.sub(r"\1", heading[1]) if heading else title
    title = title or page.stem.replace("-", " ").replace("_", " ")
    text = "\n".join(line for line in lines if line.casefold() != title.casefold())
    id = re.sub(r"\s", "%20", page.relative_to(folder).as_posix())
    return TextRecord(id, title, text, address)
