"""Training under a probe that records the batches, losses and gradient norms of each rank:
`python -m lit_models.certify.probe fit …` trains, then runs every evaluation."""

import hashlib
import json
import math
import os
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from datamodules.core.planned import PlannedDataModule
from lit_models.certify.compare import SEEN, TAPES
from lit_models.cli import UnisonoCLI, launch
from lit_models.errors import run_guarded
from lit_models.training.checkpoints import SAVES
from lit_models.training.ledger import tells_samples
from lit_models.training.optim import gradients
from lit_models.training.sharding import total_norm, whole

EVALUATIONS = {"validate": "validation", "test": "test", "predict": "prediction"}
MOST_ON_AN_AXIS = 64  # numbers of a recorded tensor
STEPS_TO_KILL = 2  # after a checkpoint: lost and repeated


class Probe(Callback):
    """Records in the run folder the samples of each rank and their losses and gradient norms.

    Args:
        attempt: 1 for the first start of a run, 2 for its resume.
        kill_after: optimizer step after which each rank kills itself; two steps before, all save.
        look_at: optimizer step whose weights, module outputs and gradients are recorded, at most 64
            numbers on an axis; no evaluation follows.
        stages: evaluations after the training; `None` tries all and notes why one cannot be run.
    """

    def __init__(
        self,
        attempt: int = 1,
        kill_after: int | None = None,
        look_at: int | None = None,
        stages: list[str] | None = None,
    ) -> None:
        self.attempt, self.kill_after, self.look_at = attempt, kill_after, look_at
        self.stages = stages
        self.tape: dict[str, dict[str, Tensor]] = {}  # place -> sample, "" for all -> values
        self.handles: list[Any] = []

    def note(self, trainer: Trainer, **line: Any) -> None:
        """Append a line of plain values to this rank's file."""
        folder = Path(trainer.default_root_dir) / SEEN
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{self.attempt}-{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self.step, self.rows, self.loss = trainer.global_step, list[str](), 0.0
        self.norm: float | None = None
        self.note(trainer, resumed_from_step=self.step)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, *_: Any) -> None:
        rows = rows_of(batch)
        self.rows += filter(None, rows if tells_samples(trainer) else [])
        if trainer.global_step + 1 == self.look_at:
            for name, weight in module.named_parameters() if not self.tape else ():
                self.tape[f"the weight {name} before it"] = {"": part_of(whole(weight))}
            self.listen(module, rows)

    def listen(self, module: LightningModule, rows: list[str]) -> None:
        """Record the modules' outputs for each sample of a micro-batch [B], until its backward."""
        calls: Counter[str] = Counter()

        def keep(part: nn.Module, args: Any, outputs: Any, name: str) -> None:
            calls[name] += 1
            place = f"the output of {name}" + (f", call {n}" if (n := calls[name]) > 1 else "")
            for tensor in tensors_of(outputs)[:1]:
                if tensor.dim() and len(tensor) == len(rows):
                    kept = {r: part_of(t) for r, t in zip(rows, tensor, strict=True) if r}
                    self.tape.setdefault(place, {}).update(kept)

        for name, part in module.named_modules():
            self.handles += [part.register_forward_hook(partial(keep, name=name))] if name else []

    def on_after_backward(self, *_: Any) -> None:
        while self.handles:
            self.handles.pop().remove()

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Any) -> None:
        grads = gradients(optimizer)
        self.norm = float(total_norm(grads)) if grads else None
        if trainer.global_step + 1 == self.look_at:
            for name, weight in reversed([*module.named_parameters()]):
                if weight.grad is not None:
                    self.tape[f"the gradient of {name}"] = {"": part_of(whole(weight.grad))}
            folder = Path(trainer.default_root_dir) / TAPES
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self.tape, folder / f"{trainer.global_rank}.pt")

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.loss += math.nan if loss is None else float(loss)
        if trainer.global_step == self.step:
            return  # in the middle of an accumulation
        self.step, epoch = trainer.global_step, trainer.current_epoch
        numbers = {"loss": self.loss, "grad_norm": self.norm}
        self.note(trainer, step=self.step, epoch=epoch, rows=self.rows, **numbers)
        self.rows, self.loss = [], 0.0
        if self.kill_after is not None and self.step == self.kill_after - STEPS_TO_KILL:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt")
            SAVES.settle()
        if self.step == self.kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        done = trainer.fit_loop.epoch_loop.batch_progress  # complete, unless max_steps cut it
        if done.is_last_batch or done.current.ready >= trainer.num_training_batches:
            self.note(trainer, ended=trainer.current_epoch)

    def on_validation_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        verb = trainer.state.fn
        if verb is not None and verb in EVALUATIONS:  # not inside a training
            rows = [*filter(None, rows_of(batch) if tells_samples(trainer) else [])]
            self.note(trainer, evaluated={EVALUATIONS[verb]: rows})
            if verb == "predict" and not isinstance(trainer.datamodule, PlannedDataModule):
                self.note(trainer, predicted={"predictions": lines_of(outputs, rows)})

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


