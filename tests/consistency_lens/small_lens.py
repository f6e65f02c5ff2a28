"""Small whole runs of a lens, on a subject from a folder or with random weights."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from datamodules import ActivationDataModule
from datamodules.core.planned import LoaderOptions
from datamodules.tokenizers.text import TokenizerOptions
from lit_models import LitConsistencyLens
from lit_models.consistency_lens.lens import LensOptions
from lit_models.consistency_lens.loss import LensLosses, LossWeight
from lit_models.consistency_lens.subject import SubjectOptions
from lit_models.training import LastCheckpoint
from tests.activation_dumps import stories
from tests.distributed.lens_family import LENS_SUBJECT, lens_documents, story_files
from tests.toy import callbacks_with, toy_trainer

BOTH = LensLosses(
    teacher_text=LossWeight(1.0, end=2),
    teacher_reconstruction=LossWeight(1.0, end=2),
    reconstruction=LossWeight(1.0, begin=2),
    reference=LossWeight(0.1, begin=2),
)
WARM = LensLosses(teacher_text=LossWeight(1.0), teacher_reconstruction=LossWeight(1.0))
JOINT = LensLosses(reconstruction=LossWeight(1.0), effect=LossWeight(0.5), fluency=LossWeight(0.1))
adamw = partial(torch.optim.AdamW, lr=0.01)


def lens_module(
    subject: SubjectOptions = LENS_SUBJECT, losses: LensLosses = BOTH, **more: Any
) -> Any:
    """Return an untrained module."""
    options = {"optimizer": adamw, "lens": LensOptions(num_words=3), **more}
    return LitConsistencyLens(subject=subject, losses=losses, **options)


def story_data(folder: Path, **options: Any) -> ActivationDataModule:
    """Return the stories of a folder, written at first use; by words, or by the subject's bytes."""
    if not (folder / "stories-test.jsonl").exists():
        story_files(folder)
    given = {"global_batch_size": 16, "loader": LoaderOptions(num_workers=0), **options}
    return ActivationDataModule(**{**lens_documents(folder / "run"), **given})


def trainer(folder: Path, every: int = 1, **options: Any) -> Trainer:
    """Return a quiet trainer that saves every few steps."""
    callbacks = callbacks_with(LastCheckpoint(every_n_steps=every, every_epoch=False))
    given = {"callbacks": callbacks, "max_epochs": 9, "limit_val_batches": 1, **options}
    return toy_trainer(folder, **given)


def fitted(run: Path, module: Any, data: ActivationDataModule, **options: Any) -> Path:
    """Train, and return the last checkpoint."""
    seed_everything(1, verbose=False)
    resume = options.pop("resume", None)
    trainer(run, **options).fit(module, data, ckpt_path=resume, weights_only=True)
    return run / "checkpoints" / "last.ckpt"


def data_of(folder, **options):
    options = {"context_length": 24, "global_batch_size": 16, **options}
    tokenizer = options.pop("tokenizer", TokenizerOptions("words"))
    files = options.pop("train", None) or stories(folder, 60)
    return ActivationDataModule(train_files=files, tokenizer=tokenizer, **options)


def module_of(**options):
    """Return a lens without a warm start."""
    return lens_module(losses=LensLosses(reconstruction=LossWeight(1.0)), **options)
