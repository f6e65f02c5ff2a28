"""Write a checkpoint as safetensors and JSON that run alone."""

from pathlib import Path
from typing import Literal


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
        weights: which weights; null takes the averaged ones where the run averaged.
        class_path: the module's class, where a script wrote the checkpoint.
        overwrite: replace an export that the folder holds.
        adapter: of a run with LoRA, the adapter alone, in the layout of PEFT.
        trust_checkpoint: import the class that the checkpoint names, wherever it comes from.
    """
    from rich.console import Console

    from lit_models.training.export import export_checkpoint

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
