"""Audit the data without training; exit status 1 on errors."""

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule


# Plain `dict`: the parser would build each class_path inside a `dict[str, Any]`, optimizers too.
def check(
    data: dict | None = None,
    model: dict | None = None,
    trainer: dict | None = None,
    seed_everything: int | bool | None = None,
    test_after_fit: bool | None = None,
    on_missing_devices: str | None = None,
) -> int:
    """Read all files of a config to their end, train nothing, and say what is wrong with them.

    Args:
        data: the datamodule of a run, and options of it such as --data.train_files=mine.csv.
        model: of the run; a pretrained one brings the tokenizer with which text is counted.
        trainer: not used.
        seed_everything: not used.
        test_after_fit: not used.
        on_missing_devices: not used.

    Returns:
        1 where a row breaks a rule, else 0.
    """
    from lightning.pytorch import LightningModule
    from rich.console import Console

    from datamodules.audits import WIDTH, show_bad_rows

    module = datamodule_of(data or {})
    if not hasattr(module, "audit"):
        raise ValueError(
            f"`unisono check` asks a datamodule for its audit, and {type(module).__name__} has "
            "none; give a config of one of Unisono's, or write the method."
        )
    make_model = None
    if model and "class_path" in model:
        make_model = partial(_built, "model", LightningModule, model)
    audit = module.audit(make_model)
    console = Console(width=WIDTH, highlight=False)
    audit.show(console)
    show_bad_rows(console, audit.bad_rows)
    return 1 if audit.bad_rows else 0


def datamodule_of(data: dict[str, Any]) -> "LightningDataModule":
    """Returns the datamodule that a config describes.

    Args:
        data: class_path and init_args; keys beside them are options that win over init_args.

    Raises:
        SystemExit: an option is unknown or wrong; the parser has named it.
        ValueError: there is no class_path.
    """
    from lightning.pytorch import LightningDataModule

    if "class_path" not in data:
        raise ValueError(
            "`unisono check` needs a datamodule; give the config of a run with --config, or name "
            "one with --data.class_path=datamodules.TextDataModule."
        )
    return _built("data", LightningDataModule, data)


def _built(key: str, base: type, config: dict[str, Any]) -> Any:
    """The object of a config: class_path and init_args, and options beside them, which win."""
    from lit_models.cli import UnisonoParser

    parser = UnisonoParser()
    parser.add_lightning_class_args(base, key, subclass_mode=True)
    spec = {key: with_options(config)}
    return getattr(parser.instantiate_classes(parser.parse_object(spec)), key)


def with_options(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config's class_path and init_args, in which the options beside them have won."""
    options = {k: value for k, value in config.items() if k not in ("class_path", "init_args")}
    init_args = _merged(config.get("init_args") or {}, options)
    return {"class_path": config["class_path"], "init_args": init_args}


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """The options of both, those of `above` winning; groups of options are merged."""
    from lit_models.config_files import EMPTIED

    merged = {} if EMPTIED in above else dict(below)
    for key, value in above.items():
        if isinstance(value, dict):
            under = merged.get(key)
            value = _merged(_kept(under, value) if isinstance(under, dict) else {}, value)
            if "class_path" in value:  # --data.x.y=1 is an option of the class that data.x names
                value = with_options(value)
        merged[key] = value
    merged.pop(EMPTIED, None)
    return merged


def _kept(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """What is left of a class's options where another class is named: nothing."""
    is_other = above.get("class_path", below.get("class_path")) != below.get("class_path")
    return {} if is_other else below
