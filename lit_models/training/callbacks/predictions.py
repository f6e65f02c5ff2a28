"""Predictions stream to part files, survive a kill, and are merged in input order."""

import hashlib
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console

from datamodules.files.tables import naming
from lit_models.training.ledger import tells_samples

PART_BATCHES = 32


class PredictionWriter(Callback):
    """Writes what `predict_step` returns, and lets the datamodule turn it into the user's file.

    Each rank writes parts, atomically, that hold whole batches of the plan. The batches do not
    depend on the device count, so a killed prediction goes on with any number of devices. At the
    end rank 0 checks that each sample is there exactly once and calls
    `datamodule.write_predictions(results, path)`.

    Args:
        part_batches: batches that one part file holds; a kill loses at most so many per device.
    """

    def __init__(self, part_batches: int = PART_BATCHES) -> None:
        if part_batches < 1:
            raise ValueError(f"part_batches must be at least 1, got {part_batches}.")
        self.part_batches = part_batches
        self._rows: list[dict[str, np.ndarray]] = []
        self._batches: list[int] = []
        self._folder: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse to overwrite, or to leave samples out, before any work is done."""
        if stage != "predict":
            return
        _check_limit(trainer)
        output = trainer.datamodule.predict_output_path
        if output.exists():
            raise ValueError(
                f"{output} exists and is not overwritten; move it away, or name another file "
                "with --data.predict_output."
            )
        trainer.datamodule.find_done_batches = lambda: self.done_batches(trainer, pl_module)

    def done_batches(self, trainer: Trainer, pl_module: LightningModule) -> frozenset[int]:
        """Return the batches that an interrupted prediction with the same weights has written.

        Asked on every rank when the loader is made: the weights are loaded, nothing is written.
        """
        self._folder = _parts_folder(trainer, pl_module)
        self._folder.mkdir(parents=True, exist_ok=True)
        done: set[int] = set()
        for path in sorted(self._folder.glob("part-*.npz")):
            with np.load(path, allow_pickle=False) as part:
                done |= set(part["batches"].tolist())
        return frozenset(done)

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the rows of a batch; a filler batch, which only keeps ranks in step, is dropped, and
        one that another rank of a tensor group has, too."""
        if float(batch["weight"][0]) == 0 or not tells_samples(trainer):
            return
        rows = {name: as_array(value) for name, value in outputs.items()}
        self._rows.append({"sample_id": batch["sample_id"].cpu().numpy(), **rows})
        self._batches.append(int(batch["step_index"]))
        if len(self._batches) >= self.part_batches:
            self._flush()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merge on rank 0, after the last collective: no rank waits, however long it takes."""
        self._flush()
        trainer.strategy.barrier("predictions")
        if trainer.is_global_zero and self._folder is not None:
            num_samples = len(trainer.datamodule.datasets["predict"].lengths)
            results = merged(self._folder, num_samples)
            trainer.datamodule.write_predictions(results, trainer.datamodule.predict_output_path)
            shutil.rmtree(self._folder)
            Console(highlight=False).print(
                f"{num_samples} inputs predicted, written to "
                f"{trainer.datamodule.predict_output_path}",
                soft_wrap=True,
            )

    def _flush(self) -> None:
        if not self._batches or self._folder is None:
            return
        names = self._rows[0]
        arrays: dict[str, Any] = {
            name: np.concatenate([row[name] for row in self._rows]) for name in names
        }
        target = self._folder / f"part-{self._batches[0]:09d}.npz"
        unfinished = target.with_suffix(f".{os.getpid()}.unfinished")
        try:
            with naming(target), open(unfinished, "wb") as file:
                np.savez(file, batches=np.array(self._batches), **arrays)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)
        self._rows, self._batches = [], []


def _check_limit(trainer: Trainer) -> None:
    """Refuse a limit below the batches of the plan: the file has a row for each sample.

    Raises:
        ValueError: the trainer's `limit_predict_batches` leaves samples out.
    """
    limit, data = trainer.limit_predict_batches, trainer.datamodule
    num_batches = data.plan("predict", 0).num_steps
    per_device = math.ceil(num_batches / data.num_replicas)
    if limit < (per_device if isinstance(limit, int) else 1.0):
        raise ValueError(
            f"limit_predict_batches is {limit} per device, and the predictions have "
            f"{num_batches} batches, {per_device} per device: each input must get a row. Leave "
            "the limit (and fast_dev_run) out, or name a file of fewer rows."
        )


def as_array(value: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array; numpy has no bfloat16, whose values float32 holds exactly."""
    value = value.cpu()
    return (value.float() if value.dtype == torch.bfloat16 else value).numpy()


def _parts_folder(trainer: Trainer, pl_module: LightningModule) -> Path:
    """Return the folder of parts, named by all that a prediction depends on."""
    output = trainer.datamodule.predict_output_path
    facts = [
        trainer.datamodule.request("predict").digest(),
        dict(pl_module.hparams),
        getattr(pl_module, "recipe", None),
        str(trainer.precision),
    ]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    # Whole weights: sharded ones are whole on rank 0 alone, which tells the others.
    strategy = trainer.strategy
    weights = getattr(strategy, "whole_state_dict", strategy.lightning_module_state_dict)()
    for name, value in weights.items():
        key.update(name.encode())
        flat = value.detach().cpu().contiguous().reshape(-1)
        key.update(flat.view(torch.uint8).numpy().tobytes())
    digest = trainer.strategy.broadcast(key.hexdigest()[:12])
    return output.with_name(f".{output.name}.{digest}.parts")


def merged(folder: Path, num_samples: int) -> dict[str, np.ndarray]:
    """Return name -> [N, …] results in the order of sample ids, on disk beside the parts.

    Raises:
        RuntimeError: a sample is missing or there twice.
    """
    results: dict[str, np.ndarray] = {}
    times = np.zeros(num_samples, np.int32)
    for path in sorted(folder.glob("part-*.npz")):
        with np.load(path, allow_pickle=False) as part:
            ids = part["sample_id"]
            np.add.at(times, ids, 1)
            for name in part.files:
                if name in ("batches", "sample_id"):
                    continue
                values = part[name]
                if name not in results:
                    shape = (num_samples, *values.shape[1:])
                    results[name] = array_on_disk(folder / f"{name}.merged", shape, values.dtype)
                results[name][ids] = values
    if not (times == 1).all():
        raise RuntimeError(
            f"{folder}: {int((times == 0).sum())} samples have no prediction and "
            f"{int((times > 1).sum())} have several; remove this folder and predict again."
        )
    return results


def array_on_disk(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array of zeros that lives in a file, so that it may be larger than memory.

    Raises:
        OSError: the disk has no room for it; a mapped file would find out by a bus error.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    with naming(path), open(path, "wb") as file:
        if num_bytes:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    return np.memmap(path, dtype, "r+", shape=shape) if num_bytes else np.zeros(shape, dtype)
