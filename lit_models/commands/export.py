"""Write a checkpoint as safetensors and JSON that run alone."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # torch is loaded by the command alone, not by its help
    from lit_models.training.export import Export


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
    if adapter:
        return 0
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
) -> "Export":
    """Write a checkpoint as a plain folder that `from_exported` reads; arguments as of `export`.

    Raises:
        FileNotFoundError: no such checkpoint.
        ValueError: it is damaged or foreign, names a class that is not allowed, lacks what is asked
            for, or the folder is taken.
    """
    from lit_models.training.checkpoints import read_checkpoint
    from lit_models.training.export import check_target, write_checkpoint
    from lit_models.training.hyperparameters import StoredClasses

    check_target(folder, overwrite)
    classes = StoredClasses(trust_checkpoint, [class_path] if class_path else [])
    content = read_checkpoint(path, classes=classes)
    return write_checkpoint(content, path, folder, classes, weights, class_path, overwrite, adapter)
