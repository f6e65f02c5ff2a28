"""PlannedDataModule: the only place in the data that knows replicas.

The plan says which sample is in which optimizer step; this file hands each replica its share, as
an iterable around a DataLoader that Lightning leaves alone, and remembers the position as
(epoch, step, plan digest): integers that are equal on all ranks and valid for any device count.
"""

import glob
import logging
import math
import multiprocessing
import os
import platform
import shutil
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from filelock import FileLock
from lightning.pytorch import LightningDataModule, Trainer

from datamodules.core.loader import LoaderOptions, PlannedDataset, PlannedLoader, auto_workers
from datamodules.core.plan import (
    Batching,
    MicroBatch,
    Plan,
    PlanOptions,
    PlanRequest,
    Rehearsed,
    derive_batching,
    iterate_micro_batches,
    iterate_whole_batches,
    make_plan,
    padding_share,
)
from datamodules.core.store import made_once, mapped_array, own_folder

log = logging.getLogger(__name__)
SEED = "PL_GLOBAL_SEED"  # Lightning's name for it
MAPPED_FROM = 1_000_000  # samples; below, each process makes its own plan in milliseconds
Stage = Literal["train", "validation", "test", "predict"]
# Limits and intervals that users give in global steps, and Lightning takes in micro-batches.
LIMITS: dict[str, Stage] = {
    "limit_train_batches": "train",
    "val_check_interval": "train",
    "limit_val_batches": "validation",
    "limit_test_batches": "test",
    "limit_predict_batches": "predict",
}
STAGES_OF: dict[str, tuple[Stage, ...]] = {
    "fit": ("train", "validation"),
    "validate": ("validation",),
    "test": ("test",),
    "predict": ("predict",),
}


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a module that its data are read by, handed over by `ExactModule`.

    Args:
        recipe: plain values that its network is built by; `None` for a new one.
        tokenizer: folder of the tokenizer that the data must be read with; `None` for any.
        options: of the family, such as the options of generation.
    """

    recipe: dict[str, Any] | None = None
    tokenizer: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


_kept: dict[tuple[PlanRequest, int], Plan] = {}  # the four plans that were used last


def cached_plan(request: PlanRequest, lengths: np.ndarray, epoch: int) -> Plan:
    """Return the plan of an epoch; a large one is mapped from a folder that one process writes.

    Args:
        request: what the plan depends on; its digest names the folder.
        lengths: [N] positions of each sample.
        epoch: from 0.
    """
    key = (request, epoch)
    plan = _kept.pop(key, None)
    if plan is None:
        make = make_plan if request.num_samples < MAPPED_FROM else _mapped_plan
        plan = make(request, lengths, epoch)
    _kept[key] = plan
    for oldest in list(_kept)[:-4]:
        del _kept[oldest]
    return plan


def _mapped_plan(request: PlanRequest, lengths: np.ndarray, epoch: int) -> Plan:
    def write(folder: Path) -> None:
        plan = make_plan(request, lengths, epoch)
        np.save(folder / "order.npy", plan.order)
        np.save(folder / "offsets.npy", plan.offsets)

    # Of this machine: another one that shares the caches would take files away that are in use.
    plans = own_folder("plans") / platform.node() / request.digest()
    plans.mkdir(parents=True, exist_ok=True)
    with FileLock(plans / "lock", mode=0o600):  # the first local process makes it, others wait
        folder = made_once(plans / f"epoch-{epoch}", write)
        for old in plans.glob("epoch-*"):
            if int(old.name.removeprefix("epoch-")) < epoch - 1:
                shutil.rmtree(old)  # processes that still map it keep their view
    return Plan(mapped_array(folder / "order.npy"), mapped_array(folder / "offsets.npy"))


class PlannedDataModule(LightningDataModule):
    """Deals planned batches. A family implements `build`, and `prepare_data` where it caches.

    Args:
        global_batch_size: samples of one optimizer step, over all devices.
        micro_batch_size: samples of one forward call on one device; `auto`: the largest that fits,
            on a CPU the whole share of the device. Accumulation is derived, unless the trainer is
            given one.
        batch_size: the conventional size per device; the global batch then grows with devices.
        plan: how an epoch is cut into steps.
        loader: how batches are made ready.

    Raises:
        ValueError: sizes below 1 or in conflict.
    """

    def __init__(
        self,
        global_batch_size: int = 64,
        micro_batch_size: int | Literal["auto"] = "auto",
        batch_size: int | None = None,
        plan: PlanOptions = PlanOptions(),  # noqa: B008 - frozen
        loader: LoaderOptions = LoaderOptions(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__()
        derive_batching(1, global_batch_size, micro_batch_size, batch_size)
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.batch_size = batch_size
        self.plan_options = plan
        self.loader_options = loader
        self.model = ModelFacts()
        self.rehearsed: Rehearsed | None = None
        self._is_told_of_files = False
        self.datasets: dict[Stage, PlannedDataset] = {}
        self.done_batches: frozenset[int] = frozenset()
        self.find_done_batches: Callable[[], frozenset[int]] = frozenset
        self.resume_position: tuple[int, int] | None = None
        self._limited: Trainer | None = None  # whose limits were converted
        self._given_limits: dict[str, Any] = {}  # as the user gave them to this trainer
        self.given_accumulation = 1  # likewise; 1 where it is derived

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        """Refuse, with a TypeError: Lightning would make what the checkpoint names."""
        raise TypeError(
            f"a checkpoint keeps no arguments of a datamodule; call {cls.__name__}(…) with yours."
        )

    def predict_hint(self, command: str) -> str:
        """Return a line for a shell: `unisono predict …`, completed with data at hand."""
        return command

    @abstractmethod
    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage; every rank calls it once in `setup`."""

    def wanted_stages(self, stage: str) -> list[Stage]:
        """Return what a call of the trainer reads: no validation with `limit_val_batches: 0`."""
        validates = self.trainer is None or self.trainer.limit_val_batches != 0
        is_left_out = stage == "fit" and not validates
        return [name for name in STAGES_OF[stage] if name != "validation" or not is_left_out]

    def setup(self, stage: str) -> None:
        """Build the datasets of the stage and derive accumulation for this many devices."""
        self._warn_of_shared_files()
        if self.trainer is not None:
            # Ranks that drew a seed each would deal out different plans: all take rank 0's.
            seed = self.trainer.strategy.broadcast(os.environ.pop(SEED, None))
            os.environ.update({} if seed is None else {SEED: seed})
        for name in self.wanted_stages(stage):
            if name not in self.datasets:
                self.datasets[name] = self.build(name)
        if self.trainer is not None:
            if self._limited is not self.trainer:
                self._limited, self.rehearsed = self.trainer, None
                self._given_limits = {name: getattr(self.trainer, name) for name in LIMITS}
                self.given_accumulation = self.trainer.accumulate_grad_batches
            if stage == "fit":
                self.trainer.accumulate_grad_batches = self.batching.accumulate_grad_batches
            self._convert_limits()

    def _convert_limits(self) -> None:
        """Set the trainer's limits to micro-batches of this many devices."""
        for name, limit in self._given_limits.items():
            stage = LIMITS[name]
            if stage == "predict":
                if isinstance(limit, int):
                    setattr(self.trainer, name, math.ceil(limit / self.num_replicas))
            elif stage in self.datasets and limit:
                if isinstance(limit, float):
                    if limit == 1.0:
                        continue
                    limit = max(1, int(self.plan(stage, 0).num_steps * limit))
                batching = self.batching if stage == "train" else self.evaluation_batching
                setattr(self.trainer, name, limit * batching.accumulate_grad_batches)

    def _warn_of_shared_files(self) -> None:
        """Warn once of a file that is for training and judges it as well."""
        named: dict[int, Any] = getattr(self, "files", {})
        sets = [
            {Path(found).resolve() for entry in entries for found in [entry, *glob.glob(entry)]}
            for entries in ([f] if isinstance(f, str) else f or [] for f in named.values())
        ]
        shared = sets[0].intersection(set().union(*sets[1:])) if sets else set()
        speaks = self.trainer is None or self.trainer.is_global_zero
        if shared and speaks and not self._is_told_of_files:
            self._is_told_of_files = True
            log.warning(
                "%s is named for training and for validation or test: the model is judged on what "
                "it has learned by heart. Name other files, or leave those of validation and test "
                "out: the training rows are then divided.", min(shared),
            )  # fmt: skip

    @property
    def seeks_micro_batch(self) -> bool:
        """Whether the micro-batch of training is left to a rehearsal."""
        is_open = self.micro_batch_size == "auto" and self.batch_size is None
        return is_open and self.given_accumulation == 1

    def take_micro_batch(self, found: Rehearsed) -> None:
        """Deal with this micro-batch from now on; called before the loaders are made."""
        self.rehearsed = found
        self.trainer.accumulate_grad_batches = self.batching.accumulate_grad_batches
        self._convert_limits()

    def train_dataloader(self) -> PlannedLoader:
        return self._loader("train")

    def val_dataloader(self) -> PlannedLoader:
        return self._loader("validation")

    def test_dataloader(self) -> PlannedLoader:
        return self._loader("test")

    def predict_dataloader(self) -> PlannedLoader:
        self.done_batches = self.find_done_batches()
        return self._loader("predict")

    def state_dict(self) -> dict[str, Any]:
        """Return the position of consumed, not of fetched steps; equal on all ranks."""
        if "train" not in self.datasets or self.trainer is None:
            return {}
        epochs_started = self.trainer.fit_loop.epoch_progress.current.started
        processed = self.trainer.fit_loop.epoch_loop.batch_progress.current.processed
        return {
            "epoch": max(0, epochs_started - 1),
            "step": processed // self.batching.accumulate_grad_batches,
            "plan_digest": self.request("train").digest(),
            "plan": asdict(self.request("train")),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the position, if the plan is the one that the checkpoint was made with.

        Raises:
            ValueError: the plan differs; the differing values are named.
        """
        if not state_dict or "train" not in self.datasets:
            return
        now = asdict(self.request("train"))
        if state_dict["plan_digest"] != self.request("train").digest():
            then = state_dict["plan"]
            changes = [f"{k}: {then.get(k)} -> {now[k]}" for k in now if now[k] != then.get(k)]
            cause = (
                "data.batch_size makes the global batch depend on the number of devices"
                if self.batch_size is not None
                else "the data or the batch options have changed"
            )
            raise ValueError(
                f"the checkpoint follows another plan ({'; '.join(changes)}): {cause}. A resumed "
                "run must use each sample once; restore the old values, or start a new run from "
                "these weights with model.init_from."
            )
        self.resume_position = (state_dict["epoch"], state_dict["step"])

    @property
    def num_replicas(self) -> int:
        """Data-parallel replicas, from the strategy."""
        return self._replicas()[0]

    @property
    def batching(self) -> Batching:
        """The batching for this many devices."""
        micro = self.rehearsed.micro_batch_size if self.rehearsed else self.micro_batch_size
        return derive_batching(
            self.num_replicas,
            self.global_batch_size,
            micro,
            self.batch_size,
            self.given_accumulation,
        )

    @property
    def evaluation_batching(self) -> Batching:
        """The batching of validation and test: the same global batches, accumulation derived."""
        training = self.batching
        return derive_batching(
            self.num_replicas, training.global_batch_size, training.micro_batch_size
        )

    @property
    def seed(self) -> int:
        """Key of the order and of all augmentation."""
        given = self.plan_options.seed
        return int(os.environ.get(SEED, 0)) if given is None else given

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one training epoch, after `limit_train_batches`."""
        accumulation = self.batching.accumulate_grad_batches
        steps = self.plan("train", 0).num_steps
        limit = self.trainer.limit_train_batches if self.trainer is not None else 1.0
        return min(steps, limit // accumulation) if isinstance(limit, int) else steps

    @property
    def plan_facts(self) -> dict[str, Any]:
        """Plain values of the training plan, for the banner and topology.json: `steps_per_epoch`
        and `samples_per_epoch` are those of this run's limits, `planned_steps` of all."""
        dataset, plan, replicas = self.datasets["train"], self.plan("train", 0), self.num_replicas
        batching, lengths = self.batching, dataset.lengths
        most = self.trainer.max_steps if self.trainer is not None else -1
        steps = min(self.steps_per_epoch, most) if most >= 0 else self.steps_per_epoch
        padding = padding_share(plan, lengths, batching, replicas) if dataset.is_padded else 0.0
        return {
            "num_samples": len(lengths),
            "num_replicas": replicas,
            **asdict(batching),
            "steps_per_epoch": steps,
            "samples_per_epoch": int(plan.offsets[steps]),
            "planned_steps": plan.num_steps,
            "padding_share": padding,
            "plan_digest": self.request("train").digest(),
            "global_batch_grows_with_devices": self.batch_size is not None,
            "rehearsal": asdict(self.rehearsed) if self.rehearsed else None,
        }

    def _trainer_stage(self) -> str:
        """Return what the trainer does; fit where there is none."""
        if self.trainer is None or self.trainer.state.fn is None:
            return "fit"
        return self.trainer.state.fn.value

    def request(self, stage: Stage) -> PlanRequest:
        """Return all that the plan of a stage depends on."""
        dataset = self.datasets[stage]
        is_training = stage == "train"
        # A prediction batch must not know the device count, or its file would.
        of_devices = stage != "predict"
        return PlanRequest(
            fingerprint=dataset.fingerprint,
            num_samples=len(dataset.lengths),
            global_batch_size=(
                self.batching.global_batch_size if of_devices else self.global_batch_size
            ),
            seed=self.seed if is_training else 0,
            bucket_window=self.plan_options.bucket_window,
            global_batch_tokens=self.plan_options.global_batch_tokens if is_training else None,
            shuffle=stage != "predict",
        )

    def _replicas(self) -> tuple[int, int]:
        """Return (number of replicas, this one)."""
        strategy = self.trainer.strategy if self.trainer is not None else None
        sampler = getattr(strategy, "distributed_sampler_kwargs", None)
        return (sampler["num_replicas"], sampler["rank"]) if sampler else (1, 0)

    def plan(self, stage: Stage, epoch: int) -> Plan:
        """Return the global steps of one epoch."""
        return cached_plan(self.request(stage), self.datasets[stage].lengths, epoch)

    def _loader(self, stage: Stage) -> PlannedLoader:
        steps = self.plan(stage, 0).num_steps
        if stage == "predict":
            todo = math.ceil((steps - len(self.done_batches)) / self.num_replicas)
            length = max(todo, min(steps, 1))  # see `iterate_whole_batches`
        else:
            batching = self.batching if stage == "train" else self.evaluation_batching
            length = steps * batching.accumulate_grad_batches
        batches = partial(self.micro_batches, stage)
        return PlannedLoader(self.datasets[stage], batches, length, self._loader_kwargs(stage))

    def micro_batches(self, stage: Stage) -> Iterator[MicroBatch]:
        """Yield what this replica takes of the epoch under way, from the position of a resume."""
        num_replicas, replica = self._replicas()
        if stage == "predict":
            plan = self.plan("predict", 0)
            return iterate_whole_batches(plan, num_replicas, replica, self.done_batches)
        batching, epoch, first = self.evaluation_batching, 0, 0
        if stage == "train":
            batching = self.batching
            epoch = self.trainer.current_epoch if self.trainer is not None else 0
            position, self.resume_position = self.resume_position, None
            first = position[1] if position and position[0] == epoch else 0
            if self.trainer is not None and self.trainer.overfit_batches > 0:
                epoch = 0  # the same few batches again and again
        dataset = self.datasets[stage]
        return iterate_micro_batches(
            self.plan(stage, epoch),
            dataset.lengths,
            dataset.target_counts,
            batching,
            num_replicas,
            replica,
            epoch,
            first,
        )

    def _loader_kwargs(self, stage: Stage) -> dict[str, Any]:
        options, trainer = self.loader_options, self.trainer
        on_cpu = trainer is None or trainer.strategy.root_device.type == "cpu"
        workers = options.num_workers
        if workers == "auto":
            workers = auto_workers(1 if trainer is None else trainer.num_devices, on_cpu)
        pins = not on_cpu if options.pin_memory == "auto" else options.pin_memory
        kwargs: dict[str, Any] = {"num_workers": workers, "pin_memory": pins}
        if workers:
            kwargs["prefetch_factor"] = options.prefetch_factor
            kwargs["persistent_workers"] = options.persistent_workers and stage == "train"
            if sys.platform == "linux" and multiprocessing.get_start_method() == "spawn":
                # A rank of ddp_spawn would import everything again in each worker (20 s, not 1).
                kwargs["multiprocessing_context"] = "fork"
        return kwargs
