"""Rows of a table as checked job descriptions: normalised text, language and codes."""

import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from datamodules.files.rows import BadRow, BadRows
from datamodules.files.splitting import parse_part
from datamodules.files.tables import RowBatch, Table, TableOptions
from datamodules.tokenizers.characters import TextNormalisation
from datamodules.tokenizers.codes import MOST_CODES, CodeBook, CodeSystem

UNKNOWN = "unk"
UNKNOWN_NAMES = ("", "unk", "unknown", "und", "na", "n/a", "nan", "none", "null", "?", "-", "xx")

_ISO_639_1 = (
    "aa=Afar ab=Abkhazian ae=Avestan af=Afrikaans ak=Akan am=Amharic an=Aragonese ar=Arabic "
    "as=Assamese av=Avaric ay=Aymara az=Azerbaijani ba=Bashkir be=Belarusian bg=Bulgarian "
    "bi=Bislama bm=Bambara bn=Bengali bo=Tibetan br=Breton bs=Bosnian ca=Catalan ce=Chechen "
    "ch=Chamorro co=Corsican cr=Cree cs=Czech cu=Slavonic cv=Chuvash cy=Welsh da=Danish "
    "de=German dv=Divehi dz=Dzongkha ee=Ewe el=Greek en=English eo=Esperanto es=Spanish "
    "et=Estonian eu=Basque fa=Persian ff=Fulah fi=Finnish fj=Fijian fo=Faroese fr=French "
    "fy=Frisian ga=Irish gd=Gaelic gl=Galician gn=Guarani gu=Gujarati gv=Manx ha=Hausa "
    "he=Hebrew hi=Hindi ho=Motu hr=Croatian ht=Haitian hu=Hungarian hy=Armenian hz=Herero "
    "ia=Interlingua id=Indonesian ie=Interlingue ig=Igbo ii=Nuosu ik=Inupiaq io=Ido "
    "is=Icelandic it=Italian iu=Inuktitut ja=Japanese jv=Javanese ka=Georgian kg=Kongo "
    "ki=Kikuyu kj=Kwanyama kk=Kazakh kl=Greenlandic km=Khmer kn=Kannada ko=Korean kr=Kanuri "
    "ks=Kashmiri ku=Kurdish kv=Komi kw=Cornish ky=Kirghiz la=Latin lb=Luxembourgish lg=Ganda "
    "li=Limburgish ln=Lingala lo=Lao lt=Lithuanian lu=Luba lv=Latvian mg=Malagasy "
    "mh=Marshallese mi=Maori mk=Macedonian ml=Malayalam mn=Mongolian mr=Marathi ms=Malay "
    "mt=Maltese my=Burmese na=Nauru nb=Bokmal nd=Ndebele ne=Nepali ng=Ndonga nl=Dutch "
    "nn=Nynorsk no=Norwegian nv=Navajo ny=Chichewa oc=Occitan oj=Ojibwa om=Oromo or=Oriya "
    "os=Ossetian pa=Punjabi pi=Pali pl=Polish ps=Pashto pt=Portuguese qu=Quechua rm=Romansh "
    "rn=Rundi ro=Romanian ru=Russian rw=Kinyarwanda sa=Sanskrit sc=Sardinian sd=Sindhi "
    "sg=Sango si=Sinhala sk=Slovak sl=Slovenian sm=Samoan sn=Shona so=Somali sq=Albanian "
    "sr=Serbian ss=Swati st=Sotho su=Sundanese sv=Swedish sw=Swahili ta=Tamil te=Telugu "
    "tg=Tajik th=Thai ti=Tigrinya tk=Turkmen tl=Tagalog tn=Tswana to=Tonga tr=Turkish "
    "ts=Tsonga tt=Tatar tw=Twi ty=Tahitian ug=Uighur uk=Ukrainian ur=Urdu uz=Uzbek ve=Venda "
    "vi=Vietnamese vo=Volapuk wa=Walloon wo=Wolof xh=Xhosa yi=Yiddish yo=Yoruba za=Zhuang "
    "zh=Chinese zu=Zulu"
)
ISO_NAMES: dict[str, str] = {entry[:2]: entry[3:] for entry in _ISO_639_1.split()}

