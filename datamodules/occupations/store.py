"""Stores of job descriptions: tables encoded once as memory-mapped arrays.

Shapes: T distinct texts, P characters of these texts, N rows, K codes of all rows, D distinct
inputs of tables to code.
"""

import difflib
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from datamodules.core.store import (
    ArrayFile,
    ArrayFolder,
    array_digest,
    cache_folder,
    digest_of,
    file_digest,
    made_once,
    write_arrays,
)
from datamodules.files.rows import MISSING, BadRows, OnBadRows, RowFault, accepted
from datamodules.files.splitting import PART_NAMES, TRAIN, SplitOptions, parse_part, split_by_stem
from datamodules.files.tables import Table, TableOptions, check_file, check_same_columns
from datamodules.tokenizers.codes import (
    MOST_CODES,
    CodeBook,
    CodeSystem,
    TextOptions,
    build_code_book,
)

STORE_VERSION, INDEX_VERSION = 2, 4
NO_TEXT = -1
RECIPE_VERSION = 1
# Keys of a recipe that determine how a row is encoded.
ENCODING_KEYS = ("version", "normalisation", "max_length", "languages", "code_book")
T = TypeVar("T")

UNKNOWN, DESCRIPTION_LANGUAGE = "unk", "en"
UNKNOWN_NAMES = ("", "unk", "unknown", "und", "na", "n/a", "nan", "none", "null", "?", "-", "xx")

