"""Exported folders: `model.safetensors` and `config.json`, plain data that runs alone.

A family may write the files of another program instead; what the config holds is then in
`unisono.json`. Read back it is the dict that a checkpoint gives, so that whatever takes weights
takes it too.
"""

import contextlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from datamodules.core.store import put_in_place, remove, sha256_of, sync
from lit_models.training.hyperparameters import AVERAGED, UNTRUSTED, StoredClasses

CONFIG, WEIGHTS = "config.json", "model.safetensors"
OWN_CONFIG = "unisono.json"  # where config.json belongs to another program
FORMAT = "unisono export 1"
KEYS = ("class_path", "init_args", "source", "tied", "extra", "sha256")
INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"
START_ONLY = ("init_from", "init_from_part")  # weights that the checkpoint has replaced
Weights = Literal["averaged", "last"]


@dataclass(frozen=True)
class Layout:
    """The files of another program's folder, which hold a module's weights in its form.

    Args:
        weights: name -> tensor, under that program's names.
        texts: file name -> content.
        values: of the export's config, instead of its own, such as "extra".
        replaced: arguments of the module's constructor that are not needed with these values.
        reader: Python that loads `{folder}` in that program.
        weights_file: name of the file with the weights.
        is_whole: whether a module can be made of the folder alone.
    """

    weights: dict[str, Tensor]
    texts: dict[str, str]
    values: Mapping[str, Any] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
    reader: str = ""
    weights_file: str = WEIGHTS
    is_whole: bool = True


@dataclass(frozen=True)
class Export:
    """What was written; `files_needed` are named by hyperparameters and not in the folder, `reader`
    is Python that loads it in another program."""

    class_path: str
    weights: Weights
    global_step: int
    num_tensors: int
    num_parameters: int
    num_bytes: int
    files_needed: list[str]
    reader: str | None


def write_checkpoint(
    content: dict[str, Any],
    source: Path,
    folder: Path,
    classes: StoredClasses,
    weights: Weights | None = None,
    class_path: str | None = None,
    overwrite: bool = False,
    adapter: bool = False,
) -> Export:
    """Write a checkpoint's content as a folder that `from_exported` reads, in its family's layout.

    Args:
        content: of a checkpoint.
        source: its file, for the config and messages.
        folder: new or empty.
        classes: those that the checkpoint may name.
        weights: `None` takes the averaged ones where there are any.
        class_path: of the module, where the checkpoint does not name it.
        overwrite: replace an export that the folder holds.
        adapter: whether the adapter alone is written.

    Raises:
        ValueError: it names a class that is not allowed, lacks what is asked for, or the folder is
            taken.
    """
    given = content.get("hyper_parameters", {})
    class_path = class_path or given.get("_class_path")
    if class_path is None:
        raise ValueError(
            f"{source} was written by a script and does not name its class; give it with "
            "--class_path, such as --class_path=lit_models.LitOccupationCoder."
        )
    module_class = class_of(class_path, source, classes)
    which, chosen = chosen_weights(content, weights, source)
    recipe = {module_class.recipe_key: module_class.stored_recipe(content)}
    packages = {name: version(name) for name in ("torch", "lightning", "safetensors")}
    global_step = int(content.get("global_step", 0))
    config: dict[str, Any] = {
        "class_path": class_path,
        "weights": which,
        "versions": {"python": platform.python_version(), **packages},
        "init_args": {
            k: v for k, v in given.items() if not k.startswith("_") and k not in START_ONLY
        },
        "source": {
            "checkpoint": str(source),
            "global_step": global_step,
            "epoch": int(content.get("epoch", 0)),
        },
        "extra": _plain(recipe if module_class.recipe_key else {}, source),
    }
    layout = module_class.exported_layout(content, chosen, adapter)
    if layout is not None:  # another program's files say a part of the config
        needed = {k: v for k, v in config["init_args"].items() if k not in layout.replaced}
        config = {**config, "init_args": needed, **_plain(layout.values, source)}
        chosen = layout.weights
    write_exported(folder, config, chosen, overwrite, layout)
    return Export(
        class_path,
        which,
        global_step,
        len(chosen),
        sum(tensor.numel() for tensor in chosen.values()),
        sum(file.stat().st_size for file in folder.iterdir()),
        sorted(paths_in(config["init_args"])),
        None if layout is None else layout.reader.format(folder=folder),
    )


