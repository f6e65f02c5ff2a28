"""Scored texts from the documentation that every Python carries: facts that the sources hold.

Text: the docstring of a module, class or function of the standard library. Labels, none of which
stands in the text itself: what it documents (`kind`), the number of parameters of a function
(`num_parameters`), and whether a function has parameters with a default (`has_default`); classes
and modules have no label of the last two. `module` is the group: a docstring is like its
neighbours'.
"""

import ast
import json
from pathlib import Path
from typing import Any

from datamodules.core.store import digest_of, made_once
from datamodules.demo import Documented, documented, sources_digest
from datamodules.scored.labels import LabelOptions
from datamodules.scored.store import TextColumns

FILE = "documentation.jsonl"
VERSION = 1
COLUMNS = TextColumns(text="text", group="module")
HEADS = {
    "kind": LabelOptions("multiclass"),
    "num_parameters": LabelOptions("regression"),
    "has_default": LabelOptions("binary"),
}


def demo_file(root: Path) -> Path:
    """Return the jsonl file, made in the cache at first use."""
    folder = root / "demo" / digest_of(["scored_texts", VERSION, sources_digest()])
    return made_once(folder, _write) / FILE


def demo_row(thing: Documented) -> dict[str, Any]:
    """Return the row of one documented thing."""
    counts = _parameters(thing.signature) if thing.kind == "function" else (None, None)
    return {
        "id": thing.source,
        "text": thing.docstring,
        "module": thing.module,
        "kind": thing.kind,
        "num_parameters": counts[0],
        "has_default": counts[1],
    }


def _write(folder: Path) -> None:
    lines = [json.dumps(demo_row(thing), ensure_ascii=False) for thing in documented()]
    (folder / FILE).write_text("\n".join(lines) + "\n", "utf-8")


def _parameters(signature: str) -> tuple[int, bool]:
    """Number of parameters without `self` and `cls`, and whether one has a default."""
    function = ast.parse(f"def f{signature[signature.index('(') :]}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    several = [*given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    own = names[1:] if names[:1] in (["self"], ["cls"]) else names
    has_default = bool(given.defaults) or any(d is not None for d in given.kw_defaults)
    return len(own) + len(several), has_default