_ISO_639_1 = """
aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv
dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie
ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv
mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nv ny oc oj om or os pa pi pl ps pt qu rm rn
ro ru rw sa sc sd sg si sk sl sm sn so sq sr ss st su sv sw ta te tg th ti tk tl tn to tr ts tt tw
ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""
ISO_639_1 = frozenset(_ISO_639_1.split())

# Names in tables of historical occupations, with country codes used as languages. In ISO 639-1 "se"
# is Northern Sami and "na" Nauru; in such tables they mean Swedish and "not available".
_NAMES = """
sv se swe swedish svenska; da dk dan danish dansk; de ge ger deu german deutsch at
no nb nn nor nob nno norwegian norsk bokmal nynorsk; en eng english gb us
nl dut nld du dutch nederlands flemish; fr fre fra french français
es spa sp spanish español castilian; pt por portuguese português; it ita italian italiano
ca cat catalan català; el gr gre ell greek; is ice isl icelandic; fi fin finnish suomi; la lat latin
pl pol polish; cs cz cze ces czech; hu hun hungarian; ru rus russian; he iw hebrew; id in indonesian
yi ji yiddish; ja jp japanese; zh cn chinese; et estonian; lv latvian; lt lithuanian; ga irish
gd gaelic; cy welsh; eu basque; gl galician; ro romanian; bg bulgarian; hr croatian; sr serbian
sl slovenian; sk slovak; uk ukrainian; sq albanian; tr turkish; ar arabic; af afrikaans; fo faroese
"""
ALIASES: dict[str, str] = {
    alias: names[0]
    for names in (entry.split() for entry in _NAMES.replace("\n", ";").split(";"))
    for alias in names[1:]
}


def language_code(raw: str) -> str:
    """Return the ISO 639-1 code for a code, an alias (se, ge, dk, swedish, …) or a locale such as
    en-GB; "unk" if no language is stated.

    Raises:
        ValueError: the language is unknown; the message suggests a similar one.
    """
    name = raw.strip().lower()
    if name in UNKNOWN_NAMES:
        return UNKNOWN
    for candidate in (name, name.replace("_", "-").split("-")[0]):
        if candidate in ALIASES:
            return ALIASES[candidate]
        if candidate in ISO_639_1:
            return candidate
    near = difflib.get_close_matches(name, [*ALIASES, *ISO_639_1], n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    raise ValueError(
        f'language "{raw}" is no ISO 639-1 code (en, da, sv, …) or known name.{hint} '
        f'Write "{UNKNOWN}" where the language is not known.'
    )


@dataclass
class Columns:
    """Names of the columns of the tables.

    Args:
        text: column of the job description.
        language: column of the language; `None` if all rows have `default_language`.
        codes: columns of the codes, as `A,B` or a list: one per code, or one that `code_separator`
            cuts. `None` takes those of code_1, code_2, … that exist.
        code_separator: text between several codes in one cell.
        split: column that assigns rows to train, validation or test.
        source: column of a record's origin; a test then also reports scores by source.
        default_language: language of rows that state none.
    """

    text: str = "text"
    language: str | None = None
    codes: list[str] | str | None = None
    code_separator: str | None = None
    split: str | None = None
    default_language: str = UNKNOWN
    source: str | None = None

    def __post_init__(self) -> None:
        self.default_language = language_code(self.default_language)
        if isinstance(self.codes, str):
            self.codes = [name.strip() for name in self.codes.split(",") if name.strip()]

    def code_columns(self, table: Table) -> list[str]:
        """Return the code columns of a table.

        Raises:
            ValueError: the table has none, or lacks a named one.
        """
        if self.codes:
            table.check(self.codes, "columns.codes")
            return list(self.codes)
        names = [name for name in (f"code_{i}" for i in range(1, 10)) if name in table.names]
        if not names:
            raise ValueError(
                f"{table.path} has no column code_1; it has: {', '.join(table.names)}. Name its "
                "code columns with --data.columns.codes=A,B."
            )
        return names

    def named(self, table: Table, *options: str) -> list[str]:
        """Return the columns that these options name; ValueError if the table lacks one."""
        names = {one: name for one in options if (name := getattr(self, one)) is not None}
        for option, name in names.items():
            table.check([name], f"columns.{option}")
        return list(names.values())


@dataclass(frozen=True)
class CodeBookOptions:
    """The list of valid codes.

    Args:
        path: table with the columns code and description; `None` takes the codes in the data.
        descriptions_as_examples: whether each description (in English) becomes a training example
            of its code.
    """

    path: str | None = None
    descriptions_as_examples: bool = False

    def __post_init__(self) -> None:
        if self.path is not None:
            object.__setattr__(self, "path", str(Path(self.path).expanduser()))


class Job(NamedTuple):
    """A valid row; its codes in normal form, without repetition."""

    text: str
    language: str
    codes: tuple[str, ...]
    part: int | None
    source: str = ""


class RowReader:
    """Reader of the tables of a request, whose recipe, if any, decides normalisation and codes.

    Without a code book, any code valid in the code system passes.
    """

    def __init__(self, request: "StoreRequest", bad_rows: BadRows) -> None:
        self.columns, self.table, self.bad_rows = request.columns, request.table, bad_rows
        self.text = request.text
        self.book: CodeBook | None = None
        if request.recipe is not None:
            self.text = TextOptions.from_recipe(request.recipe)
            self.book = CodeBook.from_dict(request.recipe["code_book"])
        elif request.book.path is not None:
            self.book = build_code_book(request.system, Path(request.book.path), ())
        self.system = request.system if self.book is None else self.book.system
        self.num_without_text = 0
        self.unknown_languages: Counter[str] = Counter()
        self._normalised = lru_cache(maxsize=1 << 16)(self.text)
        self._language = cache(self._parse_language)
        self._code = cache(self._parse_code)

    def jobs(self, path: Path, is_divided: bool) -> Iterator[Job]:
        """Yield the valid rows of a table with codes, in order; with their part if `is_divided` and
        `columns.split` is set."""
        table, columns = Table(path, self.table), self.columns
        code_columns, split = columns.code_columns(table), columns.split if is_divided else None
        names = columns.named(table, "text", "language", *(["split"] if split else ()), "source")
        names = list(dict.fromkeys([*names, *code_columns]))
        for line, row in table.rows(names, self.bad_rows.add):
            try:
                raw = row[columns.text]
                text = self._normalised(raw)
                if not text:
                    rule = f'the column "{columns.text}" holds no text; fill it or drop the row.'
                    raise RowFault("text", raw, rule)
                language = _sound(self._language(row[columns.language] if columns.language else ""))
                codes = self._codes_of([row[name] for name in code_columns])
                part = None if split is None else parse_part(row[split])
            except RowFault as fault:
                self.bad_rows.add_fault(path, line, fault)
            else:
                source = "" if columns.source is None else row[columns.source].strip()
                yield Job(text, language, codes, part, source)

    def inputs(self, path: Path) -> Iterator[tuple[str | None, str]]:
        """Yield normalised text (`None` if empty) and language of every row to code. Empty texts
        and unknown languages are not errors; `notes` reports them."""
        table, columns = Table(path, self.table), self.columns
        for _, row in table.rows(columns.named(table, "text", "language"), self.bad_rows.add):
            text = self._normalised(row[columns.text])
            if not text:
                self.num_without_text += 1
                yield None, UNKNOWN
                continue
            name = row[columns.language] if columns.language else ""
            language = self._language(name)
            if isinstance(language, RowFault):
                self.unknown_languages[name] += 1
                language = UNKNOWN
            yield text, language

    def notes(self) -> list[str]:
        """Return sentences on rows to code with empty texts or unknown languages."""
        notes = []
        if self.num_without_text:
            notes.append(
                f'{counted(self.num_without_text)} no text in the column "{self.columns.text}": '
                "such a row stays in the coded table, without codes."
            )
        if unknown := self.unknown_languages:
            names = [f'"{name}"' for name, _ in unknown.most_common(3)]
            more = len(unknown) - len(names)
            notes.append(
                f"{counted(unknown.total())} a language that is no known code "
                f"({', '.join(names)}{f' and {more} more' if more else ''}): coded as of unknown "
                "language, language_known is false."
            )
        return notes

    # Faults are returned, not raised, so that the cache holds them for repeated values, too.

    def _parse_language(self, name: str) -> str | RowFault:
        try:
            language = language_code(name)
        except ValueError as error:
            return RowFault("language", name, str(error))
        return self.columns.default_language if language == UNKNOWN else language

    def _codes_of(self, cells: list[str]) -> tuple[str, ...]:
        if self.columns.code_separator is not None:
            cells = [part for cell in cells for part in cell.split(self.columns.code_separator)]
        codes = tuple(dict.fromkeys(code for cell in cells if (code := _sound(self._code(cell)))))
        if not codes:
            rule = "the row has no code; give it one or drop the row."
            raise RowFault("no code", " ".join(cells).strip(), rule)
        most = self.system.max_codes or MOST_CODES
        if len(codes) > most:
            raise RowFault(
                "too many codes",
                ", ".join(codes),
                f"the row has {len(codes)} codes, this code system allows {most}; raise max_codes "
                "of data.code_system or drop a code.",
            )
        return codes

    def _parse_code(self, cell: str) -> str | RowFault | None:
        raw, kind = cell.strip(), "code"
        if raw.lower() in MISSING and (self.book is None or raw not in self.book):
            return None
        try:
            code = self.system.parse(raw)
            kind = "code not in book"
            if self.book is not None:
                self.book.index(code)
        except ValueError as error:
            kind = "lost zeros" if "leading zeros" in str(error) else kind
            return RowFault(kind, cell, str(error))
        return code


def _sound(parsed: T | RowFault) -> T:
    """Return a parsed value; raise it if it is a fault."""
    if isinstance(parsed, RowFault):
        raise RowFault(*parsed.args)
    return parsed


def counted(count: int) -> str:
    """Return the beginning of a sentence about a number of rows."""
    return "1 row has" if count == 1 else f"{count:,} rows have"


@dataclass
class StoreRequest:
    """All inputs that determine a store; options as in `OccupationDataModule`."""

    files: dict[int, list[Path]]  # tables with codes of each part: train, validation, test
    columns: Columns
    system: CodeSystem
    book: CodeBookOptions = CodeBookOptions()
    split: SplitOptions = field(default_factory=SplitOptions)
    text: TextOptions = field(default_factory=TextOptions)
    table: TableOptions = field(default_factory=TableOptions)
    # A checkpoint's recipe, which then determines the encoding; `None` makes a new one.
    recipe: dict[str, Any] | None = None

    def folder(self) -> Path:
        """Return the store's cache folder; hashes all files."""
        book = None
        if self.book.path:
            check_file(Path(self.book.path), "data.code_book")
            book = file_digest(Path(self.book.path))
        files = {
            PART_NAMES[part]: [[str(path), file_digest(path)] for path in paths]
            for part, paths in self.files.items()
        }
        options = ("columns", "book", "split", "text", "table")
        parts = {
            "version": STORE_VERSION,
            "files": files,
            "book file": book,
            "system": self.system.to_dict(),
            **{name: asdict(getattr(self, name)) for name in options},
            "recipe": None if self.recipe is None else encoding_digest(self.recipe),
        }
        return cache_folder("occupations", parts)


