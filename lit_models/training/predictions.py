"""Predictions, and the table of errors of an evaluation.

Shapes: B samples, A numbers in all answers together, K samples kept.
"""

import glob
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics.utilities.distributed import gather_all_tensors

from datamodules.core.store import naming, replacing
from datamodules.files.tables import check_installed, write_table
from lit_models.training.exact import ExactModule
from lit_models.training.ledger import is_distributed, tells_samples
from lit_models.training.metrics import SampleResult
from lit_models.training.sharding import whole

MOST_WRONG, MOST = 100_000, 1000  # rows of a table: with wrong answers only, with any answers
# Losses are rounded to 1 part in this number, since batches of another size change their last
# digits. Two losses on either side of an edge of this grid still differ, by one of its steps.
PARTS = 4096.0
MOST_CHARACTERS = 2000  # of a text
# Families' names for the three columns that a reader looks for.
COLUMNS = {
    **dict.fromkeys(("text", "query"), "input"),
    **dict.fromkeys(("codes", "candidates", "target", "trained on", "goes on"), "truth"),
    **dict.fromkeys(("given", "first relevant", "written", "explanation"), "answer"),
}
LAST = ("confidence", "seen in training", "sample", "loss")
DIGITS = 12  # of the digest in the name of a folder of parts
DROPPED, BATCHES = -torch.inf, 64  # loss and id of rows to drop; batches between drops


class PredictionWriter(Callback):
    """Writes the results of `predict_step`, and lets the datamodule turn them into the user's file.

    Each rank writes part files, atomically, of whole batches of the plan. Batches do not depend on
    the device count, so that a killed prediction can go on with any number of devices. At the end
    rank 0 checks that each sample occurs exactly once and calls
    `datamodule.write_predictions(results, path)`.
    """

    part_batches, part_s = 32, 60.0  # batches or seconds; a kill loses at most so much per device
    _rows: list[dict[str, np.ndarray]]  # results of batches that are in no part file yet
    _folder: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Before any work, refuse a file that exists, or of a kind whose extra is not installed."""
        if stage != "predict":
            return
        check_installed(output := trainer.datamodule.predict_output_path)
        if output.exists():
            raise ValueError(
                f"{output} exists and is not overwritten; move it away, or name another file "
                "with --data.predict_output."
            )
        trainer.datamodule.find_done_batches = lambda: self.done_batches(trainer, pl_module)
        self._rows, self._written_at = [], time.monotonic()  # an interrupt may have left some

    def done_batches(self, trainer: Trainer, pl_module: LightningModule) -> frozenset[int]:
        """Return the batches that an interrupted prediction with the same weights has written; the
        loader calls it on every rank."""
        output = trainer.datamodule.predict_output_path
        request, recipe = trainer.datamodule.request("predict"), getattr(pl_module, "recipe", None)
        # The folder of parts is named by a digest of all that a prediction depends on.
        facts = [request.digest(), dict(pl_module.hparams), recipe, str(trainer.precision)]
        digest = weights_digest(trainer, facts)[:DIGITS]
        self._folder = output.with_name(f".{output.name}.{digest}.parts")
        self._folder.mkdir(parents=True, exist_ok=True)
        done: set[int] = set()
        for path in sorted(self._folder.glob("part-*.npz")):
            with np.load(path, allow_pickle=False) as part:
                done |= set(part["batches"].tolist())
        return trainer.strategy.broadcast(frozenset(done))  # a rank may see an older folder

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Keep a batch's results, unless it is a filler or another rank of the group reports it."""
        if float(batch["weight"][0]) == 0 or not tells_samples(trainer):
            return
        rows = {name: value.cpu() for name, value in outputs.items()}
        rows |= {n: v.float() for n, v in rows.items() if v.dtype == torch.bfloat16}  # for numpy
        rows["sample_id"] = batch["sample_id"].cpu()
        rows["batches"] = torch.tensor([batch["step_index"]])
        self._rows.append({name: value.numpy() for name, value in rows.items()})
        is_late = time.monotonic() - self._written_at > self.part_s
        if is_late or len(self._rows) >= self.part_batches:
            self._flush()

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merge on rank 0 after the last collective: no rank waits, however long it takes."""
        self._flush()
        trainer.strategy.barrier("predictions")
        if trainer.is_global_zero and self._folder is not None:
            data, output = trainer.datamodule, trainer.datamodule.predict_output_path
            dataset = data.datasets["predict"]
            num_samples = len(dataset.lengths)
            data.write_predictions(merged(self._folder, num_samples), output)
            for folder in output.parent.glob(f".{glob.escape(output.name)}.{'?' * DIGITS}.parts"):
                shutil.rmtree(folder)  # also those of killed predictions with other options
            print(f"{num_samples:,} {dataset.noun} predicted, written to {output}", flush=True)

    def _flush(self) -> None:
        if not self._rows or self._folder is None:
            return
        rows, self._rows, self._written_at = self._rows, [], time.monotonic()
        arrays: dict[str, Any] = {n: np.concatenate([row[n] for row in rows]) for n in rows[0]}
        target = self._folder / f"part-{rows[0]['batches'][0]:09d}.npz"
        with naming(target), replacing(target) as unfinished, open(unfinished, "wb") as file:
            np.savez(file, **arrays)


def weights_digest(trainer: Trainer, facts: Any) -> str:
    """Return a hex digest of plain values and of the module's weights; all processes call it."""
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name, value in trainer.strategy.lightning_module_state_dict().items():
        value = whole(value)
        if trainer.is_global_zero:
            key.update(name.encode())
            key.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return trainer.strategy.broadcast(key.hexdigest())