def chosen_weights(
    content: dict[str, Any], asked: Weights | None, path: Path
) -> tuple[Weights, dict[str, Tensor]]:
    """Return the kind of weights that are taken, and name -> tensor; arguments as above.

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


def plain_names(weights: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights under the names of the bare module: no trace of who wrapped it.

    Raises:
        ValueError: two names become one, or an entry is no tensor.
    """
    inner = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
    plain: dict[str, Tensor] = {}
    is_wrapped = bool(weights) and all(name.startswith("module.") for name in weights)
    for name, value in weights.items():
        short = name.removeprefix("module.") if is_wrapped else name
        for wrapper in inner:
            short = short.replace(wrapper, "")
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name} is a {type(value).__name__}, not a tensor: safetensors cannot hold it. "
                "Keep it among the hyperparameters."
            )
        if short in plain:
            raise ValueError(f"two tensors of the checkpoint have the plain name {short}.")
        plain[short] = value
    return plain


def _plain(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(dict(values)))
    except TypeError as error:
        raise ValueError(f"{path}: {', '.join(values)} are no plain values ({error}).") from error


def paths_in(value: Any) -> set[str]:
    """Return the hyperparameters that name files on this machine: an export does not hold them."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return set().union(*(paths_in(item) for item in value))
    # A sign such as "/" is a word of some option, not the root of all files.
    is_path = isinstance(value, str) and "/" in value.strip("/") and Path(value).exists()
    return {value} if is_path else set()


def check_target(folder: Path, overwrite: bool) -> None:
    """Refuse, with a ValueError, a folder that is not empty and no export to be replaced."""
    if folder.is_file():
        raise ValueError(f"--to {folder} is a file; name a folder.")
    held = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    if not held:
        return
    if (folder / OWN_CONFIG).is_file():
        own = [OWN_CONFIG, *_read_config(folder).get("files", [])]
    else:  # a config.json that cannot be read may be of a damaged export, which is replaced
        own = [CONFIG, WEIGHTS]
        with contextlib.suppress(FileNotFoundError, ValueError):
            config = json.loads((folder / CONFIG).read_bytes())
            if not isinstance(config, dict) or "format" not in config:  # transformers names its so
                own = [WEIGHTS]
    foreign = [name for name in held if name not in own]
    if foreign:
        raise ValueError(
            f"--to {folder} holds other files ({', '.join(foreign[:3])}) and is never replaced; "
            "name a folder that is new or empty."
        )
    if not overwrite:
        raise ValueError(
            f"--to {folder} holds an export already; name another folder, or replace it with "
            "--overwrite=true."
        )


def write_exported(
    folder: Path,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    overwrite: bool = False,
    layout: Layout | None = None,
) -> None:
    """Write the folder so that it is absent or whole at every moment.

    Args:
        folder: new or empty, or an export that may be replaced.
        config: content of `config.json`; `tied` and `sha256` are added.
        weights: name -> tensor on the CPU; tensors that share memory are stored once.
        overwrite: replace an export that is there.
        layout: files of another program instead of config.json and these weights.

    Raises:
        ValueError: the folder must not be written.
        OSError: the storage refuses.
    """
    check_target(folder, overwrite)
    weights_file = WEIGHTS if layout is None else layout.weights_file
    texts = {} if layout is None else layout.texts
    stored, tied = without_ties(weights if layout is None else layout.weights)
    config = {"format": FORMAT, **config, "tied": tied}
    if layout is not None:
        files = sorted([weights_file, *texts])
        config |= {"files": files, "weights_file": weights_file, "is_whole": layout.is_whole}
    folder = folder.absolute()
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    remove(unfinished)  # of an export that was killed
    unfinished.mkdir(parents=True)
    try:
        path = unfinished / weights_file
        path.touch()
        mode = path.stat().st_mode  # that of the user's files; safetensors has its own
        save_file(stored, path, metadata={"format": "pt"})
        path.chmod(mode)
        config["sha256"] = sha256_of(path)
        name = CONFIG if layout is None else OWN_CONFIG
        own = {name: json.dumps(config, indent=1, ensure_ascii=False) + "\n"}
        for name, text in {**texts, **own}.items():
            (unfinished / name).write_text(text, encoding="utf-8")
        for file in unfinished.iterdir():
            sync(file)
        put_in_place(unfinished, folder)
    except SafetensorError as error:  # what the storage said is inside its text
        raise OSError(
            f"{folder} could not be written: {error}. Free space or name another folder with --to."
        ) from error
    finally:
        remove(unfinished)


def without_ties(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what can be stored, and name -> stored name of each tensor that is another's double.

    safetensors refuses views and shared memory: contiguous copies are made of parts of a tensor.
    """
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        tensor = tensor.detach()
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in seen:
            tied[name] = seen[key]
            continue
        seen[key] = name
        is_part = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
        stored[name] = tensor.contiguous().clone() if is_part else tensor.contiguous()
    # What still shares memory has another shape or order than the tensor it shares with.
    owners: set[int] = set()
    for name, tensor in stored.items():
        pointer = tensor.data_ptr()
        if tensor.numel() and pointer in owners:
            stored[name] = tensor.clone()
        owners.add(pointer)
    return stored, tied


