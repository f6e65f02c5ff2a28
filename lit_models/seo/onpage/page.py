"""A page as the checks see it: bytes or text in, a tree, its lines and what was wrong with it."""

import codecs
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from datamodules.html_text import parsed, visible_lines
from datamodules.sentences import words_of

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
DECLARED = re.compile(rb"<meta[^>]*?charset\s*=\s*[\"']?\s*([a-zA-Z0-9_:.\-]+)", re.IGNORECASE)
DECLARED_WITHIN = 1024  # bytes that a browser searches
LONGEST_EVIDENCE = 200


class Finding(NamedTuple):
    """Something that breaks a rule, with its evidence.

    Args:
        check: what was looked at, such as "title".
        rule: what is wrong and what the rule is.
        evidence: the text or the element, shortened; "" where something is missing.
        place: path of the element in the tree, or where else it is.
    """

    check: str
    rule: str
    evidence: str = ""
    place: str = ""


@dataclass
class Page:
    """One page.

    Args:
        name: by which findings name it.
        html: its source.
        address: where it stands on the web, if that is known.
        findings: of reading it.
        facts: of reading it.
    """

    name: str
    html: str
    address: str | None = None
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def tree(self) -> "LexborHTMLParser":
        """The tree that a browser makes of the source."""
        return parsed(self.html)

    @cached_property
    def lines(self) -> list[str]:
        """The visible text, a line per block."""
        return visible_lines(self.tree)

    @cached_property
    def words(self) -> list[str]:
        """The words of the visible text, as they are written."""
        return words_of("\n".join(self.lines))


def read_page(path: Path, address: str | None = None) -> Page:
    """Return a page of a file; a wrong encoding is a finding and no error.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, or the address is none.
    """
    if address is not None and not is_address(address):
        raise ValueError(
            f'the address "{address}" is none of a page; write it whole, such as '
            "https://example.org/page."
        )
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name its pages, such as {path}/*.html.")
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; name a file of HTML.")
    return page_of_bytes(path.read_bytes(), str(path), address)


def page_of_bytes(content: bytes, name: str, address: str | None = None) -> Page:
    """Return a page of its bytes, read in the encoding that it declares.

    As in browsers a byte order mark wins over `<meta charset>`; without either it is UTF-8 where
    the bytes are, else windows-1252.
    """
    findings: list[Finding] = []
    if not content.strip():
        findings.append(Finding("page", "the file is empty", "", name))
    declared = _declared(content[:DECLARED_WITHIN], findings)
    mark = next((encoding for bom, encoding in BOMS if content.startswith(bom)), None)
    is_utf8 = _first_bad_byte(content) is None
    encoding = mark or declared or ("utf-8" if is_utf8 else "cp1252")
    findings += _encoding_findings(content, declared, mark)
    html = content.decode(encoding, "replace").removeprefix("\ufeff")
    facts = {"encoding_declared": declared or mark, "encoding_read": codecs.lookup(encoding).name}
    return Page(name, html, address, findings, facts)


def is_address(address: str) -> bool:
    """Whether this is a whole address of a page on the web."""
    try:
        parts = urlsplit(address)
    except ValueError:  # such as http://[
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)


def shown(text: str | None) -> str:
    """Return a text as evidence: on one line, and not too long."""
    line = " ".join((text or "").split())
    return line if len(line) <= LONGEST_EVIDENCE else line[: LONGEST_EVIDENCE - 1] + "…"


def opening_tag(node: "LexborNode") -> str:
    """Return an element as evidence: its opening tag."""
    pairs = (k if v is None else f'{k}="{v}"' for k, v in node.attributes.items())
    return shown(f"<{' '.join([node.tag or '', *pairs])}>")


def path_of(node: "LexborNode") -> str:
    """Return where an element stands in the tree, as a selector: `body > p:nth-of-type(2)`."""
    steps: list[str] = []
    at: LexborNode | None = node
    while at is not None and at.tag not in (None, "html", "-document"):
        number, before = 1, at.prev
        while before is not None:
            number += before.tag == at.tag
            before = before.prev
        steps.append(at.tag if at.tag in ("head", "body") else f"{at.tag}:nth-of-type({number})")
        at = at.parent
    return " > ".join(reversed(steps)) or "html"


def _declared(head: bytes, findings: list[Finding]) -> str | None:
    found = DECLARED.search(head)
    if found is None:
        return None
    name = found[1].decode("ascii")
    try:
        # Browsers read all of these as windows-1252.
        is_latin = codecs.lookup(name).name in ("iso8859-1", "ascii")
    except LookupError:
        rule = "the declared encoding is not known; declare utf-8"
        findings.append(Finding("encoding", rule, name, "meta charset"))
        return None
    return "cp1252" if is_latin else codecs.lookup(name).name


def _encoding_findings(content: bytes, declared: str | None, mark: str | None) -> list[Finding]:
    bad = _first_bad_byte(content)
    if mark == "utf-16" or content.isascii():
        return []
    expected = mark or declared
    if bad is not None and expected == "utf-8":
        rule = "UTF-8 is declared and the bytes are not UTF-8; save the page as UTF-8"
        return [Finding("encoding", rule, repr(content[bad : bad + 4]), f"byte {bad}")]
    if bad is None and expected not in (None, "utf-8"):
        rule = f"{expected} is declared and the bytes are UTF-8: letters appear garbled"
        place = next(i for i, byte in enumerate(content) if byte > 127)
        sample = content[place:].decode("utf-8", "replace")[:1]
        return [Finding("encoding", rule, sample, f"byte {place}")]
    if expected is None:
        rule = "no encoding is declared and the page has letters beyond ASCII; declare utf-8"
        return [Finding("encoding", rule, "", f"first {DECLARED_WITHIN} bytes")]
    return []


def _first_bad_byte(content: bytes) -> int | None:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return None