# What tables of historical occupations hold, and country codes used as languages. "se" is Northern
# Sami and "na" Nauru in the standard; in these tables they mean Swedish and "not available".
ALIASES: dict[str, str] = {
    **{"se": "sv", "swe": "sv", "svenska": "sv"},
    **{"dk": "da", "dan": "da", "dansk": "da"},
    **{"ge": "de", "ger": "de", "deu": "de", "deutsch": "de", "at": "de"},
    **{"nb": "no", "nn": "no", "nor": "no", "nob": "no", "nno": "no", "norsk": "no"},
    **{"eng": "en", "gb": "en", "us": "en"},
    **{"dut": "nl", "nld": "nl", "du": "nl", "nederlands": "nl", "flemish": "nl"},
    **{"fre": "fr", "fra": "fr", "français": "fr"},
    **{"spa": "es", "sp": "es", "español": "es", "castilian": "es"},
    **{"por": "pt", "português": "pt"},
    **{"ita": "it", "italiano": "it"},
    **{"cat": "ca", "català": "ca"},
    **{"gr": "el", "gre": "el", "ell": "el"},
    **{"ice": "is", "isl": "is"},
    **{"fin": "fi", "suomi": "fi"},
    **{"lat": "la", "pol": "pl", "cz": "cs", "cze": "cs", "ces": "cs", "hun": "hu", "rus": "ru"},
    **{"iw": "he", "in": "id", "ji": "yi", "jp": "ja", "cn": "zh"},
}
_NAMES = {name.lower(): code for code, name in ISO_NAMES.items()}


