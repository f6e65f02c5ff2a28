"""Rows of the benchmarks: ratios round by round, aims, and a file that keeps other rows."""

import json
from functools import partial

import pytest

from tests.benchmarks import figures
from tests.benchmarks.figures import Aim, Figure, Figures, cells, markdown, measured_since


@pytest.mark.parametrize(
    ("aim", "is_met"),
    [
        (Aim(3.0, is_least=True), True),
        (Aim(3.5, is_least=True), False),
        (Aim(2.0), False),
        (Aim(299.0, of="value"), False),
    ],
)
def test_a_ratio_is_taken_round_by_round_and_an_aim_held_by_the_median(aim, is_met):
    # the machine was twice as slow in the second round, for both
    row = Figure("toy", "rows", "ms", [300.0, 150.0, 330.0], "loop", [100.0, 50.0, 100.0], aim)
    assert row.of("ratio") == [3.0, 3.0, pytest.approx(3.3)]
    assert row.is_met is is_met
    assert cells(row)[:6] == ("rows", "ms", "loop", "300", "100", "3 (3 to 3.3)")
    assert cells(row)[-1] == ("met" if is_met else "missed")


def test_rounds_that_were_not_taken_in_turns_are_refused():
    with pytest.raises(ValueError, match="2 rounds of ours beside 1 of the peer; measure both"):
        Figure("toy", "rows", "ms", [1.0, 2.0], "loop", [1.0])


def test_a_file_keeps_the_rows_of_other_things(tmp_path):
    path = tmp_path / "runs" / "benchmarks.json"
    first, second = Figures(), Figures()
    first.add("toy", "rows", "ms", [1.0])
    first.add("toy", "others", "ms", [5.0], aim=Aim(6.0, of="value"))
    first.write(path)
    second.add("toy", "rows", "ms", [2.0])
    second.write(path)
    rows = {row["what"]: row["ours"] for row in json.loads(path.read_text())["figures"]}
    assert rows == {"others": [5.0], "rows": [2.0]}
    assert "| toy | others, ms |  | 5 |  |  | ≤ 6 | met |" in markdown(path)


def test_a_call_shows_the_rows_of_its_processes(tmp_path, monkeypatch):
    path = tmp_path / "benchmarks.json"
    for begun, what in (("2026-01-01 09:00:00", "before"), ("2026-01-01 10:00:00", "now")):
        monkeypatch.setattr(figures, "now", partial(str, begun))
        rows = Figures()
        rows.add("toy", what, "ms", [1.0])
        rows.write(path)
    found = measured_since("2026-01-01 10:00:00", path)
    assert [row.what for row in found.rows] == ["now"]
    assert measured_since("2026-01-01 10:00:00", tmp_path / "none.json").rows == []