def encoding_digest(recipe: dict[str, Any]) -> str:
    """Return the hex digest of the parts of a recipe that determine how a row is encoded."""
    return digest_of({key: recipe[key] for key in ENCODING_KEYS})


class OccupationStore(ArrayFolder):
    """Job descriptions and codes as arrays.

    Attributes:
        recipe: what a checkpoint keeps to encode texts in the same way.
        arrays: code_points [P] uint32, the concatenated texts; text_offsets [T + 1] int64;
            is_truncated [T] bool; text_id [N] int32; language_id [N] int16, index into the recipe's
            languages; code_ids [K] int32; code_offsets [N + 1] int64; part [N] int8, 0 train, 1
            validation, 2 test; is_seen_text [N] bool, whether the text occurs in a training row;
            is_seen_code [N] bool, whether every code of the row does; with `columns.source`,
            source_id [N] int32.
        sources: names of the sources by id.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.recipe: dict[str, Any] = self.facts["recipe"]
        self.sources: list[str] = self.facts.get("sources", [])

    def rows(self, part: int) -> np.ndarray:
        """Return the rows of one part, [rows] int64, in input order."""
        return np.flatnonzero(self.arrays["part"] == part)

    def texts(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the text of each of these rows, [S] uint32."""
        return self.parts("code_points", "text_offsets", self.arrays["text_id"][rows])

    def code_sets(self, rows: np.ndarray) -> list[np.ndarray]:
        """Return the codes of each of these rows, int32, one or more."""
        return self.parts("code_ids", "code_offsets", rows)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of characters of each row's text, [rows] int64."""
        return np.diff(self.arrays["text_offsets"])[self.arrays["text_id"][rows]]


