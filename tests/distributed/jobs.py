"""Many runs in one world, whose ranks start only once; each job writes a folder."""

import contextlib
import hashlib
import json
import os
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import StrategyRegistry
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_models.causal_lm.module import Samples
from lit_models.certify.probe import EVALUATIONS, Probe, evaluate
from lit_models.training import AveragedWeights, Rehearsal, optim
from lit_models.training.checkpoints import LastCheckpoint
from lit_models.training.sharding import local_parts, num_copies, whole
from lit_models.training.strategies import FullyShardedStrategy, replicated
from tests.distributed.families import FAMILIES, SPECIAL
from tests.toy import callbacks_with, toy_trainer

STEPS = 10
STAGES = [*EVALUATIONS.values()]


def run_jobs(folder: Path, jobs: list[dict[str, Any]]) -> None:
    """Run jobs in this process, one after the other, each in the folder of its name."""
    torch.set_num_threads(1)
    for job in jobs:
        run_job(folder / job["name"], job)
    if dist.is_initialized():
        dist.destroy_process_group()


def run_job(folder: Path, job: dict[str, Any]) -> None:
    """Fit, validate, test and predict as a job says, and write its facts into the folder.

    Args:
        folder: of the job.
        job: `family` and `strategy`; optionally `data` and `trainer` options, `sharding` options,
            options of the `last` checkpoint, the `decay` of averaged weights, more `callbacks`,
            `resume` (a checkpoint), `positions` (the memory of each rank, in positions),
            `seeds_apart` (each rank has its own seed), `devices` (for strategies that start
            their own processes), `is_named` (the strategy is Lightning's), and the `stages` after
            training. A language model with such stages also writes samples while it learns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rank = int(os.environ.get("RANK", "0"))
    seed_everything(1 + rank * job.get("seeds_apart", False), verbose=False)
    module, data = {**FAMILIES, **SPECIAL}[job["family"]](folder, job.get("data", {}))
    stages, logger = [*job.get("stages", STAGES)], None
    probe = Probe(attempt=2 if "resume" in job else 1, stages=stages)
    every = {"every_n_steps": 5, "every_epoch": False}
    own = [LastCheckpoint(**{**every, **job.get("last", {})}), *job.get("callbacks", ()), probe]
    own += [AveragedWeights(job["decay"])] if "decay" in job else []
    if "positions" in job:
        own.append(Rehearsal(HandMade(module, job["positions"][rank])))
    strategy = job["strategy"]
    if not job.get("is_named"):  # as the command line does
        strategy = replicated(strategy) or strategy
    if "sharding" in job:  # by name: Lightning rejects float64 with an object of this class
        strategy = f"{strategy}-{job['name']}"
        StrategyRegistry.register(strategy, FullyShardedStrategy, **job["sharding"])
    if job["family"] == "causal_lm" and stages:
        logger = TensorBoardLogger(folder, name="board", version="")
        own.append(Samples(["the", "d"], 3, module.generation))
    trainer = toy_trainer(
        folder,
        devices=job.get("devices", int(os.environ.get("WORLD_SIZE", "1"))),
        strategy=strategy,
        callbacks=callbacks_with(*own),
        logger=logger or False,
        **{"max_steps": STEPS, "max_epochs": 9, "gradient_clip_val": 1.0, **job.get("trainer", {})},
    )
    start, counted = StartDigest(), HostBytes()
    is_large = job["family"].startswith("large")
    trainer.callbacks += [] if is_large else [start]  # it gathers whole weights
    with counted if is_large else contextlib.nullcontext():
        trainer.fit(module, data, ckpt_path=job.get("resume"), weights_only=True)
    facts: dict[str, Any] = {"bytes": bytes_here(trainer), "world_size": trainer.world_size}
    facts["start"], facts["most_bytes"] = start.digest, counted.most
    facts["micro_batch_size"] = data.batching.micro_batch_size
    digest, num_bytes = hashlib.sha256(), 0  # of parameters that other ranks hold as well
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and num_copies(parameter) > 1:
            held = parameter.to_local().detach().numpy().tobytes()
            digest.update(held)
            num_bytes += len(held)
    facts["copies"], facts["bytes_of_copies"] = digest.hexdigest(), num_bytes
    evaluate(trainer, module, data, probe)
    facts["bytes_after"] = bytes_here(trainer)
    name = "facts.json" if trainer.is_global_zero else f"facts-{trainer.global_rank}.json"
    (folder / name).write_text(json.dumps(facts))


class StartDigest(Callback):
    """Keeps a hash of all weights at the start of a training in this process, shards gathered."""

    digest = ""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        digest = hashlib.sha256()
        for name, parameter in pl_module.named_parameters():
            digest.update(name.encode() + whole(parameter).detach().double().numpy().tobytes())
        self.digest = digest.hexdigest()


class HostBytes(TorchDispatchMode):
    """Keeps the most bytes of tensors made by functions that were alive at the same time."""

    alive, most = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = (filter(torch.is_tensor, tree_leaves(tree)) for tree in (args, result))
        input_storages = {part.untyped_storage()._cdata for part in local_parts([*inputs])}
        for storage in (part.untyped_storage() for part in local_parts([*outputs])):
            if storage._cdata not in input_storages and storage.device.type == "cpu":
                self.add(storage.nbytes())  # neither a view nor on `meta`
                weakref.finalize(storage, self.add, -storage.nbytes())
        return result

    def add(self, size: int) -> None:
        self.alive += size
        self.most = max(self.most, self.alive)


class HandMade:
    """A memory of so many positions, of which a batch takes as many as it has."""

    def __init__(self, module: Any, num_positions: int) -> None:
        self.capacity_bytes, self.tried = num_positions * 10**9, list[int]()  # rows of each trial
        training_step = module.training_step

        def noting_step(batch: Any, batch_idx: int) -> Any:
            self.rows, self.positions = batch["values"].shape
            return training_step(batch, batch_idx)

        module.training_step = noting_step

    def start(self) -> None:
        """Do nothing: a trial has one batch."""

    def peak_bytes(self) -> int:
        self.tried.append(self.rows)
        return self.rows * self.positions * 10**9  # weights are negligible beside it


class GradientSums(Callback):
    """Writes how many sums over ranks the training micro-batches took, in order."""

    def on_train_start(self, *_: Any) -> None:
        self.counts: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.mode = CommDebugMode()
        self.mode.__enter__()

    def on_after_backward(self, *_: Any) -> None:
        self.mode.__exit__(None, None, None)
        counted = self.mode.get_comm_counts()
        sums = (n for name, n in counted.items() if "allreduce" in str(name).replace("_", ""))
        self.counts.append(sum(sums))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            (Path(trainer.default_root_dir) / "sums.json").write_text(json.dumps(self.counts))


class OfRanks(Callback):
    """Writes the largest number of blocks that were whole at once in an evaluation during training,
    and the number of matrices that each rank orthogonalised."""

    def on_train_start(self, *_: Any) -> None:
        self.counting = mock.patch.object(optim, "orthogonal", wraps=optim.orthogonal)
        self.orthogonal = self.counting.start()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.counting.stop()
        path = Path(trainer.default_root_dir) / f"orthogonal-{trainer.global_rank}.json"
        path.write_text(json.dumps(self.orthogonal.call_count))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        blocks, self.counts = pl_module.blocks(), [0]

        def count(*_: Any) -> None:
            is_whole = (not isinstance(next(b.parameters()), DTensor) for b in blocks)
            self.counts.append(sum(is_whole))

        self.handles = [block.register_forward_pre_hook(count) for block in blocks]

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        for handle in self.handles:
            handle.remove()
        if trainer.is_global_zero:
            most = json.dumps(max(self.counts))
            (Path(trainer.default_root_dir) / "gathered.json").write_text(most)


def bytes_here(trainer: Any) -> dict[str, int]:
    """Return the bytes of parameters and moments, in total and on this rank."""
    values: list[Any] = [*trainer.lightning_module.parameters()]
    for optimizer in trainer.optimizers:
        values += [value for state in optimizer.state.values() for value in state.values()]
    values = [value for value in values if torch.is_tensor(value) and value.dim()]
    local = sum(part.untyped_storage().nbytes() for part in local_parts(values))
    return {"whole": sum(v.numel() * v.element_size() for v in values), "local": local}
