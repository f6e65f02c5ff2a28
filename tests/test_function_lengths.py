"""A function is read at one glance: below 40 lines, its docstring not counted."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_LINES = 39


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines from `def` to the last one, without those of the docstring."""
    first = function.body[0]
    begin, end = first.lineno, first.end_lineno or first.lineno
    docstring = end - begin + 1 if ast.get_docstring(function) is not None else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - docstring


def test_the_lines_of_a_function_by_hand() -> None:
    source = 'def f(\n    x,\n):\n    """One.\n\n    Two.\n    """\n    y = x\n    return y\n'
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    assert num_lines(function) == 5


def test_no_function_is_longer() -> None:
    paths = [p for name in ("lit_models", "datamodules") for p in (ROOT / name).rglob("*.py")]
    found = {
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}": num_lines(node)
        for path in paths
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {name: lines for name, lines in found.items() if lines > MOST_LINES} == {}
