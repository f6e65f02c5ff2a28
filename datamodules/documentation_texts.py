"""The documentation that every Python carries, as texts: the source of the demo of language models.

Sources are parsed and never imported, so that nothing of them runs. Versions of Python differ in
their wording: the same Python gives the same texts. Quotation marks and dashes are those of ASCII.
"""

import ast
import hashlib
import inspect
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

TOPICS = "pydoc_data/topics.py"
# Modules written in Python with documentation worth reading; one that a version lacks is left out.
MODULES = (
    *("abc", "argparse", "ast", "base64", "bdb", "bisect", "bz2", "calendar", "cmd", "code"),
    *("codecs", "codeop", "collections/__init__", "colorsys", "compileall", "configparser"),
    *("concurrent/futures/_base", "concurrent/futures/process", "concurrent/futures/thread"),
    *("contextlib", "contextvars", "copy", "copyreg", "csv", "dataclasses", "datetime"),
    *("_pydatetime", "decimal", "_pydecimal", "difflib", "dis", "doctest", "email/charset"),
    *("email/header", "email/message", "email/policy", "email/utils", "enum", "filecmp"),
    *("fileinput", "fnmatch", "fractions", "ftplib", "functools", "getopt", "getpass", "gettext"),
    *("glob", "graphlib", "gzip", "hashlib", "heapq", "hmac", "html/__init__", "html/parser"),
    *("http/client", "http/cookiejar", "http/cookies", "http/server", "imaplib", "inspect", "io"),
    *("_pyio", "ipaddress", "json/__init__", "json/decoder", "json/encoder", "keyword"),
    *("linecache", "locale", "logging/__init__", "logging/config", "logging/handlers", "lzma"),
    *("mailbox", "mimetypes", "modulefinder", "multiprocessing/context"),
    *("multiprocessing/managers", "multiprocessing/pool", "multiprocessing/queues", "netrc"),
    *("ntpath", "numbers", "operator", "optparse", "os", "pathlib", "pdb", "pickle"),
    *("pickletools", "pkgutil", "platform", "plistlib", "poplib", "posixpath", "pprint", "profile"),
    *("pstats", "py_compile", "pyclbr", "pydoc", "queue", "quopri", "random", "reprlib", "sched"),
    *("secrets", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket", "socketserver"),
    *("ssl", "stat", "statistics", "string", "stringprep", "subprocess", "symtable", "sysconfig"),
    *("tabnanny", "tarfile", "tempfile", "textwrap", "threading", "timeit", "token", "tokenize"),
    *("trace", "traceback", "tracemalloc", "turtle", "types", "typing", "unittest/case"),
    *("unittest/loader", "unittest/mock", "unittest/suite", "urllib/parse", "urllib/request"),
    *(
        "urllib/robotparser",
        "uuid",
        "warnings",
        "wave",
        "weakref",
        "webbrowser",
        "wsgiref/handlers",
    ),
    *("wsgiref/headers", "xml/dom/minidom", "xml/etree/ElementTree", "xmlrpc/client"),
    *("xmlrpc/server", "zipapp", "zipfile", "zipfile/__init__", "zipimport"),
)


_MARKS = str.maketrans(
    {"’": "'", "‘": "'", "´": "'", "“": '"', "”": '"', "–": "-", "—": " - ", "…": "..."}
)


class Documented(NamedTuple):
    """One documented thing: its module, its name in it ("" for the module), kind and docstring."""

    module: str
    name: str
    kind: str  # module, class or function
    signature: str
    docstring: str

    @property
    def source(self) -> str:
        """The full name."""
        return f"{self.module}.{self.name}" if self.name else self.module

    @property
    def summary(self) -> str:
        """The first paragraph, on one line."""
        return " ".join(self.docstring.split("\n\n")[0].split())


def topics() -> dict[str, str]:
    """Return the topics of the language reference, name -> text."""
    tree = ast.parse((_library() / TOPICS).read_text("utf-8"))
    table = next(n.value for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign))
    assert table is not None
    return {name: text.translate(_MARKS) for name, text in ast.literal_eval(table).items()}


def documented() -> Iterator[Documented]:
    """Yield what the modules document, in the order of the list and of the sources."""
    for name in MODULES:
        path = _library() / f"{name}.py"
        if path.is_file():
            # decimal's Python source is _pydecimal, and so on
            module = name.removesuffix("/__init__").replace("/", ".").replace("_py", "")
            yield from _documented(module, "", ast.parse(path.read_bytes()))


@cache
def sources_digest() -> str:
    """Return the hex digest of all sources that are read."""
    content = hashlib.sha256()
    for name in (TOPICS, *(f"{module}.py" for module in MODULES)):
        path = _library() / name
        if path.is_file():
            content.update(f"{name} {path.stat().st_size};".encode() + path.read_bytes())
    return content.hexdigest()


def _library() -> Path:
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not (folder / TOPICS).is_file():
        raise FileNotFoundError(
            f"this Python has no {folder / TOPICS}, which the demo text is made of; name your own "
            "files, such as --data.train_files=mine.txt, or install Python's standard library."
        )
    return folder


def _documented(
    module: str, outer: str, node: ast.Module | ast.ClassDef | ast.FunctionDef
) -> Iterator[Documented]:
    docstring = ast.get_docstring(node)
    if docstring and docstring.strip():
        kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
        text = inspect.cleandoc(docstring).translate(_MARKS)
        yield Documented(module, outer, kind, _signature(node, outer), text)
    for child in node.body:
        if isinstance(node, ast.FunctionDef) or not isinstance(
            child, ast.ClassDef | ast.FunctionDef
        ):
            continue
        if not child.name.startswith("_"):
            yield from _documented(module, f"{outer}.{child.name}".lstrip("."), child)


def _signature(node: ast.AST, name: str) -> str:
    if not isinstance(node, ast.FunctionDef):
        return name
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{name}({ast.unparse(node.args)}){result}"
