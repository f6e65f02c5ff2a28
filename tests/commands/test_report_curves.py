"""Curves of a report: no extreme is lost, gaps are seen, ticks are round."""

import math
import re

import pytest

from lit_models.reporting.chart import Interruption, chart
from lit_models.reporting.curves import (
    Scale,
    Series,
    is_noisy,
    means,
    prepared,
    thinned,
    tick_label,
    ticks,
    value_scale,
)
from lit_models.reporting.wording import counted, duration, shown


def test_thinning_keeps_first_last_lowest_and_highest_of_each_stretch() -> None:
    values = [5, 4, 9, 3, 4, 5, 4, 4.5, 1, 4, 4, 8]
    points = [(float(step), float(value)) for step, value in enumerate(values)]
    kept = thinned(points, 0.0, 6.0)
    assert [step for step, _ in kept] == [0, 2, 3, 5, 6, 8, 11]


def test_a_spike_among_many_points_is_drawn() -> None:
    points = [(float(step), 0.0) for step in range(10_000)]
    points[7_777] = (7_777.0, 50.0)
    drawn = prepared(points, most_stretches=100)
    [segment] = drawn.segments
    assert (7_777.0, 50.0) in segment
    assert drawn.num_points == 10_000
    assert drawn.num_drawn == len(segment) <= 400


def test_a_value_that_is_not_finite_makes_a_gap() -> None:
    points = [(1.0, 1.0), (2.0, math.nan), (3.0, 2.0), (4.0, math.inf), (5.0, 3.0), (6.0, 4.0)]
    drawn = prepared(points)
    assert drawn.segments == [[(1.0, 1.0)], [(3.0, 2.0)], [(5.0, 3.0), (6.0, 4.0)]]
    assert drawn.gaps == [2.0, 4.0]
    page = chart("Loss", [Series("loss", points)])
    assert "Not finite at 2 steps (2, 4)" in page
    assert page.count('class="gap"') == 1
    assert "nan" not in page.partition("<svg")[2]


def test_only_noise_gets_a_line_of_means() -> None:
    rises = [(float(step), float(step)) for step in range(640)]
    shakes = [(float(step), float(step % 2)) for step in range(640)]
    assert prepared(rises).trend == []
    assert {value for _, value in prepared(shakes).trend} == {0.5}
    assert means([(1.0, 2.0), (3.0, 6.0), (5.0, 1.0)], num_stretches=2) == [(2.0, 4.0), (5.0, 1.0)]
    assert not is_noisy([0.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0.0, 2064.0, [0, 500, 1000, 1500, 2000]),
        (-3.0, 9.0, [-2.5, 0, 2.5, 5, 7.5]),
        (0.00021, 0.00298, [0.001, 0.002]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(Scale(low, high)) == pytest.approx(expected)


def test_ticks_of_a_logarithmic_scale_are_powers_of_ten() -> None:
    assert ticks(Scale(0.002, 30.0, is_log=True)) == pytest.approx([0.01, 0.1, 1, 10])
    assert ticks(Scale(0.9, 60.0, is_log=True)) == pytest.approx([1, 2, 5, 10, 20, 50])
    assert Scale(0.01, 100.0, is_log=True).place(1.0) == pytest.approx(0.5)


def test_a_scale_is_logarithmic_only_where_values_are_far_apart_and_positive() -> None:
    def scale_of(*values: float) -> Scale:
        return value_scale([Series("a", list(enumerate(values)))], may_be_log=True)

    assert scale_of(0.1, 20.0).is_log
    assert not scale_of(0.1, 2.0).is_log
    assert not scale_of(0.0, 20.0).is_log
    assert not scale_of(-1.0, 20.0).is_log
    assert (scale_of(3.0, 3.0).low, scale_of(3.0, 3.0).high) == pytest.approx((2.7, 3.3))
    assert scale_of(0.0, 0.0).high > scale_of(0.0, 0.0).low
    assert scale_of(0.2, 0.97).high == 1.0  # a share ends there


def test_neighbouring_ticks_have_equally_many_decimals() -> None:
    values = [0.9, 0.95, 1.0]
    assert [tick_label(value, values) for value in values] == ["0.90", "0.95", "1.00"]
    assert tick_label(1000.0, [0.0, 1000.0]) == "1,000"
    assert tick_label(2e-5, [1e-5, 2e-5]) == "2e-5"
    powers = [0.01, 1.0, 10.0]
    assert [tick_label(v, powers, is_log=True) for v in powers] == ["0.01", "1", "10"]


def test_points_stand_where_their_values_are() -> None:
    page = chart("Loss", [Series("loss", [(0.0, 0.0), (5.0, 5.0), (10.0, 10.0)])])
    [path] = re.findall(r'<path class="curve c1" d="([^"]+)"', page)
    assert path == "M0.0 1000.0L500.0 528.3L1000.0 56.6"  # 6 % room above: 10 / 10.6 of the height


def test_an_interruption_is_a_line_and_repeated_steps_a_band() -> None:
    points = [(float(step), 1.0) for step in range(1, 11)]
    page = chart("Loss", [Series("loss", points)], [Interruption(4, "attempt 2", 6)])
    assert 'class="cut" d="M400.0 0V1000"' in page
    assert re.search(r'<rect class="again" x="400.0" y="0" width="200.0"', page)
    assert "attempt 2" in page


def test_a_chart_without_values_says_so() -> None:
    assert "No value was written." in chart("Loss", [Series("loss", [])])
    only_nan = chart("Loss", [Series("loss", [(1.0, math.nan)])])
    assert "Not finite at 1 step (1)" in only_nan


@pytest.mark.parametrize(
    ("value", "text"),
    [(2064, "2,064"), (0.47219, "0.4722"), (1e-9, "1e−9"), (-0.5, "−0.5000"), (None, "–"),
     (1234.56, "1,235"), (math.nan, "not a number"), (-math.inf, "−infinite")],
)  # fmt: skip
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert shown(value) == text


def test_durations_have_two_units() -> None:
    found = [duration(seconds) for seconds in (0, 0.25, 59, 130, 7200, 90_061)]
    assert found == ["0 s", "0.25 s", "59 s", "2 min 10 s", "2 h", "1 d 1 h"]
    assert (counted(1, "step"), counted(2, "step")) == ("1 step", "2 steps")