def text_arrays(texts: Collection[str], max_length: int) -> dict[str, np.ndarray]:
    """Return the concatenated code points of texts cut to max_length, offsets, and cut flags."""
    beginnings = [text[:max_length] for text in texts]
    return {
        "code_points": np.frombuffer("".join(beginnings).encode("utf-32-le"), "<u4"),
        "text_offsets": np.cumsum([0, *map(len, beginnings)], dtype=np.int64),
        "is_truncated": np.array([len(text) > max_length for text in texts], dtype=bool),
    }


def open_store(request: StoreRequest, on_bad_rows: OnBadRows = "error") -> OccupationStore:
    """Return the store of this request, made at first use.

    Raises:
        ValueError: rows break a rule; the message names the first ones.
    """
    make = partial(_write, request, BadRows(on_bad_rows))
    return OccupationStore(accepted(made_once(request.folder(), make), on_bad_rows))


class _Rows:
    """Rows as ids of their distinct texts, languages, codes and sources."""

    def __init__(self) -> None:
        self.text_ids: dict[str, int] = {}
        self.language_ids: dict[str, int] = {}
        self.code_ids: dict[str, int] = {}
        self.source_ids: dict[str, int] = {}
        self.source = array("i")
        self.text, self.language, self.part = array("i"), array("i"), array("b")
        self.code, self.num_codes = array("i"), array("i")

    def add(self, job: Job, part: int) -> None:
        self.text.append(self.text_ids.setdefault(job.text, len(self.text_ids)))
        self.language.append(self.language_ids.setdefault(job.language, len(self.language_ids)))
        for code in job.codes:
            self.code.append(self.code_ids.setdefault(code, len(self.code_ids)))
        self.num_codes.append(len(job.codes))
        self.source.append(self.source_ids.setdefault(job.source, len(self.source_ids)))
        self.part.append(part if job.part is None else job.part)