def tensors_of(batch: Any) -> list[Tensor]:
    """Return the tensors of a batch or an output, however it is nested, in their order."""
    tensors: list[Tensor] = []
    apply_to_collection(batch, Tensor, tensors.append)
    return tensors


def rows_of(batch: Any) -> list[str]:
    """Return a name for each sample of a batch [B]: in a planned batch its id, "" for a filler;
    else the hash of its rows in all tensors that have B rows."""
    if isinstance(batch, dict) and {"sample_id", "weight"} <= batch.keys():
        pairs = zip(batch["sample_id"].tolist(), batch["weight"].tolist(), strict=True)
        return [str(sample) if weight > 0 else "" for sample, weight in pairs]
    tensors = [tensor for tensor in tensors_of(batch) if tensor.dim()]
    tensors = [tensor for tensor in tensors if len(tensor) == len(tensors[0])]
    parts = [t.cpu().contiguous().reshape(len(t), -1).view(torch.uint8).numpy() for t in tensors]
    rows = (b"".join(row.tobytes() for row in row_parts) for row_parts in zip(*parts, strict=True))
    return [hashlib.sha256(row).hexdigest()[:8] for row in rows]


def lines_of(outputs: Any, rows: list[str]) -> list[str]:
    """Return a line for each row of a prediction: its name and its numbers in nine digits."""
    tensors = [t for t in tensors_of(outputs) if t.dim() and len(t) == len(rows)]
    lines = []
    for number, row in enumerate(rows):
        values = [v for t in tensors for v in t[number].double().flatten().tolist()]
        lines.append(" ".join([row, *(f"{value:.9g}" for value in values)]) + "\n")
    return lines


def part_of(tensor: Tensor) -> Tensor:
    """Return a copy in float64 of the first numbers on each axis."""
    part = tensor.detach()[tuple(slice(MOST_ON_AN_AXIS) for _ in range(tensor.dim()))]
    return part.cpu().double().clone()


def evaluate(trainer: Trainer, module: LightningModule, data: Any, probe: Probe) -> None:
    """Run the probe's evaluations with the current weights, and record their results."""
    for verb, stage in EVALUATIONS.items():
        if stage not in (EVALUATIONS.values() if probe.stages is None else probe.stages):
            continue
        says = "return_predictions" if verb == "predict" else "verbose"
        try:
            results = getattr(trainer, verb)(module, datamodule=data, **{says: False}) or []
        except Exception as error:  # shown in the certificate
            if probe.stages is not None:
                raise
            probe.note(trainer, left_out={stage: str(error)})
            continue
        if trainer.is_global_zero:
            metrics = {name: value for values in results for name, value in values.items()}
            probe.note(trainer, metrics=metrics)
            if verb == "predict" and isinstance(data, PlannedDataModule):
                probe.note(trainer, output=str(data.predict_output_path))


class ProbedCLI(UnisonoCLI):
    """Runs the probe's evaluations after a training, with its final weights."""

    def fit(self, **kwargs: Any) -> None:
        super().fit(**kwargs)
        probe = next(c for c in self.trainer.callbacks if isinstance(c, Probe))
        if probe.look_at is None:
            evaluate(self.trainer, self.model, self.datamodule, probe)


def main() -> int:
    """Run the command line of this process and return its exit status."""
    return run_guarded(lambda: launch(sys.argv[1:], ProbedCLI))


if __name__ == "__main__":
    from lit_models.certify import probe  # the command line names its classes

    sys.exit(probe.main())
