"""Rows of a table as checked job descriptions: normalised text, language and codes."""

import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from datamodules.files.rows import BadRow, BadRows, RowFault
from datamodules.files.splitting import parse_part
from datamodules.files.tables import RowBatch, Table, TableOptions
from datamodules.tokenizers.characters import TextNormalisation
from datamodules.tokenizers.codes import MOST_CODES, CodeBook, CodeSystem

UNKNOWN = "unk"
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

# What tables of historical occupations hold: names, and country codes used as languages. "se" is
# Northern Sami and "na" Nauru in the standard; there they mean Swedish and "not available".
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


def language_code(raw: str, unknown: Literal["error", "unk"] = "error") -> str:
    """Return the ISO 639-1 code of a language, or "unk" where none is stated.

    Args:
        raw: a code, an alias (se, ge, dk, swedish, …), or a locale such as en-GB.
        unknown: what a name means that is none of these: an error, or "unk".

    Raises:
        ValueError: nobody knows this language; names the likely one.
    """
    name = raw.strip().lower()
    if name in UNKNOWN_NAMES:
        return UNKNOWN
    for candidate in (name, name.replace("_", "-").split("-")[0]):
        if candidate in ALIASES:
            return ALIASES[candidate]
        if candidate in ISO_639_1:
            return candidate
    if unknown == "unk":
        return UNKNOWN
    near = difflib.get_close_matches(name, [*ALIASES, *ISO_639_1], n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    raise ValueError(
        f'language "{raw}" is no ISO 639-1 code (en, da, sv, …) or known name.{hint} '
        f'Write "{UNKNOWN}" where the language is not known.'
    )


NO_CODE_MARKS = ("", "na", "n/a", "nan", "null", "none")


@dataclass
class Columns:
    """Which columns of the tables hold what.

    Args:
        text: the job description.
        language: of each row; `None` where all rows have `default_language`.
        codes: one column per code, or one column that `code_separator` cuts; `A,B` or a list.
            `None` takes code_1, code_2, … as far as they exist.
        code_separator: text between the codes of one cell.
        split: train, validation or test, stated by the table itself.
        default_language: of rows that state none.
    """

    text: str = "text"
    language: str | None = None
    codes: list[str] | str | None = None
    code_separator: str | None = None
    split: str | None = None
    default_language: str = UNKNOWN

    def __post_init__(self) -> None:
        self.default_language = language_code(self.default_language)
        if self.code_separator is not None and not self.code_separator.strip(" "):
            raise ValueError(
                f'columns.code_separator must be a visible text, got "{self.code_separator}"; '
                "leave it out where each code has a column of its own."
            )
        if isinstance(self.codes, str):
            self.codes = [name.strip() for name in self.codes.split(",") if name.strip()]
        named = [self.text, self.language, self.split, *(self.codes or [])]
        named = [name for name in named if name is not None]
        twice = next((name for i, name in enumerate(named) if name in named[:i]), None)
        if twice is not None:
            raise ValueError(f'columns names "{twice}" twice; each use needs its own column.')

    def code_columns(self, table: Table) -> list[str]:
        """The code columns of this table.

        Raises:
            ValueError: it has none, or lacks one that is named.
        """
        if self.codes:
            table.check(self.codes, "columns.codes")
            return list(self.codes)
        found = [name for name in (f"code_{i}" for i in range(1, 10)) if name in table.names]
        if not found:
            raise ValueError(
                f"{table.path} has no column code_1; it has: {', '.join(table.names)}. Name its "
                "code columns with --data.columns.codes=A,B."
            )
        return found

    def text_columns(self, table: Table) -> list[str]:
        """The columns of text and language; raises ValueError where the table lacks one."""
        table.check([self.text], "columns.text")
        if self.language is None:
            return [self.text]
        table.check([self.language], "columns.language")
        return [self.text, self.language]


class Job(NamedTuple):
    """One sound row; codes in normal form, without repetition."""

    line: int
    text: str
    language: str
    codes: tuple[str, ...]
    part: int | None


@dataclass
class RowRules:
    """What a row must fulfil.

    Args:
        columns: which column holds what.
        normalisation: of the text.
        system: how codes are written.
        bad_rows: takes the rows that break a rule.
        book: the legal codes; `None` where the data define them.
        table: how the tables are written.
        is_prediction: rows are coded: one without a text or with an unknown language is not bad
            but stays as it is, see `notes`.
    """

    columns: Columns
    normalisation: TextNormalisation
    system: CodeSystem
    bad_rows: BadRows
    book: CodeBook | None = None
    table: TableOptions = field(default_factory=TableOptions)
    is_prediction: bool = False
    num_without_text: int = 0
    unknown_languages: Counter[str] = field(default_factory=Counter)
    _languages: dict[str, str | ValueError] = field(default_factory=dict)
    _codes: dict[str, str | RowFault | None] = field(default_factory=dict)

    def jobs(self, path: Path, with_split: bool = False) -> Iterator[Job]:
        """Yields the sound rows of a table with codes, in order; with their part where asked."""
        table = Table(path, self.table)
        codes = self.columns.code_columns(table)
        wanted = [*self.columns.text_columns(table), *codes]
        split = self.columns.split if with_split else None
        if split is not None:
            table.check([split], "columns.split")
            wanted.append(split)
        for batch in table.rows(list(dict.fromkeys(wanted)), self.bad_rows.add):
            cells = [batch.texts(name) for name in codes]
            parts = batch.texts(split) if split else []
            for i, (text, language) in enumerate(self.inputs(batch)):
                if text is None:
                    continue
                try:
                    found = self._row_codes([column[i] for column in cells])
                    part = parse_part(parts[i]) if parts else None
                except RowFault as fault:
                    self._reject(batch, i, *fault.args)
                except ValueError as error:
                    self._reject(batch, i, "split", parts[i], str(error))
                else:
                    yield Job(int(batch.line[i]), text, language, found, part)

    def input_batches(self, path: Path) -> Iterator[RowBatch]:
        """Yields text and language of a table, for `inputs`."""
        table = Table(path, self.table)
        yield from table.rows(self.columns.text_columns(table), self.bad_rows.add)

    def inputs(self, batch: RowBatch) -> Iterator[tuple[str | None, str]]:
        """Yields normalised text and language of every row; text `None` where the row is bad."""
        texts, column = batch.texts(self.columns.text), self.columns.language
        names = batch.texts(column) if column else [""] * len(texts)
        seen: dict[str, str] = {}
        for i, (raw, name) in enumerate(zip(texts, names, strict=True)):
            text = seen.get(raw)
            if text is None:
                text = seen[raw] = self.normalisation(raw)
            language = self._language(name)
            if self.is_prediction:
                self.num_without_text += not text
                if text and not isinstance(language, str):
                    self.unknown_languages[name] += 1
            elif not text:
                rule = f'the column "{self.columns.text}" holds no text; fill it or drop the row.'
                self._reject(batch, i, "text", raw, rule)
            elif not isinstance(language, str):
                self._reject(batch, i, "language", name, str(language))
                text = ""
            yield text or None, language if text and isinstance(language, str) else UNKNOWN

    def notes(self) -> list[str]:
        """What became of rows to code that are not as they should be."""
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

    def _language(self, raw: str) -> str | ValueError:
        found = self._languages.get(raw)
        if found is None:
            try:
                found = language_code(raw)
                found = self.columns.default_language if found == UNKNOWN else found
            except ValueError as error:
                found = error
            self._languages[raw] = found
        return found

    def _row_codes(self, cells: list[str]) -> tuple[str, ...]:
        if self.columns.code_separator is not None:
            cells = [part for cell in cells for part in cell.split(self.columns.code_separator)]
        found: dict[str, None] = {}
        for cell in cells:
            code = self._codes[cell] if cell in self._codes else self._parse(cell)
            if isinstance(code, RowFault):
                raise code
            if code is not None:
                found[code] = None
        if not found:
            rule = "the row has no code; give it one or drop the row."
            raise RowFault("no code", " ".join(cells).strip(), rule)
        most = self.system.max_codes or MOST_CODES
        if len(found) > most:
            raise RowFault(
                "too many codes",
                ", ".join(found),
                f"the row has {len(found)} codes, this code system allows {most}; raise max_codes "
                "of data.code_system or drop a code.",
            )
        return tuple(found)

    def _parse(self, cell: str) -> str | RowFault | None:
        code: str | RowFault | None = None
        raw, kind = cell.strip(), "code"
        if raw.lower() not in NO_CODE_MARKS or (self.book is not None and raw in self.book):
            try:
                code = self.system.parse(raw)
                kind = "code not in book"
                if self.book is not None:
                    self.book.index(code)
            except ValueError as error:
                kind = "lost zeros" if "leading zeros" in str(error) else kind
                code = RowFault(kind, cell, str(error))
        self._codes[cell] = code
        return code

    def _reject(self, batch: RowBatch, i: int, kind: str, value: str, rule: str) -> None:
        self.bad_rows.add(BadRow(str(batch.file), int(batch.line[i]), value, rule, kind))


def counted(count: int) -> str:
    """The beginning of a sentence about so many rows."""
    return "1 row has" if count == 1 else f"{count:,} rows have"
