"""Small whole runs of a lens, on a subject in a folder or on one with random weights."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything

from datamodules import ActivationDataModule
from datamodules.core.planned import LoaderOptions
from datamodules.tokenizers.text import TokenizerOptions, byte_tokenizer
from lit_models import LitConsistencyLens
from lit_models.consistency_lens.lens import LensOptions
from lit_models.consistency_lens.loss import LensLosses, LossWeight
from lit_models.consistency_lens.subject import SubjectOptions
from lit_models.training import default_callbacks
from lit_models.training.checkpoints import LastCheckpoint
from tests.distributed.lens_family import LENS_SUBJECT, lens_documents, story_files
from tests.text_corpora import saved_tokenizer
from tests.toy import toy_trainer

BOTH = LensLosses(
    teacher_text=LossWeight(1.0, end=2),
    teacher_reconstruction=LossWeight(1.0, end=2),
    reconstruction=LossWeight(1.0, begin=2),
    reference=LossWeight(0.1, begin=2),
)
WARM = LensLosses(teacher_text=LossWeight(1.0), teacher_reconstruction=LossWeight(1.0))
JOINT = LensLosses(reconstruction=LossWeight(1.0), effect=LossWeight(0.5), fluency=LossWeight(0.1))
adamw = partial(torch.optim.AdamW, lr=0.01)
PETS, PLACES = ["owl", "fox", "cat"], ["den", "hut", "inn", "bay"]


def gpt2_folder(folder: Path, seed: int = 3) -> Path:
    """Write a tiny GPT-2 with a tokenizer of bytes, as transformers writes one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    shape = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 32}
    config = GPT2Config(vocab_size=257, initializer_range=0.3, **shape)
    GPT2LMHeadModel(config).save_pretrained(folder)
    saved_tokenizer(byte_tokenizer(), folder)
    return folder


def lens_module(
    subject: SubjectOptions = LENS_SUBJECT, losses: LensLosses = BOTH, **more: Any
) -> Any:
    """Return a module that has learnt nothing."""
    options = {"optimizer": adamw, "lens": LensOptions(num_words=3), **more}
    return LitConsistencyLens(subject=subject, losses=losses, **options)


def story_data(folder: Path, **options: Any) -> ActivationDataModule:
    """Return the stories of a folder, written at first use; by words, or by the subject's bytes."""
    if not (folder / "stories-test.jsonl").exists():
        story_files(folder)
    given = {"global_batch_size": 16, "loader": LoaderOptions(num_workers=0), **options}
    return ActivationDataModule(**{**lens_documents(folder / "run"), **given})


def trainer(folder: Path, every: int = 1, **options: Any) -> Trainer:
    """Return a quiet trainer that saves every so many steps."""
    callbacks = [c for c in default_callbacks() if not isinstance(c, LastCheckpoint)]
    callbacks.append(LastCheckpoint(every_n_steps=every, every_epoch=False))
    given = {"callbacks": callbacks, "max_epochs": 9, "limit_val_batches": 1, **options}
    return toy_trainer(folder, **given)


def fitted(run: Path, module: Any, data: ActivationDataModule, **options: Any) -> Path:
    """Train, and return the last checkpoint."""
    seed_everything(1, verbose=False)
    resume = options.pop("resume", None)
    trainer(run, **options).fit(module, data, ckpt_path=resume, weights_only=True)
    return run / "checkpoints" / "last.ckpt"


def stories(folder, number=60, name="stories"):
    """A file of stories with two attributes each."""
    path = folder / f"{name}.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for i in range(number):
            pet, place = PETS[i % 3], PLACES[i // 3 % 4]
            text = f"number {i // 8} {i % 8} : the {pet} in the {place} saw <b> & left it at once ."
            row = {"text": text, "attributes": {"pet": pet, "place": place}}
            file.write(json.dumps(row) + "\n")
    return path


def data_of(folder, **options):
    options = {"context_length": 24, "global_batch_size": 16, **options}
    tokenizer = options.pop("tokenizer", TokenizerOptions("words"))
    files = options.pop("train", None) or str(stories(folder))
    return ActivationDataModule(
        train_files=files, tokenizer=tokenizer, documents_by="line", **options
    )


def module_of(**options):
    """A lens without a warm start."""
    return lens_module(losses=LensLosses(reconstruction=LossWeight(1.0)), **options)
