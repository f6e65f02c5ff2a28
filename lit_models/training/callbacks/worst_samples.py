"""The samples of an evaluation with the largest losses, for the report."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_models.training.callbacks.ledger import is_distributed
from lit_models.training.exact import ExactModule
from lit_models.training.judged import (
    Judged,
    Told,
    as_table,
    distinct,
    joined,
    rows_of,
    worst_of,
    write_worst,
)

MOST_BATCHES = 64  # kept before they are looked at: a step does no more than keep what it said


class WorstSamples(Callback):
    """Writes `worst-val.json` after each validation and `worst-test.json` after a test.

    In them stand, as `lit_models.reporting.samples` reads them, the samples with the largest
    losses: what data and model say of each, its number in the split, its loss to 3 digits. They are
    nearly always the same on any number of devices, see `judged.PARTS`. A module whose evaluation
    steps return no `Judged` has no such file.

    Args:
        number: of samples; 0 writes nothing.

    Raises:
        ValueError: a negative number.
    """

    def __init__(self, number: int = 12) -> None:
        if number < 0:
            raise ValueError(f"number must be 0 or more, got {number}; 0 keeps no samples.")
        self.number = number
        self._batches: list[tuple[Judged, Tensor, Tensor]] = []
        self._worst: Tensor | None = None  # [number, 2 + A] of `worst_of`
        self._sizes: dict[str, int] = {}  # of each answer

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()

    on_test_epoch_start = on_validation_epoch_start

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._keep(trainer, outputs, batch)

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module, "val", "validation")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module, "test", "test")

    def _forget(self) -> None:
        self._batches, self._worst = [], None

    def _keep(self, trainer: Trainer, outputs: Any, batch: Any) -> None:
        if self.number and isinstance(outputs, Judged) and not trainer.sanity_checking:
            self._batches.append((outputs, batch["sample_id"], batch["weight"]))
            if len(self._batches) == MOST_BATCHES:
                self._sift()

    def _sift(self) -> None:
        """Leave the worst of what was kept, on the device where it is."""
        judged, sample_ids, weights = zip(*self._batches, strict=True)
        self._sizes = {name: values[0].numel() for name, values in judged[0].answers.items()}
        rows = rows_of(joined(judged), torch.cat(sample_ids), torch.cat(weights))
        rows = rows if self._worst is None else torch.cat([self._worst, rows])
        self._worst, self._batches = worst_of(rows, self.number), []

    def _finish(self, trainer: Trainer, module: LightningModule, split: str, stage: str) -> None:
        if self._batches:
            self._sift()
        if self._worst is None:
            return  # on all ranks: each has as many batches
        rows, self._worst = self._worst, None
        if is_distributed():
            rows = worst_of(module.all_gather(rows).flatten(0, 1), self.number * trainer.world_size)
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        assert isinstance(module, ExactModule)
        told = [self._told(trainer, module, stage, row) for row in distinct(rows, self.number)]
        when = f", step {trainer.global_step}" if trainer.state.fn == "fit" else ""
        title = f"Samples with the largest loss in {stage}{when}"
        write_worst(Path(trainer.default_root_dir), split, {"title": title, **as_table(told)})

    def _told(self, trainer: Trainer, module: ExactModule, stage: str, row: list[float]) -> Told:
        loss, sample_id, *values = row
        answers = {n: [values.pop(0) for _ in range(size)] for n, size in self._sizes.items()}
        dataset = trainer.datamodule.datasets[stage]  # type: ignore[attr-defined]
        described = dataset.describe(int(sample_id), 0)
        return Told({**described, **module.in_words(answers)}, int(sample_id), loss)
