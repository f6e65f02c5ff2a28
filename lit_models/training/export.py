"""From a checkpoint to a plain folder, and from that folder to a module on one CPU."""

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NoReturn

from torch import Tensor

from lit_models.training.checkpoints import AVERAGED, read_checkpoint
from lit_models.training.exact import ExactModule
from lit_models.training.exported import (
    Layout,
    check_target,
    plain_names,
    read_exported,
    write_exported,
)
from lit_models.training.hyperparameters import StoredClasses

Weights = Literal["averaged", "last"]
_START_ONLY = ("init_from", "init_from_part")  # weights that the checkpoint has replaced
_VERSIONED = ("torch", "lightning", "safetensors")


@dataclass(frozen=True)
class Export:
    """What was written: class, which weights, their number and bytes, the files they need, and how
    another program reads it, if one does."""

    class_path: str
    weights: Weights
    global_step: int
    num_tensors: int
    num_parameters: int
    num_bytes: int
    files_needed: list[str]
    reader: str | None


def export_checkpoint(
    path: Path,
    folder: Path,
    weights: Weights | None = None,
    class_path: str | None = None,
    overwrite: bool = False,
    adapter: bool = False,
    trust_checkpoint: bool = False,
) -> Export:
    """Write a checkpoint as a plain folder that `load_exported` reads, in the layout of its family.

    Args:
        path: checkpoint of this project.
        folder: new or empty.
        weights: which of them; none takes the averaged ones where there are any.
        class_path: of the module, where the checkpoint does not name it.
        overwrite: replace an export that the folder holds.
        adapter: the adapter alone, of a family that has some.
        trust_checkpoint: take any class that the checkpoint names.

    Raises:
        FileNotFoundError: no such checkpoint.
        ValueError: it is damaged or foreign, names a class that is not allowed, lacks what is asked
            for, or the folder is taken.
    """
    check_target(folder, overwrite)
    classes = StoredClasses(trust_checkpoint, [class_path] if class_path else [])
    content = read_checkpoint(path, classes=classes)
    named = content.get("hyper_parameters", {}).get("_class_path")
    class_path = class_path or named or _refuse_nameless(path)
    module_class = class_of(class_path, path, classes)
    which, chosen = chosen_weights(content, weights, path)
    described = _described(module_class, content, path)
    config = {"class_path": class_path, "weights": which, **described}
    layout = module_class.exported_layout(content, chosen, adapter)
    if layout is not None:
        config, chosen = _laid_out(config, layout, path), layout.weights
    write_exported(folder, config, chosen, overwrite, layout)
    return _written(folder, config, chosen, layout)


def _laid_out(config: dict[str, Any], layout: Layout, path: Path) -> dict[str, Any]:
    """Return the config beside another program's files, which say a part of it."""
    needed = {k: v for k, v in config["init_args"].items() if k not in layout.replaced}
    return {**config, "init_args": needed, **_plain(layout.values, path)}


def _written(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], layout: Layout | None
) -> Export:
    return Export(
        config["class_path"],
        config["weights"],
        config["source"]["global_step"],
        len(weights),
        sum(tensor.numel() for tensor in weights.values()),
        sum(file.stat().st_size for file in folder.iterdir()),
        sorted(_paths_in(config["init_args"])),
        None if layout is None else layout.reader.format(folder=folder),
    )


def _described(
    module_class: type[ExactModule], content: dict[str, Any], path: Path
) -> dict[str, Any]:
    """Return what the folder's config takes from a checkpoint."""
    given = content.get("hyper_parameters", {})
    return {
        "versions": {"python": platform.python_version(), **_versions()},
        "init_args": {
            k: v for k, v in given.items() if not k.startswith("_") and k not in _START_ONLY
        },
        "source": {
            "checkpoint": str(path),
            **{key: int(content.get(key, 0)) for key in ("global_step", "epoch")},
        },
        "extra": _extra(module_class, content, path),
    }


