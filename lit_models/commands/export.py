"""Write a checkpoint as safetensors and JSON that run alone."""

import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Export:
    """What was written; `files_needed` are named by hyperparameters and not in the folder, `reader`
    is Python that loads it in another program."""

    class_path: str
    weights: Literal["averaged", "last"]
    global_step: int
    num_tensors: int
    num_parameters: int
    num_bytes: int
    files_needed: list[str]
    reader: str


def export(
    ckpt: Path,
    *,
    to: Path,
    weights: Literal["averaged", "last"] | None = None,
    class_path: str | None = None,
    overwrite: bool = False,
    adapter: bool = False,
    trust_checkpoint: bool = False,
) -> int:
    """Write the weights of a checkpoint to DIR/model.safetensors and the rest to DIR/config.json.

    Load it with LitOccupationCoder.from_exported("DIR"), or start a run from it with
    --model.init_from=DIR. A language model's folder is one of transformers, LoRA merged.

    Args:
        ckpt: a checkpoint, such as runs/demo/checkpoints/best.ckpt.
        to: the folder to write; new or empty.
        weights: by default the averaged ones where the run averaged.
        class_path: the module's class, where a script wrote the checkpoint.
        overwrite: replace an export that the folder holds.
        adapter: of a run with LoRA, the adapter alone, in the layout of PEFT.
        trust_checkpoint: import the class that the checkpoint names, wherever it comes from.
    """
    from rich.console import Console

    done = export_checkpoint(
        Path(ckpt), Path(to), weights, class_path, overwrite, adapter, trust_checkpoint
    )
    console = Console(highlight=False, soft_wrap=True)
    name = done.class_path.rpartition(".")[2]
    console.print(f"exported  {to}: {name}, {done.weights} weights of step {done.global_step}")
    console.print(
        f"size      {done.num_parameters:,} parameters in {done.num_tensors} tensors, "
        f"{done.num_bytes / 1e6:,.1f} MB"
    )
    for path in done.files_needed:
        console.print(f"[yellow]needs[/yellow]     {path}: read when the module is built; keep it")
    if done.reader:
        console.print(f"read      {done.reader}")
    if not adapter:
        console.print(f'load      {name}.from_exported("{to}"), or --model.init_from={to}')
    return 0


def export_checkpoint(
    path: Path,
    folder: Path,
    weights: Literal["averaged", "last"] | None = None,
    class_path: str | None = None,
    overwrite: bool = False,
    adapter: bool = False,
    trust_checkpoint: bool = False,
) -> Export:
    """Write a checkpoint as a folder that `from_exported` reads, in its family's layout; arguments
    as of `export`.

    Raises:
        FileNotFoundError: no such checkpoint.
        ValueError: it is damaged or foreign, names a class that is not allowed, lacks what is asked
            for, or the folder is taken.
    """
    # torch is loaded by the command alone, not by its help.
    from lit_models.training.checkpoints import read_checkpoint
    from lit_models.training.export import (
        START_ONLY,
        Layout,
        check_target,
        class_of,
        paths_in,
        write_exported,
    )
    from lit_models.training.hyperparameters import AVERAGED, StoredClasses

    check_target(folder, overwrite)
    classes = StoredClasses(trust_checkpoint, [class_path] if class_path else [])
    content = read_checkpoint(path, classes=classes)
    values = content.get("hyper_parameters", {})
    class_path = class_path or values.get("_class_path")
    if class_path is None:
        raise ValueError(
            f"{path} was written by a script and does not name its class; give it with "
            "--class_path, such as --class_path=lit_models.LitOccupationCoder."
        )
    module_class = class_of(class_path, path, classes)
    averaged = content.get(AVERAGED, {})
    weights = weights or ("averaged" if averaged else "last")
    if weights == "averaged" and not averaged:
        raise ValueError(
            f"{path} holds no averaged weights: the run did not average any. Leave --weights out, "
            "or ask for --weights=last."
        )
    chosen = content["state_dict"] | (averaged if weights == "averaged" else {})
    recipe = module_class.stored_recipe(content)
    layout = module_class.exported_layout(content, chosen, adapter) or Layout(chosen)
    left_out = (*START_ONLY, *layout.replaced)
    init_args = {
        name: value
        for name, value in values.items()
        if not name.startswith("_") and name not in left_out
    }
    global_step = int(content.get("global_step", 0))
    packages = {name: version(name) for name in ("torch", "lightning", "safetensors")}
    config: dict[str, Any] = {
        "class_path": class_path,
        "weights": weights,
        "versions": {"python": platform.python_version(), **packages},
        "init_args": init_args,
        "source": {
            "checkpoint": str(path),
            "global_step": global_step,
            "epoch": int(content.get("epoch", 0)),
        },
        "extra": {module_class.recipe_key: recipe} if module_class.recipe_key else {},
        **layout.values,
    }
    write_exported(folder, config, layout)
    return Export(
        class_path,
        weights,
        global_step,
        len(layout.weights),
        sum(tensor.numel() for tensor in layout.weights.values()),
        sum(file.stat().st_size for file in folder.iterdir()),
        sorted(paths_in(init_args)),
        layout.reader.format(folder=folder),
    )
