"""Readers of documents: txt, jsonl, json and parquet files, and HTML pages."""

import io
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, lookup
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from datamodules.files.rows import (
    JSON_SUFFIXES,
    LIST_SUFFIX,
    PARQUET_SUFFIXES,
    kind_of,
    opened,
    read_json_rows,
)
from datamodules.files.tables import SEPARATORS, Table, expand_files, first_bad_byte, undecodable

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

TEXT_SUFFIXES = (".txt",)
SUFFIXES = (*TEXT_SUFFIXES, *JSON_SUFFIXES, *PARQUET_SUFFIXES)


class Document(NamedTuple):
    """A text and its place, file:line."""

    place: str
    text: str


def text_files(
    files: str | Sequence[str] | None, option: str, suffixes: Sequence[str] = SUFFIXES
) -> list[Path]:
    """Return the files named by paths, patterns and folders (all their files). A .json list is read
    only if it is named itself, as in folders such files mostly describe the others.

    Arguments and errors as in `expand_files` and `files_in`.
    """
    names: list[str] = []
    for entry in [files] if isinstance(files, str | Path) else list(files or []):
        folder = Path(entry).expanduser()
        names += map(str, files_in(folder, suffixes, option) if folder.is_dir() else [entry])
    return expand_files(names, option, tuple(dict.fromkeys([*suffixes, LIST_SUFFIX])))


def files_in(folder: Path, suffixes: Sequence[str], option: str) -> list[Path]:
    """Return the files in a folder and below with these suffixes, sorted, without hidden files.

    Raises:
        FileNotFoundError: there are none.
    """
    paths = []
    for path in sorted(folder.rglob("*")):
        is_hidden = any(name[0] == "." for name in path.relative_to(folder).parts)
        if kind_of(path) in suffixes and not is_hidden and not path.is_dir():
            paths.append(path)  # a broken link fails where it is opened
    if not paths:
        raise FileNotFoundError(
            f"{option}: the folder {folder} holds no text; its files must end in "
            f"{', '.join(suffixes)}."
        )
    return paths


def read_documents(path: Path, text_column: str = "text") -> Iterator[Document]:
    """Yield the documents of a file lazily: a txt file is one document, and so is `text_column` of
    each row of a json, jsonl, parquet, csv or tsv file.

    Raises:
        ValueError: a row lacks the column or holds another type in it, or the text is not UTF-8.
    """
    if kind_of(path) in SEPARATORS:
        for line, cells in Table(path).rows([text_column]):
            yield Document(f"{path}:{line}", cells[text_column])
    elif kind_of(path) not in TEXT_SUFFIXES:
        for row in read_json_rows(path, columns=(text_column,)):
            if text_column not in row.values:
                raise ValueError(
                    f'{row.place}: the row has no "{text_column}"; it has: '
                    f"{', '.join(row.values) or 'nothing'}. Name the column of the texts with "
                    "data.text_column; chats are read by datamodules.InstructionDataModule."
                )
            text = row.values[text_column]
            if text is not None and not isinstance(text, str):
                raise ValueError(
                    f'{row.place}: "{text_column}" holds {type(text).__name__} ({str(text)[:40]}), '
                    "and a document must be a text; write it as one, or name another column with "
                    "data.text_column."
                )
            yield Document(row.place, text or "")  # null counts as empty
    else:
        try:
            # TextIOWrapper turns every line break into \n.
            with opened(path) as file, io.TextIOWrapper(file, "utf-8-sig") as whole:
                yield Document(f"{path}:1", whole.read())
        except UnicodeDecodeError as error:
            raise undecodable(path, "utf-8") from error


# --- HTML pages ---