def chosen_weights(
    content: dict[str, Any], asked: Weights | None, path: Path
) -> tuple[Weights, dict[str, Tensor]]:
    """Return which weights are taken, and name -> tensor.

    Args:
        content: of a checkpoint.
        asked: none takes the averaged ones where there are any.
        path: for the message.

    Raises:
        ValueError: averaged weights are asked for and absent, or do not fit the others.
    """
    last, averaged = plain_names(content["state_dict"]), content.get(AVERAGED)
    which: Weights = asked or ("averaged" if averaged else "last")
    if which == "last":
        return which, last
    if not averaged:
        raise ValueError(
            f"{path} holds no averaged weights: the run did not average any. Leave --weights out, "
            "or ask for --weights=last."
        )
    averaged = plain_names(averaged)
    strange = [
        name for name, t in averaged.items() if name not in last or t.shape != last[name].shape
    ]
    if strange:
        raise ValueError(
            f"the averaged weights of {path} do not fit its others: {', '.join(strange[:3])}. "
            "Ask for --weights=last."
        )
    return which, {**last, **averaged}  # buffers are not averaged


def load_exported(folder: str | Path, trust_checkpoint: bool = False) -> ExactModule:
    """Return the module of an exported folder, on the CPU, in eval mode.

    Its outputs are those of the module that `load_from_checkpoint` gives, bit by bit.

    Args:
        folder: as `unisono export` wrote it.
        trust_checkpoint: take any class that it names.

    Raises:
        FileNotFoundError: it is no exported folder.
        ValueError: it is damaged, its class is not there, or a name is not allowed.
    """
    from lightning.pytorch.cli import instantiate_module

    classes = StoredClasses(trust_checkpoint)
    content = read_exported(folder, classes)
    values = dict(content["hyper_parameters"])
    module_class = class_of(values.pop("_class_path"), folder, classes)
    values.pop("_instantiator")
    classes.check(folder, module_class, values)
    module = instantiate_module(module_class, values)
    module.configure_model()
    module.on_load_checkpoint(content)
    try:
        module.load_state_dict(content["state_dict"])
    except RuntimeError as error:  # torch lists every name
        wrong = "; ".join(line.strip() for line in str(error).splitlines()[1:4])
        raise ValueError(
            f"the weights of {folder} do not fit {module_class.__name__}: {wrong[:400]}. Use the "
            "version of the code that exported it (config.json names it)."
        ) from error
    return module.eval()


def class_of(class_path: str, source: str | Path, classes: StoredClasses) -> type[ExactModule]:
    """Return the module class that an import path names.

    Args:
        class_path: such as lit_models.LitOccupationCoder.
        source: the file that says so.
        classes: those that it may name.

    Raises:
        ValueError: it cannot be imported, is no module of this project's kind, or not allowed.
    """
    found = classes.of_module(source, class_path)
    if not (isinstance(found, type) and issubclass(found, ExactModule)):
        what = "cannot be imported" if found is None else "is no ExactModule"
        raise ValueError(
            f"the class {class_path} {what}; give the import path of a LightningModule of this "
            "kind, such as lit_models.LitOccupationCoder, with its package on PYTHONPATH."
        )
    return found


def _refuse_nameless(path: Path) -> NoReturn:
    raise ValueError(
        f"{path} was written by a script and does not name its class; give it with "
        "--class_path, such as --class_path=lit_models.LitOccupationCoder."
    )


def _extra(module_class: type[ExactModule], content: dict[str, Any], path: Path) -> dict[str, Any]:
    absent = [key for key in module_class.export_keys if key not in content]
    if absent:
        raise ValueError(
            f"{path} lacks {', '.join(absent)}, without which a {module_class.__name__} cannot "
            "run; give a checkpoint of that class that `unisono fit` wrote."
        )
    return _plain({key: content[key] for key in module_class.export_keys}, path)


def _plain(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(values)))
    except TypeError as error:
        raise ValueError(f"{path}: {', '.join(values)} are no plain values ({error}).") from error


def _paths_in(value: Any) -> set[str]:
    """Return the hyperparameters that name files which are there: an export does not hold them."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return set().union(*(_paths_in(item) for item in value))
    # A sign such as "/" is a word of some option, not the root of all files.
    is_path = isinstance(value, str) and "/" in value.strip("/") and Path(value).exists()
    return {value} if is_path else set()


def _versions() -> dict[str, str]:
    return {name: version(name) for name in _VERSIONED}
