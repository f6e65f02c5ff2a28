"""A chart as inline SVG: curves stretch with the page, labels are text of the page beside them."""

from collections.abc import Sequence
from dataclasses import dataclass

from lit_models.reporting.curves import (
    Drawn,
    Scale,
    Series,
    prepared,
    tick_label,
    ticks,
    value_scale,
)
from lit_models.reporting.markup import Html, joined, tag
from lit_models.reporting.wording import counted, shown

SIZE = 1000  # units of the drawing's own coordinates, both ways
SHOWN_GAPS = 5
LABEL_WIDTH = 0.18  # of an interruption, at most, as a share of the narrowest plot


@dataclass(frozen=True)
class Interruption:
    """A later attempt that went on.

    Attributes:
        step: from which it went on.
        label: beside the line that marks it.
        repeated_to: the last step that it did again; `step` where there is none.
    """

    step: float
    label: str
    repeated_to: float


def chart(
    title: str,
    series: Sequence[Series],
    interruptions: Sequence[Interruption] = (),
    note: str = "",
    may_be_log: bool = False,
) -> Html:
    """Return a figure over the optimizer steps, or an empty one that says that nothing is there.

    Args:
        title: its heading.
        series: curves; those without a point are left out.
        interruptions: marked by dashed lines, repeated steps by a band.
        note: a sentence below the title.
        may_be_log: whether values far apart get a logarithmic scale.
    """
    series = [one for one in series if one.points]
    if not series:
        return tag("figure", tag("h3", title), tag("p", "No value was written.", class_="note"))
    drawn = [prepared(one.points) for one in series]
    steps = [step for one in series for step, _ in one.points]
    across = Scale(min(0.0, *steps) if max(steps) > 1 else 0.0, max(*steps, 1.0))
    up = value_scale(list(series), may_be_log)
    marks = [mark for mark in interruptions if across.low <= mark.step <= across.high]
    words = [note, _thinning(drawn), _gap_words(drawn), "Logarithmic scale." * up.is_log]
    plot = tag(
        "div",
        _labels(up, across),
        _drawing(title, series, drawn, across, up, marks),
        *_mark_labels(marks, across),
        tag("output", class_="at", aria_hidden="true"),
        class_="plot",
        data_x=f"{across.low:g} {across.high:g}",
        data_y=f"{up.low!r} {up.high!r}{' log' * up.is_log}",
    )
    text = " ".join(word for word in words if word)
    caption = tag("figcaption", tag("h3", title), tag("p", text, class_="note") if text else None)
    return tag("figure", caption, _legend(title, series), plot)


def _legend(title: str, series: Sequence[Series]) -> Html:
    """Return names and last values; one curve that is named like its chart needs no key."""
    items = []
    for one in series:
        last = tag("b", shown(one.points[-1][1]))
        key = tag("i", class_=f"key c{one.colour}", aria_hidden="true")
        is_alone = len(series) == 1 and one.name == title
        items.append(tag("li", *(["last"] if is_alone else [key, one.name]), " ", last))
    return tag("ul", *items, class_="legend")


def _labels(up: Scale, across: Scale) -> Html:
    at = ticks(up)
    left = (
        tag("span", tick_label(v, at, up.is_log), style=f"top:{100 * (1 - up.place(v)):.2f}%")
        for v in at
    )
    values = [v for v in ticks(across, 4) if v == int(v)]
    below = (tag("span", shown(v), style=f"left:{100 * across.place(v):.2f}%") for v in values)
    return joined([tag("div", *left, class_="ys"), tag("div", *below, class_="xs")])


def _drawing(
    title: str,
    series: Sequence[Series],
    drawn: Sequence[Drawn],
    across: Scale,
    up: Scale,
    marks: Sequence[Interruption],
) -> Html:
    """Return the SVG; it is stretched to its box, so lines keep their width and dots are round."""
    parts = [tag("path", class_="grid", d=_grid(up, across))]
    for mark in marks:
        x, width = SIZE * across.place(mark.step), across.place(mark.repeated_to)
        if mark.repeated_to > mark.step:
            size = min(SIZE * width, SIZE) - x
            parts.append(tag("rect", class_="again", x=f"{x:.1f}", y=0, width=f"{size:.1f}",
                             height=SIZE))  # fmt: skip
        parts.append(tag("path", class_="cut", d=f"M{x:.1f} 0V{SIZE}"))
    for one, ready in zip(series, drawn, strict=True):
        curve, dots = _paths(one, ready, across, up)
        look = f"c{one.colour}"
        faint = " faint" * bool(ready.trend)
        parts.append(tag("path", class_=f"curve {look}{faint}", d=curve, data_name=one.name))
        if ready.trend:
            course = _line([_place(point, across, up) for point in ready.trend])
            parts.append(tag("path", class_=f"curve trend {look}", d=course))
        if dots:
            parts.append(tag("path", class_=f"curve points {look}", d=dots))
        gaps = "".join(f"M{SIZE * across.place(g):.1f} {SIZE}v-60" for g in ready.gaps)
        if gaps:
            parts.append(tag("path", class_="gap", d=gaps))
    names = ", ".join(f"{one.name} ends at {shown(one.points[-1][1])}" for one in series)
    label = f"{title} over {shown(across.high)} optimizer steps: {names}."
    box = f"0 0 {SIZE} {SIZE}"
    return tag("svg", *parts, role="img", aria_label=label, viewBox=box, preserveAspectRatio="none")


def _grid(up: Scale, across: Scale) -> str:
    return "".join(f"M0 {SIZE * (1 - up.place(v)):.1f}H{SIZE}" for v in ticks(up))


def _paths(one: Series, ready: Drawn, across: Scale, up: Scale) -> tuple[str, str]:
    """Return the path of the lines, and that of the dots: lines of no length with a round end."""
    lines, dots = [], []
    for segment in ready.segments:
        places = [_place(point, across, up) for point in segment]
        lines.append(_line(places))
        if one.is_dotted or len(places) == 1:
            dots += [f"M{x:.1f} {y:.1f}h.01" for x, y in places]
    return "".join(lines), "".join(dots)


def _place(point: tuple[float, float], across: Scale, up: Scale) -> tuple[float, float]:
    return SIZE * across.place(point[0]), SIZE * (1 - up.place(point[1]))


def _line(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def _mark_labels(marks: Sequence[Interruption], across: Scale) -> list[Html]:
    """Return the labels that have room before the next mark; the table of attempts has all."""
    places = [across.place(mark.step) for mark in marks]
    ends = [*places, 1.0][1:]
    return [
        tag("span", mark.label, class_="mark", style=f"--x:{place:.4f}")
        for mark, place, end in zip(marks, places, ends, strict=True)
        if end - place >= LABEL_WIDTH
    ]


def _thinning(drawn: Sequence[Drawn]) -> str:
    most = max(drawn, key=lambda one: one.num_points)
    if most.num_drawn + len(most.gaps) == most.num_points:
        return ""
    return f"{shown(most.num_drawn)} of {shown(most.num_points)} points."


def _gap_words(drawn: Sequence[Drawn]) -> str:
    gaps = sorted({gap for one in drawn for gap in one.gaps})
    if not gaps:
        return ""
    named = ", ".join(shown(gap) for gap in gaps[:SHOWN_GAPS])
    more = " …" * (len(gaps) > SHOWN_GAPS)
    return f"Not finite at {counted(len(gaps), 'step')} ({named}{more}): a gap with a red tick."
