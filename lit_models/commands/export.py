"""Export of a checkpoint as safetensors and JSON that are usable on their own."""

import platform
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Any


def export(
    ckpt: Path,
    *,
    to: Path,
    class_path: str | None = None,
    adapter: bool = False,
    format: str | None = None,
    trust_checkpoint: bool = False,
) -> int:
    """Write the weights of a checkpoint to DIR/model.safetensors and the rest to DIR/config.json.

    Averaged weights are exported if the run has any. Load the folder with
    LitOccupationCoder.from_exported("DIR"), or start a run from it with --model.init_from=DIR.
    A language model becomes a transformers folder, with LoRA merged into its weights.

    Args:
        ckpt: a checkpoint, such as runs/demo/checkpoints/best.ckpt.
        to: the folder to write; new or empty.
        class_path: class of the module; needed if a script wrote the checkpoint.
        adapter: export only the LoRA adapter, in the layout of PEFT.
        format: sentence-transformers, for a retriever or ranker, which --model.pretrained=DIR can
            read, too; or onnx, for a retriever's encoder in float32 and int8.
        trust_checkpoint: import the class that the checkpoint names, from any package.
    """
    # Imported here, so that the help of the command does not load torch.
    from lit_models import run_files
    from lit_models.training.checkpoints import take_averaged
    from lit_models.training.hyperparameters import StoredClasses
    from lit_models.training.optim import AVERAGED

    if to.is_file() or (to.exists() and any(to.iterdir())):
        raise ValueError(
            f"--to {to} is there and is never replaced; name a folder that is new or empty."
        )
    classes = StoredClasses(trust_checkpoint, [class_path] if class_path else [])
    content = run_files.read_checkpoint(ckpt, classes=classes)
    values = content.get("hyper_parameters", {})
    class_path = class_path or values.get("_class_path")
    if class_path is None:
        raise ValueError(
            f"{ckpt} was written by a script and does not name its class; give it with "
            "--class_path, such as --class_path=lit_models.LitOccupationCoder."
        )
    module_class = run_files.class_of(class_path, ckpt, classes)
    take_averaged(content)
    weights, chosen = "averaged" if AVERAGED in content else "last", content["state_dict"]
    if format is not None:
        from lit_models.seo.exchange import exported

        return exported(ckpt, to, module_class, chosen, format, trust_checkpoint)
    recipe = module_class.stored_recipe(content)
    layout = module_class.exported_layout(content, chosen, adapter) or run_files.Layout(chosen)
    left_out = (*run_files.START_ONLY, *layout.replaced)
    init_args = {n: v for n, v in values.items() if n[0] != "_" and n not in left_out}
    step, epoch = int(content.get("global_step", 0)), int(content.get("epoch", 0))
    packages = {name: version(name) for name in ("torch", "lightning", "safetensors")}
    config: dict[str, Any] = {
        "class_path": class_path,
        "weights": weights,
        "versions": {"python": platform.python_version(), **packages},
        "init_args": init_args,
        "source": {"checkpoint": str(ckpt), "global_step": step, "epoch": epoch},
        "extra": {module_class.recipe_key: recipe} if module_class.recipe_key else {},
        **layout.values,
    }
    run_files.write_exported(to, config, layout)

    name = class_path.rpartition(".")[2]
    print(f"exported  {to}: {name}, {weights} weights of step {step}")
    num_parameters = sum(tensor.numel() for tensor in layout.weights.values())
    num_bytes = sum(file.stat().st_size for file in to.iterdir())
    size = f"{num_parameters:,} parameters in {len(layout.weights)} tensors"
    print(f"size      {size}, {num_bytes / 1e6:,.1f} MB")
    for path in sorted(run_files.paths_in(init_args)):
        print(f"needs     {path}: read when the module is built; keep it")
    if layout.reader:
        print(f"read      {layout.reader.format(folder=to)}")
    if not adapter:
        option = f"--model.init_from={shlex.quote(str(to))}"
        print(f'load      {name}.from_exported("{to}"), or {option}')
    return 0
