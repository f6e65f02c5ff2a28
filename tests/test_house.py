"""The house stays small: lines of each area, files of a folder, one name for one class."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
AREAS = {  # lines of Python, docstrings included
    "lit_models": 19_500,
    "lit_models/training": 5_500,
    "lit_models/commands": 3_300,
    "lit_models/occupation_coder": 3_000,
    "lit_models/causal_lm": 3_000,
    "lit_models/consistency_lens": 3_000,
    "lit_models/seo": 3_000,
    "datamodules": 12_500,
    "tests": 31_000,
}
LATER_ROOMS = {
    "lit_models/causal_lm/preference": 186,
    "lit_models/certify": 708,
    "lit_models/consistency_lens/interchange": 268,
    "lit_models/consistency_lens/layers.py": 148,
    "lit_models/consistency_lens/parts.py": 48,
    "lit_models/consistency_lens/readings": 179,
    "lit_models/consistency_lens/teacher.py": 188,
    "lit_models/consistency_lens/temperature.py": 41,
    "lit_models/consistency_lens/unembedding.py": 67,
    "lit_models/engines": 583,
    "lit_models/evaluate": 361,
    "lit_models/occupation_coder/answers": 369,
    "lit_models/occupation_coder/occcanine": 486,
    "lit_models/page": 963,
    "lit_models/prepare": 543,
    "lit_models/seo/exchange": 362,
    "lit_models/seo/nearest": 382,
    "lit_models/seo/sparse.py": 183,
    "lit_models/seo/teaching.py": 59,
    "lit_models/seo/visibility.py": 249,
    "lit_models/seq2seq": 1_047,
    "lit_models/training/agreement.py": 49,
    "lit_models/training/progress.py": 127,
    "datamodules/activations/interchange.py": 155,
    "datamodules/activations/others.py": 46,
    "datamodules/activations/stores.py": 62,
    "datamodules/occupations/written.py": 203,
    "datamodules/pairs": 531,
    "datamodules/preferences": 213,
    "datamodules/search/cleaning.py": 85,
    "datamodules/search/layouts.py": 94,
    "datamodules/search/lists.py": 143,
    "datamodules/search/prompts.py": 29,
    "datamodules/shards": 1_190,
    "tests/benchmarks/seq2seq": 175,
    "tests/certify": 300,
    "tests/cleaning": 91,
    "tests/coder_answers": 340,
    "tests/consistency_lens/interchange": 262,
    "tests/consistency_lens/layers": 304,
    "tests/consistency_lens/parts": 177,
    "tests/consistency_lens/readings": 276,
    "tests/consistency_lens/teacher": 133,
    "tests/consistency_lens/unembedding": 84,
    "tests/engines": 463,
    "tests/evaluate": 239,
    "tests/exchange": 296,
    "tests/layouts": 92,
    "tests/nearest": 200,
    "tests/newcomers": 187,
    "tests/occcanine": 308,
    "tests/page": 729,
    "tests/preference": 377,
    "tests/prepare": 296,
    "tests/seq2seq": 840,
    "tests/shards": 750,
    "tests/sparse": 146,
    "tests/teaching": 127,
    "tests/training/test_again.py": 154,
    "tests/training/test_agreement.py": 112,
    "tests/training/test_ends.py": 126,
    "tests/visibility": 125,
}
MOST_FILES, MOST_IN_A_FOLDER = 110, 20  # of the product
CARD_LINES, README_LINES = 90, 150


def sources(folder: str) -> list[Path]:
    found = {*(ROOT / folder).rglob("*.py"), *(ROOT / folder).glob("*.css"), ROOT / folder}
    rooms = [ROOT / room for room in LATER_ROOMS if room != folder]
    files = (path for path in found if path.is_file())
    return sorted(p for p in files if not any(p.is_relative_to(room) for room in rooms))


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


@pytest.mark.parametrize(("folder", "most"), [*AREAS.items(), *LATER_ROOMS.items()])
def test_an_area_keeps_its_budget(folder: str, most: int) -> None:
    lines = sum(map(lines_of, sources(folder)))
    assert lines <= most, f"{folder} has {lines:,} lines: delete before you add"


def test_files_are_few_and_no_folder_is_flat() -> None:
    files = [*sources("lit_models"), *sources("datamodules")]
    assert len(files) <= MOST_FILES
    assert max(Counter(path.parent for path in files).values()) <= MOST_IN_A_FOLDER


def test_the_formatter_lays_out_every_line() -> None:
    squeezed = re.compile("# fmt" + ": (off|skip)")
    files = [path for folder in (*AREAS, *LATER_ROOMS) for path in sources(folder)]
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
    del long["lit_models/README.md"]  # which holds a whole family as an example
    assert not {name: lines for name, lines in long.items() if lines > CARD_LINES}
    assert lines_of(ROOT / "README.md") <= README_LINES
