"""TREC's run files: written whole, read back equal, wrong lines named."""

from pathlib import Path

import pytest

from datamodules.search.queries import (
    Ranking,
    read_run,
    write_run,
)
from tests.search_collections import write_lines

RANKINGS = [Ranking("q1", ["a", "b"], [0.1 + 0.2, -1e-30]), Ranking("q2", ["a"], [3.0])]


def test_a_run_is_written_in_six_columns_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "mine.run"
    write_run(path, RANKINGS, "bm25")
    assert path.read_text().splitlines() == [
        "q1 Q0 a 1 0.30000000000000004 bm25",
        "q1 Q0 b 2 -1e-30 bm25",
        "q2 Q0 a 1 3.0 bm25",
    ]
    assert list(read_run(path)) == RANKINGS


def test_a_run_is_read_in_the_order_of_its_scores(tmp_path: Path) -> None:
    lines = ["q Q0 a 1 1 x", "q Q0 b 3 2 x", "", "q\tQ0\tc\t2\t2\tx"]
    path = write_lines(tmp_path / "mine.run", *lines)
    assert list(read_run(path)) == [Ranking("q", ["c", "b", "a"], [2, 2, 1])]


def test_a_file_is_never_overwritten_and_a_failure_leaves_none(tmp_path: Path) -> None:
    path = tmp_path / "mine.run"
    with pytest.raises(ValueError, match=r"q1: the score of rank 2 is 2, and the one before it 1"):
        write_run(path, [Ranking("q1", ["a", "b"], [1, 2])], "x")
    with pytest.raises(ValueError, match="scores must be numbers and never rise"):
        write_run(path, [Ranking("q1", ["a"], [float("nan")])], "x")
    with pytest.raises(ValueError, match='the document\'s id is "a b", and must be one word'):
        write_run(path, [Ranking("q1", ["a b"], [1])], "x")
    with pytest.raises(ValueError, match='the tag is "", and must be one word'):
        write_run(path, [], "")
    assert not list(tmp_path.iterdir())
    write_run(path, RANKINGS, "first")
    before = path.read_text()
    with pytest.raises(FileExistsError, match="mine.run exists and is not overwritten; move it"):
        write_run(path, RANKINGS, "second")
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("q Q0 b 2 0.5", r"mine.run:2: .*: the line has 5 columns, and must have 6 with blanks"),
        ("q Q0 b two 0.5 x", 'mine.run:2: "two": the rank must be a whole number; write 1'),
        ("q Q0 b 2 high x", 'mine.run:2: "high": the score must be a number; correct the line'),
        ("q Q0 b 2 nan x", 'mine.run:2: "nan": the score must be a number'),
        ("q Q0 a 2 0.5 x", 'mine.run:2: "a": the document is ranked twice for query q; keep one'),
    ],
)
def test_a_wrong_line_of_a_run_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write_lines(tmp_path / "mine.run", "q Q0 a 1 1 x", line)
    with pytest.raises(ValueError, match=message):
        list(read_run(path))


def test_a_query_in_two_places_and_other_encodings_are_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "mine.run", "q Q0 a 1 1 x", "p Q0 a 1 1 x", "q Q0 b 2 0 x")
    with pytest.raises(ValueError, match='mine.run:3: "q": this query stands further up; sort'):
        list(read_run(path))
    path.write_bytes(b"q Q0 \xe9 1 1 x\n")
    with pytest.raises(ValueError, match="mine.run:1: .*of the line is not UTF-8, which every"):
        list(read_run(path))