def is_exported(path: str | Path) -> bool:
    """Return whether a path is a folder with the config of an export."""
    return any((Path(path) / name).is_file() for name in (CONFIG, OWN_CONFIG))


def read_exported(folder: str | Path, classes: StoredClasses = UNTRUSTED) -> dict[str, Any]:
    """Return an exported folder as the dict that a checkpoint gives, tied tensors restored.

    Raises:
        FileNotFoundError: one of its two files is missing.
        ValueError: a file is damaged, the two do not belong together, or a name is not allowed.
    """
    folder = Path(folder)
    config = _read_config(folder)
    weights = _read_weights(folder, config)
    missing = [kept for kept in config["tied"].values() if kept not in weights]
    if missing:
        raise ValueError(f"{folder / CONFIG} names tied tensors that are absent: {missing[:3]}.")
    weights |= {name: weights[kept] for name, kept in config["tied"].items()}
    if "weights_file" in config:
        restore = class_of(config["class_path"], folder, classes).restored_weights
        weights = restore(folder, weights, config["extra"])
    hyperparameters = {**config["init_args"], "_instantiator": INSTANTIATOR}
    return {
        "state_dict": weights,
        "hyper_parameters": {**hyperparameters, "_class_path": config["class_path"]},
        "global_step": config["source"].get("global_step", 0),
        "epoch": config["source"].get("epoch", 0),
        **config["extra"],
    }


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / OWN_CONFIG
    path = path if path.is_file() else folder / CONFIG
    if not path.is_file():
        what = "holds no config.json" if folder.is_dir() else "is no folder"
        raise FileNotFoundError(
            f"{folder} {what}; name a folder that `unisono export CKPT --to DIR` wrote."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); export the checkpoint again.") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        found = config.get("format") if isinstance(config, dict) else None
        raise ValueError(
            f'{path} is not of `unisono export`: its format is {found!r}, not "{FORMAT}". Name a '
            "folder that this version of `unisono export` wrote."
        )
    lacking = [key for key in KEYS if key not in config]
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(lacking)}; export the checkpoint again.")
    return config


def _read_weights(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    if not config.get("is_whole", True):
        raise ValueError(
            f"{folder} holds an adapter alone, without the weights of its base; export the "
            "checkpoint without --adapter."
        )
    path = folder / config.get("weights_file", WEIGHTS)
    if not path.is_file():
        raise FileNotFoundError(f"{folder} lacks {path.name}; export the checkpoint again.")
    if sha256_of(path) != config["sha256"]:  # the format itself has no checksum
        described = OWN_CONFIG if "weights_file" in config else CONFIG
        raise ValueError(
            f"{path} is damaged, or of another export than its {described}: their checksums "
            "differ. Copy the whole folder again, or export the checkpoint again."
        )
    try:
        return load_file(path, device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}); export it again.") from error


def class_of(class_path: str, source: str | Path, classes: StoredClasses) -> Any:
    """Return the module class that a file names by its import path.

    Raises:
        ValueError: it cannot be imported, is no `ExactModule`, or not of the allowed `classes`.
    """
    found = classes.of_module(source, class_path)
    is_module = isinstance(found, type) and issubclass(found, LightningModule)
    if not (is_module and hasattr(found, "exported_layout")):  # ExactModule builds on this file
        what = "cannot be imported" if found is None else "is no ExactModule"
        raise ValueError(
            f"the class {class_path} {what}; give the import path of a LightningModule of this "
            "kind, such as lit_models.LitOccupationCoder, with its package on PYTHONPATH."
        )
    return found
