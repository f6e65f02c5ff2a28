"""Throughput: samples, tokens, seconds, the wait for data, and the utilization of a GPU.

Rank 0 appends a line per log interval to `throughput.jsonl`; samples and tokens are of all ranks,
from the plan. No step waits for a device or another rank: their numbers are read one step later.
"""

import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from datamodules.core.planned import PlannedDataModule
from lit_models.run_files import complete_lines
from lit_models.training.exact import ExactModule
from lit_models.training.ledger import HostCopy, is_distributed, ledger_of

FILE_NAME = "throughput.jsonl"
DATA_OF_RANKS = tuple(f"data_{name}_seconds" for name in ("min", "median", "max"))
# Dense TFLOP/s in bfloat16 and float16 by the beginning of a GPU's name; the longest match counts.
# From NVIDIA's and AMD's data sheets, most of which give twice as much, with structured sparsity.
PEAKS = {
    2500.0: ("NVIDIA GB300", "NVIDIA GB200", "AMD Instinct MI355X"),
    2250.0: ("NVIDIA B300", "NVIDIA B200"),
    1307.4: ("AMD Instinct MI300X", "AMD Instinct MI325X"),
    989.4: ("NVIDIA GH200", "NVIDIA H200", "NVIDIA H100", "NVIDIA H800"),
    835.5: ("NVIDIA H200 NVL", "NVIDIA H100 NVL"),
    756.5: ("NVIDIA H100 PCIe",),
    503.8: ("NVIDIA RTX PRO 6000",),
    362.0: ("NVIDIA L40S",),
    312.0: ("NVIDIA A100", "NVIDIA A800"),
    209.5: ("NVIDIA GeForce RTX 5090",),
    165.2: ("NVIDIA GeForce RTX 4090",),
    148.0: ("NVIDIA H20",),
    125.0: ("NVIDIA A10",),
    121.0: ("NVIDIA L4",),
}


def peak_of(name: str, precision: str) -> float | None:
    """Return the dense peak in FLOP/s of a GPU, by torch's name for it, under `trainer.precision`;
    `None` if it is unknown, for a MIG slice, and for precisions other than 16 bits."""
    if "MIG" in name or not re.fullmatch("(bf)?16-(mixed|true)", precision):
        return None
    pairs = [(known, peak) for peak, names in PEAKS.items() for known in names]
    fitting = [(len(known), peak) for known, peak in pairs if re.match(rf"{known}\b", name)]
    return max(fitting)[1] * 1e12 if fitting else None


class Throughput(Callback):
    """Writes a line per log interval to `throughput.jsonl` of the run folder and to the loggers.

    `mfu` is the share of the devices' peak FLOP/s spent on useful tokens, as the module's `flops`
    counts them from the lengths in the plan, which has one document per pair for a retriever. With
    several ranks `slowest_rank` waited longest for data; `DATA_OF_RANKS` give the spread.

    Args:
        peak_flops: dense peak of a device in the run's precision, in FLOP/s; `None` looks it up in
            a table of GPUs, for 16 bits.
    """

    def __init__(self, peak_flops: float | None = None) -> None:
        self.peak_flops = peak_flops
        self._is_on = False
        self._pending: tuple[dict[str, Any], HostCopy] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._is_on, self._pending = not trainer.fast_dev_run, None
        self._path = Path(trainer.default_root_dir) / FILE_NAME
        if self._is_on and trainer.is_global_zero:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            complete_lines(self._path)
        self._attempt = getattr(ledger_of(trainer), "attempt", 1)  # its hook runs first
        self._seen_step = trainer.global_step
        device, self._peak = trainer.strategy.root_device, self.peak_flops
        if self._peak is None and device.type == "cuda":
            self._peak = peak_of(torch.cuda.get_device_name(device), str(trainer.precision))
        self._begin(trainer)

    def _begin(self, trainer: Trainer) -> None:
        self._started_at, self._evaluation_s = time.perf_counter(), 0.0
        self._steps: list[tuple[int, int]] = []  # epoch and step in it
        self._tokens = self._positions = 0  # of rank 0
        # Of the current loader: each `fit` creates one.
        self._loader_before = getattr(trainer.train_dataloader, "wait_s", 0.0)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._is_on:
            return
        load = batch.get("load") if isinstance(batch, dict) else None
        if load is not None:
            self._tokens += load["tokens"]
            self._positions += load["positions"]
        step = trainer.global_step
        if step == self._seen_step:
            return  # in the middle of an accumulation
        self._seen_step = step
        self._write(trainer)
        epoch = 0 if trainer.overfit_batches else trainer.current_epoch
        self._steps.append((epoch, batch["step_index"] if load is not None else 0))
        if trainer.log_every_n_steps and step % trainer.log_every_n_steps == 0:
            self._end_interval(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluation_started_at = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_on:
            self._evaluation_s += time.perf_counter() - self._evaluation_started_at

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the lines of the last interval."""
        if self._is_on and self._steps:
            self._end_interval(trainer)
        self._write(trainer)

    def _end_interval(self, trainer: Trainer) -> None:
        """Prepare the line of the interval that ends here, and begin the next."""
        seconds = max(time.perf_counter() - self._started_at, 1e-9)
        data_s = getattr(trainer.train_dataloader, "wait_s", 0.0) - self._loader_before
        steps_s = max(0.0, seconds - data_s - self._evaluation_s)
        split = {"data": data_s, "evaluation": self._evaluation_s, "steps": steps_s}
        line: dict[str, Any] = {
            "attempt": self._attempt,
            "step": trainer.global_step,
            "steps": len(self._steps),
            "seconds": round(seconds, 6),
            "split": {name: round(value, 6) for name, value in split.items()},
        }
        if isinstance(trainer.datamodule, PlannedDataModule) and self._positions:
            data = trainer.datamodule
            ids = [data.plan("train", epoch).step_ids(step) for epoch, step in self._steps]
            used = data.datasets["train"].document_lengths(np.concatenate(ids)).astype(np.float64)
            line["samples_per_s"] = round(sum(map(len, ids)) / seconds, 3)
            line["tokens_per_s"] = round(used.sum() / seconds, 3)
            line["padding_share"] = round(1 - self._tokens / self._positions, 6)
            if self._peak is not None and isinstance(trainer.lightning_module, ExactModule):
                flops = trainer.lightning_module.flops(used)
                line["mfu"] = round(flops / seconds / self._peak / trainer.world_size, 4)
        waits = torch.zeros(trainer.world_size, device=trainer.strategy.root_device)
        waits[trainer.global_rank].fill_(data_s)
        work = dist.all_reduce(waits, async_op=True) if is_distributed() else None
        self._pending = line, HostCopy(waits, work)
        self._begin(trainer)

    def _write(self, trainer: Trainer) -> None:
        """Write the pending line, if any."""
        if self._pending is None:
            return
        (line, waits), self._pending = self._pending, None
        seconds = np.array(waits.read())
        if len(seconds) > 1:
            spread = np.quantile(seconds, [0, 0.5, 1]).round(6).tolist()
            line |= dict(zip(DATA_OF_RANKS, spread, strict=True))
            line["slowest_rank"] = int(seconds.argmax())
        if not trainer.is_global_zero:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        figures = {f"throughput/{name}_seconds": value for name, value in line["split"].items()}
        figures |= {f"throughput/{n}": line[n] for n in line.keys() - {"attempt", "step", "split"}}
        for logger in trainer.loggers:
            logger.log_metrics(figures, line["step"])
