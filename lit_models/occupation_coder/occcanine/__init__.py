"""OccCANINE models as checkpoints of the occupation coder."""

from pathlib import Path
from typing import Any


def read_other(path: Path) -> dict[str, Any] | None:
    """Return the content of a coder's checkpoint for an OccCANINE model, a folder in the hub's
    layout or a file NAME.bin; `None` if `path` is no such model.

    Raises:
        ValueError: files are damaged, hold more than plain data, or do not belong together.
    """
    config = path / "config.json"
    is_folder = config.is_file() and '"model_domain"' in config.read_text("utf-8", "replace")
    if not is_folder and (path.suffix != ".bin" or not path.is_file()):
        return None
    from lit_models.occupation_coder.occcanine.reader import content_of  # imported only here

    return content_of(path)
