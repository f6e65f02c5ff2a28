"""Numbers, durations and sizes as a reader of the page wants them."""

import math
from datetime import UTC, datetime

GIB = 1 << 30


def shown(value: float | None, digits: int = 4) -> str:
    """Return a number with so many significant digits, thousands set apart; "–" for none."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else f"{'−' * (value < 0)}infinite"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", "−")
    if not 1e-4 <= abs(value) < 1e6:
        mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}".replace("-", "−")
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}".replace("-", "−")


def counted(number: float, noun: str) -> str:
    """Return a number and its noun in singular or plural."""
    return f"{shown(number)} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds else "0 s"
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (whole % 60, "s")]
    first = next(i for i, (number, _) in enumerate(parts) if number)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2] if number)


def moment(when: datetime | None) -> str:
    """Return a time to the second, in UTC; "–" for none."""
    return "–" if when is None else f"{when.astimezone(UTC):%Y-%m-%d %H:%M:%S}"


def gib(size: float | None) -> str:
    """Return bytes in GiB."""
    return "–" if size is None else f"{size / GIB:,.2f} GiB"


def share(value: float) -> str:
    """Return a share of 0 to 1 in per cent."""
    return f"{100 * value:.1f} %"