def merged(folder: Path, num_samples: int) -> dict[str, np.ndarray]:
    """Return name -> [N, …] results in the order of sample ids, in files beside the parts.

    Raises:
        RuntimeError: a sample is missing or occurs more than once.
    """
    results: dict[str, np.ndarray] = {}
    times = np.zeros(num_samples, np.int32)
    for path in sorted(folder.glob("part-*.npz")):
        with np.load(path, allow_pickle=False) as part:
            ids = part["sample_id"]
            np.add.at(times, ids, 1)
            for name in (n for n in part.files if n not in ("batches", "sample_id")):
                values = part[name]
                if name not in results:
                    shape = (num_samples, *values.shape[1:])
                    results[name] = array_on_disk(folder / f"{name}.merged", shape, values.dtype)
                results[name][ids] = values
    if not (times == 1).all():
        raise RuntimeError(
            f"{folder}: {int((times == 0).sum())} samples have no prediction and "
            f"{int((times > 1).sum())} have several, and each input must get a row: predict again "
            "without limit_predict_batches and fast_dev_run, or remove this folder first."
        )
    return results


def array_on_disk(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array of zeros in a memory-mapped file, so that it may be larger than memory."""
    num_bytes = math.prod(shape) * dtype.itemsize
    with naming(path), open(path, "wb") as file:
        if num_bytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # else a full disk is a bus error
        file.truncate(num_bytes)
    return np.memmap(path, dtype, "r+", shape=shape) if num_bytes else np.zeros(shape, dtype)


class ErrorTable(Callback):
    """Writes the samples that went wrong in a test to `errors-test.csv`, the largest loss first.

    A row is a sample: input, truth and answer, the model's confidence and whether the text was in
    the training data (if the family knows them), its number in the split and its loss. If a family
    marks wrong answers, these are listed, up to `MOST_WRONG`; else the `MOST` samples with the
    largest losses. Tables are nearly always equal on any number of devices, see `PARTS`. A module
    whose `test_step` returns no `SampleResult` gets no file.
    """

    _rows: list[Tensor]  # [B, 4 + A] of `rows_of`, on the device of the batches
    _sizes: dict[str, int]  # numbers in each answer

    def on_test_epoch_start(self, *_: Any) -> None:
        self._rows = []

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if not isinstance(outputs, SampleResult):
            return
        self._sizes = {name: values[0].numel() for name, values in outputs.answers.items()}
        self._most = MOST if outputs.is_wrong is None else MOST_WRONG
        weight = batch["weight"] * tells_samples(trainer)
        self._rows.append(rows_of(outputs, batch["sample_id"], weight))
        if len(self._rows) == BATCHES:
            self._rows = [worst_of(torch.cat(self._rows), self._most)]

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._rows:
            return  # on all ranks alike: each has the same number of batches
        rows = worst_of(torch.cat(self._rows), self._most)
        if is_distributed():
            rows = worst_of(torch.cat(gather_all_tensors(rows)), self._most)
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        assert isinstance(pl_module, ExactModule)
        dataset = trainer.datamodule.datasets["test"]  # type: ignore[attr-defined]
        samples = []
        for loss, number, confidence, seen, *values in rows.tolist():
            answers = {n: [values.pop(0) for _ in range(size)] for n, size in self._sizes.items()}
            texts = {**dataset.describe(int(number), 0), **pl_module.in_words(answers)}
            sure = "" if math.isnan(confidence) else f"{confidence:.3g}"
            labels = (sure, {1.0: "yes", 0.0: "no"}.get(seen, ""))
            samples.append((texts, (*labels, str(int(number)), f"{loss:.3g}")))
        path = Path(trainer.default_root_dir) / "errors-test.csv"
        write_table(path, as_table(samples))
        print(f"errors: {path} ({len(samples)} samples, the largest loss first)")


def rows_of(result: SampleResult, sample_id: Tensor, weight: Tensor) -> Tensor:
    """Return [B, 4 + A] float64: loss, rounded to 1 part in PARTS, sample id, confidence, seen,
    answers; NaN if unknown. Loss and id of fillers and right answers are minus infinity."""
    is_dropped = weight == 0
    if result.is_wrong is not None:
        is_dropped = is_dropped | ~result.is_wrong
    mantissa, exponent = torch.frexp(result.loss.detach().double())
    loss = torch.ldexp((mantissa * PARTS).round() / PARTS, exponent)
    unknown = torch.full_like(loss, torch.nan)
    heads = [values.masked_fill(is_dropped, DROPPED) for values in (loss, sample_id.double())]
    for values in (result.confidence, result.is_seen):
        heads.append(unknown if values is None else values.detach().double())
    answers = [v.detach().double().reshape(len(v), -1) for v in result.answers.values()]
    return torch.cat([torch.stack(heads, dim=1), *answers], dim=1)


def worst_of(rows: Tensor, number: int) -> Tensor:
    """Return [K, 4 + A]: the rows [B, 4 + A] with the largest losses, NaN first, ties by id."""
    rows = rows[rows[:, 1] >= 0]
    rows = rows[rows[:, 1].argsort(stable=True)]
    return rows[rows[:, 0].argsort(descending=True, stable=True)][:number]


def as_table(samples: Sequence[tuple[dict[str, str], tuple[str, ...]]]) -> list[list[str]]:
    """Return header and rows of a table of samples: texts by name, then the columns `LAST`."""
    names = list(dict.fromkeys(name for texts, _ in samples for name in texts))
    rows = []
    for texts, last in samples:
        words = [texts.get(name, "") for name in names]
        cut = [w if len(w) <= MOST_CHARACTERS else f"{w[:MOST_CHARACTERS]}…" for w in words]
        rows.append([*cut, *last])
    return [[*(COLUMNS.get(name, name) for name in names), *LAST], *rows]