def _write(request: StoreRequest, bad_rows: BadRows, folder: Path) -> None:
    """Read the tables of a request and write its arrays; ValueError if rows break a rule."""
    recipe, columns, options = request.recipe, request.columns, request.book
    reader, rows = RowReader(request, bad_rows), _Rows()
    for part, paths in request.files.items():
        for path in paths:
            for job in reader.jobs(path, part == TRAIN):
                rows.add(job, part)
    if not rows.text and not bad_rows.rows:
        raise ValueError("the tables hold no row; give them at least one.")
    bad_rows.settle(folder)
    parts = _parts(request, rows)
    is_train = parts == TRAIN
    book, system = reader.book, reader.system
    if system.max_codes is None:  # the most codes of any row
        system = CodeSystem(**{**system.to_dict(), "max_codes": max(rows.num_codes)})
        book = book and CodeBook(system, book.codes, book.descriptions)
    book = book or build_code_book(system, None, rows.code_ids)
    if recipe is None:
        names = list(rows.language_ids)
        used = {names[i] for i in np.unique(np.array(rows.language)[is_train])}
        used.add(columns.default_language)
        if options.descriptions_as_examples:
            used.add(DESCRIPTION_LANGUAGE)
        recipe = {
            "version": RECIPE_VERSION,
            **reader.text.to_recipe(),
            "languages": [UNKNOWN, *sorted(used - {UNKNOWN})],
            "default_language": columns.default_language,
            "code_book": book.to_dict(),
        }

    # Whether text and codes occur in training rows; descriptions do not count.
    text_id, code = np.array(rows.text), np.array(rows.code)
    offsets = np.cumsum([0, *rows.num_codes], dtype=np.int64)
    is_seen_text = np.isin(text_id, text_id[is_train])
    is_known = np.isin(code, code[np.repeat(is_train, rows.num_codes)])
    is_seen_code = np.logical_and.reduceat(is_known, offsets[:-1])
    if options.descriptions_as_examples and request.files.get(TRAIN):
        for name, description in zip(book.codes, book.descriptions, strict=True):
            text = reader.text(description)
            if text and name not in book.system.specials:
                rows.add(Job(text, DESCRIPTION_LANGUAGE, (name,), None), TRAIN)
    new = (0, len(rows.text) - len(parts))  # descriptions were added as training rows
    index = {name: i for i, name in enumerate(recipe["languages"])}  # unknown or new: 0
    language_id = np.array([index.get(name, 0) for name in rows.language_ids], np.int16)
    code_id = np.array([book.index(name) for name in rows.code_ids], np.int32)
    arrays = {
        **text_arrays(rows.text_ids, reader.text.max_length),
        "text_id": np.array(rows.text, np.int32),
        "language_id": language_id[np.array(rows.language)],
        "code_ids": code_id[np.array(rows.code)],
        "code_offsets": np.cumsum([0, *rows.num_codes], dtype=np.int64),
        "part": np.pad(parts, new, constant_values=TRAIN),
        "is_seen_text": np.pad(is_seen_text, new, constant_values=True),
        "is_seen_code": np.pad(is_seen_code, new, constant_values=True),
    }
    if columns.source is not None:
        arrays["source_id"] = np.array(rows.source, np.int32)
    named = ((f"{name} {v.dtype.str} {len(v)};", v) for name, v in arrays.items())
    fingerprint = array_digest(*chain.from_iterable(named))[:32]
    facts = {"recipe": recipe, "sources": list(rows.source_ids)}
    write_arrays(folder, arrays, **facts, fingerprint=fingerprint)


