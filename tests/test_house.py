"""Size of the code base: lines of each area, files of a folder, one name for one class."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
AREAS = {  # lines of Python and css, docstrings included
    "lit_models": 26_387,
    "lit_models/training": 5_368,
    "lit_models/commands": 2_885,
    "lit_models/occupation_coder": 2_832,
    "lit_models/causal_lm": 2_713,
    "lit_models/consistency_lens": 2_725,
    "lit_models/seo": 3_822,
    "datamodules": 14_672,
    "tests": 36_315,
}
MOST_FILES, MOST_IN_A_FOLDER = 152, 20  # of the product
CARD_LINES, README_LINES = 90, 150


def sources(folder: str) -> list[Path]:
    paths = (ROOT / folder).rglob("*")
    return sorted(path for path in paths if path.suffix in (".py", ".css"))


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(("folder", "most"), AREAS.items())
def test_an_area_keeps_its_budget(folder: str, most: int) -> None:
    lines = sum(map(lines_of, sources(folder)))
    assert lines <= most, f"{folder} has {lines:,} lines: delete before you add"


def test_files_are_few_and_no_folder_is_flat() -> None:
    files = [*sources("lit_models"), *sources("datamodules")]
    assert len(files) <= MOST_FILES
    assert max(Counter(path.parent for path in files).values()) <= MOST_IN_A_FOLDER


def test_the_formatter_lays_out_every_line() -> None:
    squeezed = re.compile("# fmt" + ": (off|skip)")
    files = [path for folder in ("lit_models", "datamodules", "tests") for path in sources(folder)]
    assert [p.name for p in files if squeezed.search(p.read_text("utf-8"))] == []


def test_a_public_class_name_stands_once() -> None:
    places: dict[str, list[str]] = {}
    for path in [*(ROOT / "lit_models").rglob("*.py"), *(ROOT / "datamodules").rglob("*.py")]:
        for name in re.findall(r"^class ([A-Z]\w*)", path.read_text("utf-8"), re.MULTILINE):
            places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_cards_are_short() -> None:
    cards = [p for folder in ("lit_models", "datamodules") for p in (ROOT / folder).rglob("*.md")]
    long = {str(p.relative_to(ROOT)): lines_of(p) for p in cards if p.name != "migration.md"}
    del long["lit_models/README.md"]  # contains a whole family as an example
    assert not {name: lines for name, lines in long.items() if lines > CARD_LINES}
    assert lines_of(ROOT / "README.md") <= README_LINES
