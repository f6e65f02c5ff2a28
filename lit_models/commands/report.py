"""Write one HTML page on a run, or on two runs side by side."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lit_models.errors import UsageError

if TYPE_CHECKING:
    from lit_models.reporting.reading import RunRecord


def report(
    run: Path, other: Path | None = None, *, to: Path | None = None, forecast: Path | None = None
) -> int:
    """Write one HTML page, which needs no network, on a run or on two.

    Args:
        run: a run folder, such as runs/demo.
        other: a second run folder: the page says what differs, then shows both.
        to: the file; null takes RUN/report.html, or compare-RUN-OTHER.html in the working folder.
            An earlier report is replaced, never another file.
        forecast: output of `unisono plan --json` for this run, to show beside the measured.

    Raises:
        UsageError: an argument names nothing that it could be.
    """
    from lit_models.reporting.page import check_target, write_page

    if other is not None and forecast is not None:
        raise UsageError("--forecast belongs to one run: leave it or the second run folder out.")
    first = _read(Path(run))
    if other is None:
        from lit_models.reporting.run_page import run_page
        from lit_models.reporting.timing import forecast_of

        path = Path(to) if to is not None else first.folder / "report.html"
        with _as_usage():
            check_target(path)
            foreseen = forecast_of(first, Path(forecast)) if forecast is not None else None
        text = run_page(first, foreseen)
    else:
        from lit_models.reporting.compare_page import compare_page

        second = _read(Path(other))
        path = Path(to) if to is not None else Path(f"compare-{first.name}-{second.name}.html")
        with _as_usage():
            check_target(path)
        text = compare_page(first, second)
    write_page(path, text)
    print(f"written to {path}")
    return 0


def _read(folder: Path) -> "RunRecord":
    from lit_models.commands._run_config import newest_config
    from lit_models.reporting.reading import read_run

    try:
        config = newest_config(folder)
    except FileNotFoundError:  # a run of a script has none; the page says so
        config = None
    try:
        return read_run(folder, config, time.time())
    except FileNotFoundError as error:
        raise UsageError(str(error)) from error


@contextmanager
def _as_usage() -> Iterator[None]:
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
