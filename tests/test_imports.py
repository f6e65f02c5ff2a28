"""Direction of imports, and attributes of libraries that give wrong results here."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lit_models.seo

ROOT = Path(__file__).parents[1]
FAMILIES = ("occupation_coder", "causal_lm", "consistency_lens", "seo", "seq2seq")
WRONG = {
    "estimated_stepping_batches",  # builds loaders too early: loses the position of a resume
    "sync_dist",  # averages over ranks, which is wrong if they hold different counts
}
MAY_USE_CAUSAL_LM = ("consistency_lens", "seo", "seq2seq")
SOURCES = sorted(p for top in ("lit_models", "datamodules") for p in (ROOT / top).rglob("*.py"))
MOST_DEEP = 10
NETWORK_FILES = (
    "network.py",
    "lens.py",
    "networks.py",
    "subject.py",
    "loss.py",
    "encoders.py",
    "decoding.py",
    "generation.py",
    "pretrained.py",
    "adapters.py",
)


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def content(path: Path) -> tuple[list[str], ...]:
    """Returns the imports of a file, those that run at import, and its names in `WRONG`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes, names = [*ast.walk(tree)], [*imported(tree)]
    words = {getattr(node, "attr", getattr(node, "arg", None)) for node in nodes}
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    return names, [*imported(tree)], sorted(WRONG & words)


def fault(path: Path, name: str) -> str | None:
    """Returns what is wrong with one import of a file, or `None`."""
    place, parts = path.relative_to(ROOT).parts, name.split(".")
    target = parts[1] if parts[0] == "lit_models" and len(parts) > 1 else None
    own = place[1] if place[0] == "lit_models" and place[1] in FAMILIES else None
    if place[0] == "datamodules" and parts[0] == "lit_models":
        return "datamodules never imports lit_models"
    if place[1] in ("training", "blocks.py") and target in FAMILIES:
        return "shared code imports no family"
    may_use = (own, "causal_lm") if own in MAY_USE_CAUSAL_LM else (own,)
    if own and target in FAMILIES and target not in may_use:
        return f"{own} imports {target}"
    below = ("training", "blocks.py")
    if (own or place[1] in below) and target in ("cli", "commands"):
        return "nothing below the command line imports it"
    if len(place) == 2 and place[0] == "lit_models" and target in FAMILIES:
        return "the command line knows no family"
    is_network = place[-1] in NETWORK_FILES or place[1] == "blocks.py"
    if is_network and parts[0] in ("lightning", "pytorch_lightning"):
        return "a network file imports no Lightning"
    if parts[0] == "jsonargparse" and any(part.startswith("_") for part in parts[1:]):
        return "jsonargparse's private modules change"
    return None


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way_and_nothing_reads_what_is_known_to_be_wrong(path: Path) -> None:
    names, _, wrong = content(path)
    assert not {f"{name}: {why}" for name in names if (why := fault(path, name))}
    assert not wrong


def test_imports_are_ten_deep_at_most_and_run_in_no_circle() -> None:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in SOURCES
    }
    below: dict[str, set[str]] = {}
    for name, path in files.items():
        _, running, _ = content(path)
        known = (n if n in files else n.rpartition(".")[0] for n in running)
        below[name] = {n for n in known if n in files} - {name}
    depths: dict[str, int] = {}

    def depth(name: str, above: tuple[str, ...] = ()) -> int:
        assert name not in above, f"a circle: {' -> '.join([*above, name])}"
        if name not in depths:
            depths[name] = 1 + max((depth(n, (*above, name)) for n in below[name]), default=0)
        return depths[name]

    assert not {name: depth(name) for name in files if depth(name) > MOST_DEEP}


def test_public_names_are_found_in_their_packages() -> None:
    from lit_models.occupation_coder import LitOccupationCoder
    from lit_models.training import ExactModule, LossSum, default_callbacks, status

    assert issubclass(LitOccupationCoder, ExactModule)
    assert lit_models.LitOccupationCoder is LitOccupationCoder
    assert all(map(callable, (LossSum, default_callbacks, status)))
    with pytest.raises(AttributeError, match=r"'lit_models\.seo' has no attribute 'LitCausalLM'"):
        lit_models.seo.LitCausalLM  # noqa: B018


def test_the_rule_finds_a_wrong_import() -> None:
    data = ROOT / "datamodules" / "x.py"
    assert fault(data, "lit_models.training.exact.ExactModule")
    assert fault(ROOT / "lit_models" / "training" / "x.py", "lit_models.seo.scorer.X")
    assert fault(ROOT / "lit_models" / "occupation_coder" / "x.py", "lit_models.causal_lm.module.X")
    assert fault(ROOT / "lit_models" / "cli.py", "lit_models.seo.module.X")
    assert fault(ROOT / "lit_models" / "cli.py", "jsonargparse._core.X")
    assert not fault(ROOT / "lit_models" / "seo" / "x.py", "lit_models.causal_lm.module.X")
