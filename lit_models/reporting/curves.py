"""What is drawn of a series: few enough points, gaps where a value is not finite, round ticks."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

from lit_models.reporting.reading import Points

MOST_STRETCHES = 240
TREND_STRETCHES = 40
NOISY_FROM = 5.0  # way over range; a warm-up and a decay make 2
TREND_FROM = 160  # points; fewer show their course themselves
LOG_FROM = 50.0  # largest over smallest value


@dataclass(frozen=True)
class Series:
    """One curve.

    Attributes:
        name: in the legend.
        points: step and value, by step; a value that is not finite makes a gap.
        is_dotted: few values, each a dot of its own.
        colour: 1 to 4, of the page's palette; a dash pattern goes with it.
    """

    name: str
    points: Points
    is_dotted: bool = False
    colour: int = 1


@dataclass
class Scale:
    """Maps values between two limits to 0 … 1, evenly or by their logarithm."""

    low: float
    high: float
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies, 0 at the low end."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass
class Drawn:
    """A series, ready to be drawn.

    Attributes:
        segments: runs of finite points without a gap.
        trend: means of stretches of steps, where there are many points that go up and down.
        gaps: steps whose value is not finite.
        num_points: of the series.
        num_drawn: of the segments.
    """

    segments: list[Points] = field(default_factory=list)
    trend: Points = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    num_points: int = 0
    num_drawn: int = 0


def prepared(points: Points, most_stretches: int = MOST_STRETCHES) -> Drawn:
    """Return segments that show what the points show.

    Args:
        points: by step.
        most_stretches: the steps are cut into so many; of each the first, last, lowest and
            highest point stay, so that no extreme is lost (M4: Jugel et al., VLDB 2014).
    """
    drawn = Drawn(num_points=len(points))
    segment: Points = []
    for point in points:
        if math.isfinite(point[1]):
            segment.append(point)
            continue
        drawn.gaps.append(point[0])
        if segment:
            drawn.segments.append(segment)
        segment = []
    if segment:
        drawn.segments.append(segment)
    finite = [point for found in drawn.segments for point in found]
    if len(finite) >= TREND_FROM and is_noisy([value for _, value in finite]):
        drawn.trend = means(finite)
    if len(points) > 4 * most_stretches:
        width = (points[-1][0] - points[0][0]) / most_stretches or 1.0
        drawn.segments = [thinned(s, points[0][0], width) for s in drawn.segments]
    drawn.num_drawn = sum(map(len, drawn.segments))
    return drawn


def thinned(points: Points, start: float, width: float) -> Points:
    """Return the first, last, lowest and highest point of each stretch of steps.

    Args:
        points: finite, by step.
        start: the step at which the first stretch begins.
        width: of a stretch.
    """
    stretches: dict[int, list[int]] = {}
    for place, (step, _) in enumerate(points):
        stretches.setdefault(int((step - start) / width), []).append(place)
    kept: set[int] = set()
    for places in stretches.values():
        lowest = min(places, key=lambda i: points[i][1])
        highest = max(places, key=lambda i: points[i][1])
        kept |= {places[0], places[-1], lowest, highest}
    return [points[i] for i in sorted(kept)]


def is_noisy(values: list[float]) -> bool:
    """Return whether values go up and down: their way is several times their range."""
    way = sum(abs(b - a) for a, b in pairwise(values))
    return way > NOISY_FROM * (max(values) - min(values))


def means(points: Points, num_stretches: int = TREND_STRETCHES) -> Points:
    """Return the mean step and the mean value of equally many points at a time."""
    size = -(-len(points) // num_stretches) or 1
    parts = [points[i : i + size] for i in range(0, len(points), size)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts]


def value_scale(series: list[Series], may_be_log: bool) -> Scale:
    """Return the scale of all finite values: by logarithm where they are positive and far apart."""
    values = [v for one in series for _, v in one.points if math.isfinite(v)]
    if not values:
        return Scale(0.0, 1.0)
    low, high = min(values), max(values)
    if may_be_log and low > 0 and high / low >= LOG_FROM:
        return Scale(low / 1.15, high * 1.15, is_log=True)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return Scale(low - pad, high + pad)
    pad = 0.06 * (high - low)
    bottom = 0.0 if 0 <= low < 0.35 * high else low - pad  # near zero: show how near
    top = high + pad
    if low >= 0 and 0.8 <= high <= 1.0:
        top = max(high, min(top, 1.0))  # a share ends at 1
    return Scale(bottom, top)


def tick_label(value: float, values: list[float], is_log: bool = False) -> str:
    """Return a tick with as many decimals as its neighbours need, or itself on a log scale."""
    sizes = [abs(v) for v in values if v] or [1.0]
    if max(sizes) >= 1e6 or min(sizes) < 1e-4:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if value else "0"
    decimals = max(
        len(f"{v:.10f}".rstrip("0").partition(".")[2]) for v in ([value] if is_log else values)
    )
    return f"{value:,.{decimals}f}".replace("-", "−")


def ticks(scale: Scale, most: int = 5) -> list[float]:
    """Return round values within a scale, at most so many and one."""
    if scale.is_log:
        powers = range(math.ceil(math.log10(scale.low)), math.floor(math.log10(scale.high)) + 1)
        every = -(-len(powers) // most) or 1
        if len(powers) > 2:
            return [10.0**p for p in powers][::every]
        first = math.floor(math.log10(scale.low))
        near = [d * 10.0**p for p in range(first, first + 4) for d in (1, 2, 5)]
        return [value for value in near if scale.low <= value <= scale.high]
    raw = (scale.high - scale.low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    unit = next(power * d for d in (1, 2, 2.5, 5, 10) if power * d >= raw * (1 - 1e-9))
    first, last = math.ceil(scale.low / unit - 1e-9), math.floor(scale.high / unit + 1e-9)
    return [round(number * unit, 12) for number in range(first, last + 1)]
