"""Dumps for `test_dump_speed`, timed from the first batch to the complete store.

python -m tests.benchmarks.dump_peers FOLDER TARGET DEVICES prints the seconds of one; processes
that Lightning starts need a program of their own.
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from datamodules import ActivationDumpDataModule
from datamodules.activations.documents import PositionRule
from lit_models import LitSubject
from lit_models.consistency_lens.subject import SubjectOptions
from lit_models.training.predictions import PredictionWriter

BATCH, LONGEST, LAYER = 32, 256, 3
RULE = PositionRule(min_position=6, per_document=4)


class Clock(Callback):
    """Notes when prediction begins."""

    def __init__(self) -> None:
        self.start = 0.0

    def on_predict_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.start = time.perf_counter()


def dump(folder: Path, target: Path, devices: int = 1) -> float:
    """Dump and return the seconds from the first batch to the complete store."""
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(folder),
        callbacks=[PredictionWriter(), clock],
    )
    options: dict[str, Any] = {"context_length": LONGEST, "documents_by": "line"}
    files = str(folder / "mine.txt")
    data = ActivationDumpDataModule(
        str(target), train_files=files, positions=RULE, global_batch_size=BATCH, **options
    )
    subject = LitSubject(SubjectOptions(path=str(folder / "model"), layer=LAYER))
    trainer.predict(subject, data, return_predictions=False)
    return time.perf_counter() - clock.start


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("seconds", dump(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
