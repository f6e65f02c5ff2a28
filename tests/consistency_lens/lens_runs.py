"""Short fits of lenses on stories of a few words; also in two processes, which share one world.

torchrun --nproc_per_node=2 -m tests.consistency_lens.lens_runs FOLDER; each rank leaves
FOLDER/NAME/weights-RANK.pt: step -> name -> weight.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor

from lit_models.causal_lm.adapters import LoraOptions
from lit_models.consistency_lens.lens import LensOptions
from lit_models.consistency_lens.subject import BaseOptions
from lit_models.training import default_callbacks
from lit_models.training.sharding import whole
from tests.consistency_lens.small_lens import lens_module, story_data, trainer

UNFREEZE_AT, STEPS = 4, 7
BASES = {
    "late": BaseOptions(unfreeze_at=UNFREEZE_AT),
    "lora": BaseOptions(lora=LoraOptions(["q_proj", "up_proj"], rank=2)),
    "frozen": BaseOptions(is_frozen=True),
}
OPTIONS = {
    name: LensOptions(3, verbalizer=base, reconstructor=base) for name, base in BASES.items()
}
JOBS: dict[str, tuple[str, LensOptions]] = {
    name + end: (strategy, options)
    for name, options in OPTIONS.items()
    for strategy, end in (("ddp", ""), ("fsdp", ", fsdp"))
}


class Weights(Callback):
    """All weights after each optimizer step, step 0 included, as one device has them."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, Tensor]] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.note(0, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.note(trainer.global_step, pl_module)

    def note(self, step: int, module: Any) -> None:
        own = module.lens.named_parameters(remove_duplicate=False)
        self.after[step] = {name: whole(p.detach()).clone() for name, p in own}


def fit(
    folder: Path,
    options: LensOptions,
    optimizer: Any = torch.optim.AdamW,
    ckpt_path: str | None = None,
    data: dict[str, Any] | None = None,
    **more: Any,
) -> tuple[Trainer, dict[int, dict[str, Tensor]]]:
    """Fit in float64 on the stories beside the folder and return the weights after each step."""
    seed_everything(1, verbose=False)
    module = lens_module(optimizer=partial(optimizer, lr=0.02, weight_decay=0.1), lens=options)
    weights = Weights()
    limits = {"max_steps": STEPS, "gradient_clip_val": 1.0, "limit_val_batches": 0, **more}
    runs = trainer(folder, callbacks=[*default_callbacks(), weights], **limits)
    activations = story_data(folder.parent, **{"global_batch_size": 8, **(data or {})})
    runs.fit(module, activations, ckpt_path=ckpt_path, weights_only=True)
    return runs, weights.after


def main() -> None:
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    for name, (strategy, options) in JOBS.items():
        _, weights = fit(folder / name, options, devices=2, strategy=strategy)
        torch.save(weights, folder / name / f"weights-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
