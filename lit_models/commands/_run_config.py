"""What a run folder's own config says: the module, the data and the trainer's values."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule


def newest_config(run: Path) -> Path:
    """Return the config of the newest training in a run folder: config.yaml, config-2.yaml, …

    Raises:
        FileNotFoundError: it has none.
    """
    versions = {
        int(found[1] or 1): path
        for path in run.glob("config*.yaml")
        if (found := re.fullmatch(r"config(?:-(\d+))?\.yaml", path.name))
    }
    if not versions:
        raise FileNotFoundError(
            f"{run} holds no config.yaml, from which its module and data are built; `unisono fit` "
            "writes it. A run of a script has none and cannot be built again."
        )
    return versions[max(versions)]


def built(config: dict[str, Any]) -> "tuple[LightningModule, LightningDataModule]":
    """Return the module and the datamodule that a config describes.

    Args:
        config: content of a run's config file; its seed must have been set.

    Raises:
        SystemExit: a value is wrong by now; the parser has named it.
    """
    from lightning.pytorch import LightningDataModule, LightningModule

    from lit_models.cli import UnisonoParser

    parser = UnisonoParser()
    parser.add_lightning_class_args(LightningModule, "model", subclass_mode=True)
    parser.add_lightning_class_args(LightningDataModule, "data", subclass_mode=True)
    given = {key: config[key] for key in ("model", "data")}
    made = parser.instantiate_classes(parser.parse_object(given))
    return made.model, made.data
