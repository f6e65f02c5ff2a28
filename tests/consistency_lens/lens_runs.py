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

from datamodules import ActivationDataModule
from datamodules.activations.documents import PositionRule
from datamodules.core.planned import LoaderOptions
from datamodules.tokenizers.text import TokenizerOptions
from lit_models import LitConsistencyLens
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.causal_lm.network import DecoderConfig
from lit_models.consistency_lens.lens import LensOptions
from lit_models.consistency_lens.loss import LensLosses, LossWeight
from lit_models.consistency_lens.subject import BaseOptions, SubjectOptions
from lit_models.training import default_callbacks
from lit_models.training.sharding import whole
from tests.distributed.lens_family import story_files
from tests.toy import toy_trainer

JOINT_START, UNFREEZE_AT, STEPS = 2, 4, 7
LOSSES = LensLosses(
    teacher_text=LossWeight(1.0, end=JOINT_START),
    teacher_reconstruction=LossWeight(1.0, end=JOINT_START),
    reconstruction=LossWeight(1.0, begin=JOINT_START),
    reference=LossWeight(0.1, begin=JOINT_START),
)
SHAPE = DecoderConfig(max_positions=32, hidden_size=8, num_layers=2, num_heads=2)
LORA = BaseOptions(lora=LoraOptions(["q_proj", "up_proj"], rank=2))
LATE = BaseOptions(unfreeze_at=UNFREEZE_AT)
FROZEN = BaseOptions(is_frozen=True)
JOBS: dict[str, tuple[str, LensOptions]] = {
    "late": ("ddp", LensOptions(3, verbalizer=LATE, reconstructor=LATE)),
    "late, fsdp": ("fsdp", LensOptions(3, verbalizer=LATE, reconstructor=LATE)),
    "lora": ("ddp", LensOptions(3, verbalizer=LORA, reconstructor=LORA)),
    "lora, fsdp": ("fsdp", LensOptions(3, verbalizer=LORA, reconstructor=LORA)),
    "frozen": ("ddp", LensOptions(3, verbalizer=FROZEN, reconstructor=FROZEN)),
    "frozen, fsdp": ("fsdp", LensOptions(3, verbalizer=FROZEN, reconstructor=FROZEN)),
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
    lens: LensOptions,
    steps: int = STEPS,
    optimizer: Any = torch.optim.AdamW,
    ckpt_path: str | None = None,
    data: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Trainer, dict[int, dict[str, Tensor]]]:
    """Fit in float64 and return the weights after each step."""
    seed_everything(1, verbose=False)
    stories = folder.parent
    module = LitConsistencyLens(
        partial(optimizer, lr=0.02, weight_decay=0.1),
        SubjectOptions(
            layer=0, network=DecoderConfig(32, hidden_size=8, num_layers=2, num_heads=2)
        ),
        LOSSES,
        lens=lens,
    )
    activations = ActivationDataModule(
        train_files=str(stories / "stories-train.jsonl"),
        validation_files=str(stories / "stories-validation.jsonl"),
        test_files=str(stories / "stories-test.jsonl"),
        tokenizer=TokenizerOptions("words"),
        context_length=16,
        positions=PositionRule(min_position=4, per_document=3),
        loader=LoaderOptions(num_workers=0),
        **{"global_batch_size": 8, **(data or {})},
    )
    weights = Weights()
    trainer = toy_trainer(
        folder,
        callbacks=[*default_callbacks(), weights],
        **{"max_steps": steps, "max_epochs": 9, "gradient_clip_val": 1.0, **options},
        limit_val_batches=0,
    )
    trainer.fit(module, activations, ckpt_path=ckpt_path, weights_only=True)
    return trainer, weights.after


def write_stories(folder: Path) -> None:
    """Write what `fit` reads beside its folder."""
    story_files(folder)


def main() -> None:
    torch.set_num_threads(1)
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    for name, (strategy, lens) in JOBS.items():
        _, weights = fit(folder / name, lens, devices=2, strategy=strategy)
        torch.save(weights, folder / name / f"weights-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
