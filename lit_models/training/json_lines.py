"""Files with a JSON object per line, whose last line a kill can tear."""

import json
from pathlib import Path
from typing import Any


def complete_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, none where there is no file, and cut off a torn last one.

    Raises:
        ValueError: a whole line that is no JSON.
    """
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with open(path, "r+b") as file:
            file.truncate(len(whole))
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{path}, line {number} is damaged ({error}); only the run writes it. Copy it "
                "again from where it was whole, or choose another run folder."
            ) from error
    return rows
