"""Models in the layout of OccCANINE, read as checkpoints."""

from pathlib import Path
from typing import Any


def read_other(path: Path) -> dict[str, Any] | None:
    """Return a model of OccCANINE, a folder of the hub or a local file NAME.bin, as the content of
    a coder's checkpoint; `None`: it is no such.

    Raises:
        ValueError: files are damaged, hold more than plain data, or do not belong together.
    """
    config = path / "config.json"
    is_folder = config.is_file() and '"model_domain"' in config.read_text("utf-8", "replace")
    if not is_folder and (path.suffix != ".bin" or not path.is_file()):
        return None
    from lit_models.occupation_coder.occcanine.reader import content_of  # for these paths alone

    return content_of(path)
