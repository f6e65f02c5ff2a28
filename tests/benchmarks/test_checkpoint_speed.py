"""How long training stands still for a checkpoint."""

import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from lit_models import LitCausalLM
from lit_models.causal_lm.network import DecoderConfig
from lit_models.training import LastCheckpoint, Ledger
from tests.benchmarks.figures import Aim, Figures
from tests.benchmarks.language_models import RaggedData, adamw
from tests.toy import toy_trainer

BATCH, LONGEST = 4, 32
# 25 million parameters: 0.3 GB with the moments of AdamW
SHAPE = {"vocab_size": 1024, "hidden_size": 512, "num_layers": 8, "num_heads": 8}
EVERY, SAVES, ROUNDS = 8, 3, 3


class Timed(LastCheckpoint):
    """Notes how long the training stands still."""

    def __init__(self, **options: Any) -> None:
        super().__init__(every_n_minutes=None, every_epoch=False, **options)
        self.stalls: list[float] = []

    def _save(self, trainer: Trainer) -> None:
        begin = time.perf_counter()
        super()._save(trainer)
        self.stalls.append(time.perf_counter() - begin)


def seconds_of_save(folder: Path) -> float:
    """Return the seconds for which a save stops the training."""
    seed_everything(0, verbose=False)
    timed = Timed(every_n_steps=EVERY)
    options = {"max_steps": EVERY * SAVES + EVERY - 1, "max_epochs": -1, "precision": 32}
    options |= {"limit_val_batches": 0, "enable_checkpointing": False}
    trainer = toy_trainer(folder, callbacks=[Ledger(), timed], **options)
    module = LitCausalLM(adamw, network=DecoderConfig(max_positions=LONGEST, **SHAPE))
    documents = [*np.random.default_rng(0).integers(SHAPE["vocab_size"], size=(200, LONGEST))]
    trainer.fit(module, RaggedData(documents, longest=LONGEST, global_batch_size=BATCH))
    return statistics.median(timed.stalls)


@pytest.mark.benchmark
@pytest.mark.filterwarnings("ignore:.*have no `validation_step`")
def test_time_lost_to_checkpoints(tmp_path: Path, figures: Figures) -> None:
    torch.set_num_threads(1)
    interval_s = LastCheckpoint().every_n_minutes * 60
    shares = [seconds_of_save(tmp_path / str(number)) / interval_s for number in range(ROUNDS)]
    unit = f"share of {interval_s:.0f} s"
    figures.add("shared", "checkpoint of 25 M weights", unit, shares, aim=Aim(0.01, of="value"))