def _parts(request: StoreRequest, rows: _Rows) -> np.ndarray:
    """Return the part of each row [N] int8, after the split of training rows."""
    parts = np.array(rows.part, dtype=np.int8)
    files, train = request.files, np.flatnonzero(parts == TRAIN)
    split = None if request.columns.split else request.split.beside(files)
    if split is not None and len(train):
        texts, codes = list(rows.text_ids), list(rows.code_ids)
        first = np.cumsum([0, *rows.num_codes])[train]
        parts[train] = split_by_stem(
            [texts[rows.text[i]] for i in train], [codes[rows.code[i]] for i in first], split
        )
    if files.get(TRAIN) and not (parts == TRAIN).any():
        raise ValueError(
            "no row is left for training; lower data.split.validation_share and test_share, "
            "or check the split column."
        )
    return parts


class PredictIndex(ArrayFolder):
    """The distinct inputs of tables to code.

    Attributes:
        files: the tables.
        table: format of the tables.
        notes: sentences on rows with empty texts or unknown languages.
        arrays: code_points [P] uint32, the concatenated texts; text_offsets [D + 1] int64;
            is_truncated [D] bool; language_ids [D] int16, index into the recipe's languages,
            0 = unknown; input_of_row [N] int64, index of the row's input, -1 = a row without text.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files = [Path(name) for name in self.facts["files"]]
        self.table = TableOptions(**self.facts["table"])
        self.notes: list[str] = self.facts["notes"]


def open_index(
    files: Sequence[Path], request: StoreRequest, on_bad_rows: OnBadRows = "error"
) -> PredictIndex:
    """Return the index of tables to code, made at first use.

    Args:
        files: tables with a text column; code columns are not needed.
        request: format and columns of the tables, and recipe of the checkpoint that will code them.
        on_bad_rows: what to do with rows that cannot be cut into columns: `error` raises, `reject`
            leaves them out.

    Raises:
        ValueError: the tables differ in their columns, or rows break a rule.
    """
    columns, recipe = request.columns, request.recipe
    assert recipe is not None
    tables = [Table(path, request.table) for path in files]
    for one in tables:
        columns.named(one, "text", "language")
    check_same_columns(tables)
    key = {
        "version": INDEX_VERSION,
        "files": [[str(path.resolve()), file_digest(path)] for path in files],
        "columns": [columns.text, columns.language, columns.default_language],
        "encoding": {name: recipe[name] for name in ("normalisation", "max_length", "languages")},
        "table": asdict(request.table),
    }

    def make(folder: Path) -> None:
        reader = RowReader(request, BadRows(on_bad_rows))
        language_index = {name: i for i, name in enumerate(recipe["languages"])}
        inputs: dict[tuple[str, int], int] = {}  # text and index of the language
        with ArrayFile(folder / "input_of_row.npy", np.int64) as input_of_row:
            for path in files:
                numbers = (
                    NO_TEXT
                    if text is None
                    else inputs.setdefault((text, language_index.get(name, 0)), len(inputs))
                    for text, name in reader.inputs(path)
                )
                input_of_row.add(np.fromiter(numbers, np.int64))
        reader.bad_rows.settle(folder)
        if not inputs:
            why = [*reader.bad_rows.rows[:1], *reader.notes()][0]
            raise ValueError(f"{', '.join(map(str, files))}: no row can be coded. {why}")
        texts, languages = zip(*inputs, strict=True)
        arrays = text_arrays(texts, reader.text.max_length)
        arrays["language_ids"] = np.array(languages, np.int16)
        write_arrays(
            folder,
            arrays,
            files=[str(path.resolve()) for path in files],
            fingerprint=array_digest(*arrays.values()),
            notes=reader.notes(),
            table=asdict(request.table),
        )

    return PredictIndex(accepted(made_once(cache_folder("predict", key), make), on_bad_rows))