def language_code(raw: str, unknown: Literal["error", "unk"] = "error") -> str:
    """Return the ISO 639-1 code of a language, or "unk" where none is stated.

    Args:
        raw: a code, an alias (se, ge, dk, …), an English name, or a locale such as en-GB.
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
        if candidate in ISO_NAMES:
            return candidate
        if candidate in _NAMES:
            return ALIASES.get(_NAMES[candidate], _NAMES[candidate])
    if unknown == "unk":
        return UNKNOWN
    near = difflib.get_close_matches(name, [*_NAMES, *ALIASES, *ISO_NAMES], n=1)
    hint = f' Did you mean "{near[0]}"?' if near else ""
    raise ValueError(
        f'language "{raw}" is no ISO 639-1 code (en, da, sv, …), alias or English name.{hint} '
        f'Write "{UNKNOWN}" where the language is not known.'
    )


NO_CODE_MARKS = ("", "na", "n/a", "nan", "null", "none")


@dataclass
class Columns:
    """Which columns of the tables hold what.

    Args:
        text: the job description.
        language: the language of each row; none where all rows have `default_language`.
        codes: one column per code, or one column that `code_separator` cuts; `A,B` or a list.
            None takes code_1, code_2, … as far as they exist.
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
    """What a row must fulfil, and where those go that do not.

    Args:
        columns: which column holds what.
        normalisation: of the text.
        system: how codes are written.
        bad_rows: takes the rows that break a rule.
        book: the legal codes; None where the data define them.
        table: how the tables are written.
        is_prediction: rows are coded, so that none without a text or with an unknown language is
            bad: it stays as it is, see `notes`.
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
    _codes: "dict[str, str | BrokenCode | None]" = field(default_factory=dict)

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
            parts = batch.texts(split) if split else None
            for i, (text, language) in enumerate(self.inputs(batch)):
                if text is None:
                    continue
                line = int(batch.line[i])
                try:
                    part = parse_part(parts[i]) if parts else None
                    found = self._row_codes([column[i] for column in cells])
                except BrokenCode as broken:
                    self._reject(batch, i, broken.value, str(broken), broken.kind)
                except ValueError as error:
                    self._reject(batch, i, parts[i] if parts else "", str(error), "split")
                else:
                    yield Job(line, text, language, found, part)

    def input_batches(self, path: Path) -> Iterator[RowBatch]:
        """Yields text and language of a table, for `inputs`."""
        table = Table(path, self.table)
        yield from table.rows(self.columns.text_columns(table), self.bad_rows.add)

    def inputs(self, batch: RowBatch) -> Iterator[tuple[str | None, str]]:
        """Yields normalised text and language of every row; text None where the row is bad."""
        texts = batch.texts(self.columns.text)
        named = batch.texts(self.columns.language) if self.columns.language else None
        seen: dict[str, str] = {}
        for i, raw in enumerate(texts):
            text = seen.get(raw)
            if text is None:
                text = seen[raw] = self.normalisation(raw)
            language = self._language(named[i]) if named else self.columns.default_language
            if not text and self.is_prediction:
                self.num_without_text += 1
                yield None, UNKNOWN
            elif not text:
                rule = f'the column "{self.columns.text}" holds no text; fill it or drop the row.'
                self._reject(batch, i, raw, rule, "text")
                yield None, UNKNOWN
            elif isinstance(language, ValueError) and self.is_prediction:
                self.unknown_languages[named[i] if named else ""] += 1
                yield text, UNKNOWN
            elif isinstance(language, ValueError):
                self._reject(batch, i, named[i] if named else "", str(language), "language")
                yield None, UNKNOWN
            else:
                yield text, language

    def notes(self) -> list[str]:
        """What became of rows to code that are not as they should be."""
        notes = []
        if self.num_without_text:
            notes.append(
                f'{counted(self.num_without_text)} no text in the column "{self.columns.text}": '
                "such a row stays in the coded table, without codes."
            )
        if self.unknown_languages:
            names = [f'"{name}"' for name, _ in self.unknown_languages.most_common(3)]
            more = len(self.unknown_languages) - len(names)
            notes.append(
                f"{counted(self.unknown_languages.total())} a language that is no known code "
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
            if isinstance(code, BrokenCode):
                raise code
            if code is not None:
                found[code] = None
        if not found:
            rule = "the row has no code; give it one or drop the row."
            raise BrokenCode(" ".join(cells).strip(), rule, "no code")
        most = self.system.max_codes or MOST_CODES
        if len(found) > most:
            raise BrokenCode(
                ", ".join(found),
                f"the row has {len(found)} codes, this code system allows {most}; raise max_codes "
                "of data.code_system or drop a code.",
                "too many codes",
            )
        return tuple(found)

    def _parse(self, cell: str) -> "str | BrokenCode | None":
        code: str | BrokenCode | None = None
        raw, kind = cell.strip(), "code"
        if raw.lower() not in NO_CODE_MARKS or (self.book is not None and raw in self.book):
            try:
                code = self.system.parse(raw)
                kind = "code not in book"
                if self.book is not None:
                    self.book.index(code)
            except ValueError as error:
                is_zero = "leading zeros" in str(error)
                code = BrokenCode(cell, str(error), "lost zeros" if is_zero else kind)
        self._codes[cell] = code
        return code

    def _reject(self, batch: RowBatch, i: int, value: str, rule: str, kind: str) -> None:
        self.bad_rows.add(BadRow(str(batch.file), int(batch.line[i]), value, rule, kind))


def counted(count: int) -> str:
    """The beginning of a sentence about so many rows."""
    return "1 row has" if count == 1 else f"{count:,} rows have"


class BrokenCode(ValueError):
    """A rule that a row's codes break, with the value that breaks it and the kind of fault."""

    def __init__(self, value: str, rule: str, kind: str) -> None:
        super().__init__(rule)
        self.value = value
        self.kind = kind