_UNSEEN = """
head title script style noscript template svg math iframe object canvas select textarea datalist
audio video
"""
_BREAKING = """
address article aside blockquote body br caption dd details dialog div dl dt fieldset figcaption
figure footer form h1 h2 h3 h4 h5 h6 header hgroup hr legend li main menu nav ol p pre search
section summary table tbody td tfoot th thead tr ul
"""
UNSEEN, BREAKING = frozenset(_UNSEEN.split()), frozenset(_BREAKING.split())
BOMS = ((BOM_UTF8, "utf-8"), (BOM_UTF16_LE, "utf-16"), (BOM_UTF16_BE, "utf-16"))
DECLARED = re.compile(rb"<meta[^>]*?charset\s*=\s*[\"']?\s*([a-zA-Z0-9_:.\-]+)", re.IGNORECASE)
DECLARED_BY_XML = re.compile(rb"<\?xml[^>]*?encoding\s*=\s*[\"']([a-zA-Z0-9_:.\-]+)")
DECLARED_WITHIN = 1024  # bytes that a browser searches
READ_AS = {  # as in browsers: the superset; UTF-8 for a UTF-16 declared in single bytes
    **{"ascii": "cp1252", "iso8859-1": "cp1252", "gb2312": "gb18030", "gbk": "gb18030"},
    **{"utf-16": "utf-8", "utf-16-le": "utf-8", "utf-16-be": "utf-8", "big5": "big5hkscs"},
    **{"euc_kr": "cp949", "shift_jis": "cp932", "iso8859-9": "cp1254", "tis-620": "cp874"},
}
HIDING = ("display:none", "visibility:hidden")


def page_bytes(path: Path) -> bytes:
    """Return the content of a page, decompressed if it is gzip or zstandard; FileNotFoundError if
    there is no such file."""
    expand_files(str(path), "the page", [kind_of(path)])
    with opened(path) as file:
        return file.read()


def parsed(html: str) -> "LexborHTMLParser":
    """Return the tree that a browser would make of a page; any text is accepted."""
    from selectolax.lexbor import LexborHTMLParser

    return LexborHTMLParser(html)


class HtmlEncoding(NamedTuple):
    """Encodings of a page: as declared, Python's name of that (`None` if unknown), that of a byte
    order mark, and the one used to read it."""

    declared: str | None
    declared_name: str | None
    mark: str | None
    read: str


def html_encoding(content: bytes) -> HtmlEncoding:
    """Return the encoding of a page's bytes.

    As in browsers, a byte order mark wins over `<meta charset>`, and that over an XML declaration.
    Without any of them it is UTF-8 if the bytes are valid, else windows-1252.
    """
    head = content[:DECLARED_WITHIN]
    match = DECLARED.search(head) or DECLARED_BY_XML.match(head)
    declared = None if match is None else match[1].decode("ascii")
    try:
        name = lookup(declared or "").name
        b" ".decode(name, "replace")  # base64 and idna are no encodings of a page
    except (LookupError, UnicodeError):
        name = None
    name = READ_AS.get(name or "", name)
    mark = next((encoding for bom, encoding in BOMS if content.startswith(bom)), None)
    read = mark or name or ("utf-8" if first_bad_byte(content) is None else "cp1252")
    return HtmlEncoding(declared, name, mark, lookup(read).name)


def decoded_html(content: bytes) -> str:
    """Return the text of a page's bytes; bytes invalid in its encoding are replaced."""
    return content.decode(html_encoding(content).read, "replace").removeprefix("\ufeff")


def visible_lines(root: "LexborNode | None") -> list[str]:
    """Return the visible text of an element, one non-empty line per block, spaces collapsed.

    Scripts, styles, drawings, form fields and elements hidden by an attribute of their own are left
    out; style sheets are not read.
    """
    lines, pieces = [], []
    stack = [] if root is None else [(root, False)]  # no recursion: a page may nest deeply
    while stack:
        node, is_closing = stack.pop()
        if node.tag == "-text":
            pieces.append(node.text_content or "")
            continue
        if node.tag in BREAKING:
            if line := " ".join("".join(pieces).split()):
                lines.append(line)
            pieces = []
        attributes = node.attributes
        style = (attributes.get("style") or "").lower().replace(" ", "")
        is_hidden = "hidden" in attributes or any(hiding in style for hiding in HIDING)
        if not (is_closing or node.tag in UNSEEN or is_hidden):
            stack.append((node, True))
            stack += [(child, False) for child in node.iter(include_text=True)][::-1]
    return lines


def line_of(node: "LexborNode | None") -> str:
    """Return the text of an element, even a hidden one, on one line; "" for `None`."""
    shown = " ".join(visible_lines(node)) or (node.text() if node else "")
    return " ".join(shown.split())
