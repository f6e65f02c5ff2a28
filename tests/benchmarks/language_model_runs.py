"""Runs of language models as the command line has them, for the benchmarks."""

import hashlib
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from datamodules.core.planned import PlannedDataModule, PlannedDataset, Stage
from datamodules.text.packing import TokenDataset
from datamodules.text.store import TokenStream, token_dtype
from datamodules.text.texts import LanguageModelDataModule
from datamodules.tokenizers.text import TextTokenizer, byte_tokenizer
from lit_models import LitCausalLM
from lit_models.training import default_callbacks
from lit_models.training.run import ProgressLine, default_loggers
from tests.benchmarks.language_model_peers import LONGEST

ROOT = Path(__file__).parents[2]
FAMILY = "causal_lm"
ROUNDS = 3
adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)


class Clock(Callback):
    """Notes when each step ended, and how many tokens it trained on."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.tokens: list[int] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, _
    ) -> None:
        self.ends.append(time.perf_counter())
        self.tokens.append(int((batch["labels"] != -100).sum()))


class RaggedData(LanguageModelDataModule):
    """The documents as samples of their own."""

    def __init__(self, documents: list[np.ndarray], longest: int = LONGEST, **options: Any) -> None:
        super().__init__(**options)
        self.context_length = longest
        ids = np.concatenate(documents)
        tokens = ids.astype(token_dtype(int(ids.max()) + 1))
        sizes = np.array([len(ids) for ids in documents])
        self.stream = TokenStream(tokens, np.cumsum(sizes) - sizes, sizes - 1)

    @property
    def tokenizer(self) -> TextTokenizer:
        """One of which only the checkpoint hears."""
        return byte_tokenizer()

    def prepare_data(self) -> None:
        """Do nothing: the tokens are there already."""

    def setup(self, stage: str) -> None:
        """Build the datasets."""
        PlannedDataModule.setup(self, stage)

    def build(self, stage: Stage) -> PlannedDataset:
        digest = hashlib.sha256(self.stream.tokens.tobytes()).hexdigest()
        return TokenDataset(self.stream, digest, self.context_length, "documents", self.tokenizer)


def fit(
    folder: Path, module: LitCausalLM, data: PlannedDataModule, steps: int, *callbacks: Callback
) -> Clock:
    """Train as the command line does: ledger, checkpoints, loggers, progress."""
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        logger=default_loggers(folder, None),
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=[*default_callbacks(), ProgressLine(), clock, *callbacks],
    )
    trainer.fit(module, data)
    return clock
