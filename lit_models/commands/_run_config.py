"""Configs of runs for other commands: parsed as `fit` does, or found in a run folder; built."""

import re
from argparse import Namespace
from functools import partial
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


def parsed(run_options: list[str], needs_model: bool = True) -> dict[str, Any]:
    """Return the config that `unisono fit` would run with these options, in plain values.

    Args:
        run_options: as typed: --config and single options.
        needs_model: a config without a module is refused.

    Raises:
        UsageError: a config cannot be read, or a start from weights that are not there.
        SystemExit: the parser of `fit` refuses an option, and has said why.
    """
    from lit_models.cli import ParsedCLI, UnisonoParser
    from lit_models.config_files import expand_configs
    from lit_models.errors import UsageError
    from lit_models.training.run_folder import Run

    class DataParser(UnisonoParser):
        def add_lightning_class_args(self, *args: Any, **kwargs: Any) -> list[str]:
            required = kwargs.pop("required", True) and "model" not in args
            return super().add_lightning_class_args(*args, required=required, **kwargs)

    try:
        argv = ["fit", *expand_configs(run_options)]
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    run = ParsedCLI(argv, Run("runs"), UnisonoParser if needs_model else DataParser)
    config: dict[str, Any] = _plain(run.config["fit"])
    return config


def _plain(value: Any) -> Any:
    """Return a parsed value as a config has it; an object that is a default of its class is left
    out."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict | Namespace):
        items = vars(value).items() if isinstance(value, Namespace) else value.items()
        return {k: _plain(v) for k, v in items if not isinstance(v, partial)}
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else value


def built(config: dict[str, Any]) -> "tuple[LightningModule, LightningDataModule]":
    """Return the module and the datamodule that a config describes.

    Args:
        config: content of a run's config file; its seed must have been set.

    Raises:
        SystemExit: a value is wrong by now; the parser has named it.
    """
    from lightning.pytorch import LightningDataModule, LightningModule

    return built_part(config, "model", LightningModule), built_part(
        config, "data", LightningDataModule
    )


def built_part(config: dict[str, Any], key: str, base: type) -> Any:
    """Return the object that one key of a config describes, of a class below `base`."""
    from lit_models.cli import UnisonoParser

    parser = UnisonoParser()
    parser.add_lightning_class_args(base, key, subclass_mode=True)
    return parser.instantiate_classes(parser.parse_object({key: config[key]}))[key]
