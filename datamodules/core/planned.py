"""Planned datasets, their loader and datamodule: the only data code that knows of replicas.

The plan says which sample is in which optimizer step. This file loads the share of one replica,
through an iterable around a DataLoader that Lightning leaves alone, and stores the position as
(epoch, step, plan digest): values that are equal on all ranks and valid for any device count.
"""

import glob
import logging
import math
import multiprocessing
import os
import shlex
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, Dataset

from datamodules.core.batches import PlannedBatch
from datamodules.core.plan import (
    Batching,
    MicroBatch,
    Plan,
    PlanOptions,
    PlanRequest,
    Rehearsed,
    count_targets,
    derive_batching,
    iterate_micro_batches,
    iterate_whole_batches,
)
from datamodules.files.tables import SUFFIXES, Files, check_output, expand_files, output_like, paths
from datamodules.shards.order import planned_epoch

RESERVED = frozenset(PlannedBatch.__annotations__)
log = logging.getLogger(__name__)
PREFETCHED = 4  # batches that a worker keeps ready; without workers, made in one go (warm caches)
LEAST_WORKERS = 2  # beside a GPU, which would wait for batches made in the training process
SEED = "PL_GLOBAL_SEED"  # Lightning's environment variable for `seed_everything`
Stage = Literal["train", "validation", "test", "predict"]
# Limits and intervals that users state in global steps and Lightning reads in micro-batches.
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


class PlannedDataset(Dataset):
    """One split with random access by sample id 0 … N - 1. Subclasses implement `example` and
    `collate`, or `batch` where all samples of a batch are read at once.

    Attributes:
        lengths: [N] integers, positions of each sample before augmentation.
        fingerprint: hex digest of the content that the plan depends on.
        target_counts: loss term -> [N] targets of each sample; `None` means one per sample.
        is_padded: whether the samples of a micro-batch are padded to the longest of them.
        least_shape: smallest (rows, positions) of a padded micro-batch, for compiled code.
        noun: plural noun for the samples in the line that counts predictions, such as "rows".
    """

    lengths: np.ndarray
    fingerprint: str
    target_counts: dict[str, np.ndarray | None]
    is_padded: bool = True
    least_shape: tuple[int, int] = (0, 0)
    noun: str = "inputs"

    def example(self, sample_id: int, epoch: int) -> Any:
        """Return one sample; randomness is keyed by (seed, epoch, sample id)."""
        raise NotImplementedError

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Return the padded batch without the keys of `PlannedBatch`."""
        raise NotImplementedError

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, Any]:
        """Return the padded batch of several samples [B]."""
        return self.collate([self.example(i, epoch) for i in sample_ids.tolist()])

    def document_lengths(self, ids: np.ndarray) -> np.ndarray:
        """Return the lengths of all documents in samples [n]; attention stays in a document."""
        return self.lengths[ids]

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return what the network sees of a sample in an epoch, as name -> readable text."""
        return {"length": str(self.lengths[sample_id])}

    def collated(self, batch: MicroBatch) -> dict[str, Any]:
        """Return the tensors of one micro-batch with the keys of `PlannedBatch`.

        Raises:
            ValueError: the dataset's own `collate` returns one of these keys.
        """
        own = self.batch(batch.ids, batch.epoch)
        if not RESERVED.isdisjoint(own):
            taken = ", ".join(f'"{key}"' for key in own if key in RESERVED)
            raise ValueError(
                f"collate of {type(self).__name__} returns {taken}: the plan fills in "
                f"{', '.join(sorted(RESERVED))} itself, and a dataset must not; rename its key."
            )
        used, lengths = batch.ids[batch.weights > 0], self.lengths[batch.ids]
        longest = int(lengths[lengths.argmax()])  # `lengths.max()` takes three times as long
        rows, longest = max(len(lengths), self.least_shape[0]), max(longest, self.least_shape[1])
        return {
            **own,
            "sample_id": torch.from_numpy(batch.ids.astype(np.int64)),
            "weight": torch.from_numpy(batch.weights.copy()),
            "step_index": batch.step,
            "num_targets": {
                term: int(count) for term, count in count_targets(used, self.target_counts).items()
            },
            "load": {
                "samples": len(used),
                "tokens": int(lengths.dot(batch.weights)),
                "positions": longest * rows if self.is_padded else int(lengths.sum()),
            },
            "step_denominators": batch.denominators,
        }

    __getitems__ = collated  # which the DataLoader calls, in a worker process if there are any


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are loaded.

    Args:
        num_workers: processes that prepare batches; `auto` divides the usable CPUs by the training
            processes on this machine (2 to 16 workers), and is 0 where the CPUs do the training.
    """

    num_workers: int | Literal["auto"] = "auto"


def auto_workers(local_processes: int, on_cpu: bool) -> int:
    """Return how many loader processes `num_workers: auto` means for one of `local_processes`
    training processes on this machine; 0 where training itself computes on the CPUs."""
    if on_cpu:
        return 0
    shared = usable_cpus() // max(1, local_processes)
    return min(max(int(os.environ.get("SLURM_CPUS_PER_TASK") or shared), LEAST_WORKERS), 16)


def usable_cpus() -> int:
    """Return how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _MicroBatchSampler:
    """Yields what the DataLoader fetches; evaluated lazily, anew in each epoch."""

    def __init__(self, micro_batches: Callable[[], Iterator[MicroBatch]]) -> None:
        self.micro_batches = micro_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        yield from self.micro_batches()


class PlannedLoader:
    """The micro-batches of one replica, epoch after epoch.

    It wraps a DataLoader instead of being one, so that Lightning injects no sampler. The position
    is read at the first `next`, since Lightning calls `iter` before it restores the position.

    Args:
        micro_batches: called at the first `next`; yields the micro-batches to fetch.
        length: micro-batches of a whole epoch, independent of the position.
    """

    def __init__(
        self,
        dataset: PlannedDataset,
        micro_batches: Callable[[], Iterator[MicroBatch]],
        length: int,
        loader_options: dict[str, Any],
    ) -> None:
        self.dataset = dataset
        self._length = length
        self.wait_s = 0.0  # seconds that training has waited for batches so far
        sampler = _MicroBatchSampler(micro_batches)
        self._options = {"batch_sampler": sampler, "collate_fn": dict, **loader_options}

    @cached_property
    def loader(self) -> DataLoader:
        """DataLoader over the dataset, which returns whole micro-batches."""
        return DataLoader(self.dataset, **self._options)

    def close(self) -> None:
        """End the worker processes. The garbage collector would close their queues first; workers
        would then miss the signal to end, and torch waits five seconds for each."""
        vars(self).pop("loader", None)

    def __len__(self) -> int:
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, as the datamodule stores the position. A loader without this method and
        the next one makes Lightning warn when a run resumes within an epoch."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing, see `state_dict`."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches, number = iter(self.loader), 1 if self.loader.num_workers else PREFETCHED
        while True:
            start = time.perf_counter()
            ready = list(islice(batches, number))
            self.wait_s += time.perf_counter() - start
            if not ready:
                return
            yield from ready


@dataclass(frozen=True)
class ModelFacts:
    """What `ExactModule` tells its datamodule before data are read, and with the recipe again."""

    # Plain values from which the network is built; `None` for a new network.
    recipe: dict[str, Any] | None = None
    # Folder of the tokenizer that the model needs; `None` where any will do.
    tokenizer: str | None = None
    # Options of the family, such as those of generation.
    options: Mapping[str, Any] = field(default_factory=dict)


def own_files_hint(data: Any, command: str) -> str:
    """Return a `predict_hint` that names a file of the run, from its last split that has one."""
    files = data.store_request().files
    path = next(paths[0] for _, paths in sorted(files.items(), reverse=True) if paths)
    return f"{command} --{data.predict_option}={shlex.quote(str(path))}"


class PlannedDataModule(LightningDataModule):
    """Loads planned batches. A family implements `build`, and `prepare_data` if it has a cache.

    Args:
        global_batch_size: samples of one optimizer step, over all devices.
        micro_batch_size: samples of one forward call on one device; `auto` is the largest that fits
            a GPU, and on a CPU the device's whole share. Accumulation follows from it, unless
            trainer.accumulate_grad_batches is set.
        plan: how an epoch is cut into steps.
        loader: how batches are loaded.

    Raises:
        ValueError: sizes below 1 or in conflict.
    """

    def __init__(
        self,
        global_batch_size: int = 64,
        micro_batch_size: int | Literal["auto"] = "auto",
        plan: PlanOptions = PlanOptions(),  # noqa: B008 - frozen
        loader: LoaderOptions = LoaderOptions(),
    ) -> None:
        super().__init__()
        derive_batching(1, global_batch_size, micro_batch_size)
        self.global_batch_size = global_batch_size
        self.micro_batch_size = micro_batch_size
        self.plan_options = plan
        self.loader_options = loader
        self.model = ModelFacts()
        self.recipe: dict[str, Any] | None = None  # with which the data were last read
        self.rehearsed: Rehearsed | None = None
        self.datasets: dict[Stage, PlannedDataset] = {}
        self._plans: dict[tuple[PlanRequest, int], Plan] = {}
        self._train_loader: PlannedLoader | None = None
        self.find_done_batches: Callable[[], frozenset[int]] = frozenset
        self.resume_position: tuple[int, int] | None = None
        self._limited: Trainer | None = None  # trainer whose limits were converted
        self._given_limits: dict[str, Any] = {}  # the user's values of this trainer
        self.given_accumulation = 1  # the user's value; 1 where it is derived

    @classmethod
    def load_from_checkpoint(cls, *args: Any, **kwargs: Any) -> NoReturn:  # type: ignore[override]
        """Raise TypeError: Lightning would instantiate whatever the checkpoint names."""
        raise TypeError(
            f"a checkpoint keeps no arguments of a datamodule; call {cls.__name__}(…) with yours."
        )

    # Input of a prediction: its files, the option that names them, the suffixes they may have.
    predict_files: Files = None
    predict_option = "data.predict_files"
    predict_suffixes: tuple[str, ...] = SUFFIXES
    # Output of a prediction. `table` holds `TableOptions` where it is the input with more columns.
    table: Any = None
    predict_output: str | None = None  # path that the user names
    output_suffixes: tuple[str, ...] = ("",)  # suffixes that it may have
    output_mark = ""  # part of the default name, after the name of the first input file

    @property
    def predict_paths(self) -> list[Path]:
        """Files to predict; ValueError where none is named."""
        option, suffixes = self.predict_option, self.predict_suffixes
        if not (files := expand_files(self.predict_files, option, suffixes)):
            raise ValueError(f"predict needs files: name them with --{option}=mine{suffixes[0]}.")
        return files

    @property
    def default_output(self) -> str:
        """Default name of a prediction in the run folder."""
        return output_like(self.predict_paths, self.output_mark, self.output_suffixes)

    @property
    def predict_output_path(self) -> Path:
        """Path of a prediction; ValueError where no such file can be written."""
        name = self.predict_output
        path = self.run_folder / self.default_output if name is None else Path(name).expanduser()
        if not path.name.lower().endswith(self.output_suffixes):
            suffixes = " or ".join(self.output_suffixes)
            raise ValueError(f'{path} ends in "{path.suffix}"; name a file in {suffixes}.')
        if self.table is not None:
            check_output(path, self.predict_paths, self.table)
        return path

    def predict_hint(self, command: str) -> str:
        """Return a shell line `unisono predict …`, completed with data of this run."""
        return command

    @property
    def run_folder(self) -> Path:
        """The folder of the run; without a trainer the working folder."""
        return Path(self.trainer.default_root_dir if self.trainer is not None else ".")

    @abstractmethod
    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage; every rank calls it once in `setup`."""

    def trained_recipe(self, stage: str) -> dict[str, Any] | None:
        """Return the recipe of the model under evaluation, for reading data; `None` in training.

        Raises:
            ValueError: a prediction has no trained model.
        """
        if stage == "fit":
            return None
        recipe = self.model.recipe or self.recipe
        if recipe is None and stage == "predict":
            raise ValueError(
                "predict needs a trained model: give --ckpt_path, in a script "
                "trainer.ckpt_path = path before it, or load_from_checkpoint(path) of its class."
            )
        return recipe

    tests_after_fit = False  # set by --test_after_fit: fit then also builds the test split

    def wanted_stages(self, stage: str) -> list[Stage]:
        """Return the splits that a trainer's call reads: with `limit_val_batches: 0` no
        validation."""
        is_bare = stage == "fit" and self.trainer is not None and not self.trainer.limit_val_batches
        names = [name for name in STAGES_OF[stage] if name != "validation" or not is_bare]
        return [*names, "test"] if stage == "fit" and self.tests_after_fit else names

    def setup(self, stage: str) -> None:
        """Build the datasets of the stage and derive accumulation for this many devices."""
        if not self.datasets:
            self._warn_of_shared_files()
        if stage == "predict":  # its files may have changed since the last call
            self.datasets.pop("predict", None)
        if self.trainer is not None:
            # Ranks that each drew a seed would make different plans: all take that of rank 0.
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
        """Convert the trainer's limits from global steps to micro-batches per device."""
        for name, limit in self._given_limits.items():
            stage = LIMITS[name]
            if stage == "predict":
                if isinstance(limit, int):
                    setattr(self.trainer, name, math.ceil(limit / self.num_replicas))
            elif stage in self.datasets and limit and (limit != 1.0 or isinstance(limit, int)):
                is_interval = name == "val_check_interval"  # of the limited epoch
                steps = self.steps_per_epoch if is_interval else self.plan(stage, 0).num_steps
                limit = max(1, int(steps * limit)) if isinstance(limit, float) else limit
                within = self.trainer.check_val_every_n_epoch and self.trainer.limit_val_batches
                if is_interval and within and limit > steps:
                    raise ValueError(
                        f"trainer.val_check_interval is {limit} optimizer steps, and an epoch has "
                        f"{steps}: lower it, or count over epochs by check_val_every_n_epoch: null."
                    )
                limit *= self.batching_of(stage).accumulate_grad_batches
                if is_interval and within and limit == 1:
                    limit = 1e-9  # a share: Lightning's callbacks take 1 for 1.0, a whole epoch
                setattr(self.trainer, name, limit)

    def _warn_of_shared_files(self) -> None:
        """Warn of a file that is named both for training and for validation or test."""
        sets = [
            {Path(path).resolve() for entry in paths(files) for path in [entry, *glob.glob(entry)]}
            for files in getattr(self, "files", {}).values()
        ]
        shared = sets[0].intersection(set().union(*sets[1:])) if sets else set()
        if shared:
            rank_zero_only(log.warning)(
                f"{min(shared)} is named for training and for validation or test: the model is "
                "judged on what it has learned by heart. Name other files, or leave those of "
                "validation and test out: the training rows are then divided."
            )

    @property
    def seeks_micro_batch(self) -> bool:
        """Whether a rehearsal is to find the micro-batch size of training."""
        return self.micro_batch_size == "auto" and self.given_accumulation == 1

    def take_micro_batch(self, rehearsed: Rehearsed) -> None:
        """Use this micro-batch size from now on; called before the loaders are made."""
        self.rehearsed = rehearsed
        self.trainer.accumulate_grad_batches = self.batching.accumulate_grad_batches
        self._convert_limits()

    def train_dataloader(self) -> PlannedLoader:
        self._train_loader = self._loader("train")
        return self._train_loader

    def teardown(self, stage: str) -> None:
        """Close the training loader, which persists between epochs."""
        if self._train_loader is not None:
            self._train_loader.close()

    def on_exception(self, exception: BaseException) -> None:
        """Close it after an error as well: Lightning then calls no `teardown`."""
        self.teardown("fit")

    def val_dataloader(self) -> PlannedLoader:
        return self._loader("validation")

    def test_dataloader(self) -> PlannedLoader:
        return self._loader("test")

    def predict_dataloader(self) -> PlannedLoader:
        return self._loader("predict")

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last consumed (not fetched) step; equal on all ranks."""
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
        """Restore the position.

        Raises:
            ValueError: the plan is not that of the checkpoint; the differing values are named.
        """
        if not state_dict or "train" not in self.datasets:
            return
        now, then = asdict(self.request("train")), state_dict["plan"]
        changes = [f"{k}: {then.get(k)} -> {now[k]}" for k in now if now[k] != then.get(k)]
        if changes:
            raise ValueError(
                f"the checkpoint follows another plan ({'; '.join(changes)}): the data or the "
                "batch options have changed. A resumed run must use each sample once; restore the "
                "old values, or start a new run from these weights with model.init_from."
            )
        self.resume_position = (state_dict["epoch"], state_dict["step"])

    @property
    def num_replicas(self) -> int:
        """Number of data-parallel replicas, as the strategy says."""
        return self._replicas()[0]

    @property
    def batching(self) -> Batching:
        """Batching of training on this number of devices."""
        micro = self.rehearsed.micro_batch_size if self.rehearsed else self.micro_batch_size
        return derive_batching(
            self.num_replicas, self.global_batch_size, micro, self.given_accumulation
        )

    def batching_of(self, stage: Stage) -> Batching:
        """Batching of a stage; in evaluation the accumulation is derived."""
        if stage == "train":
            return self.batching
        micro = self.batching.micro_batch_size
        return derive_batching(self.num_replicas, self.global_batch_size, micro)

    @property
    def seed(self) -> int:
        """Key of the order and of all augmentation."""
        seed = self.plan_options.seed
        return int(os.environ.get(SEED, 0)) if seed is None else seed

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
        and `samples_per_epoch` respect this run's limits, `planned_steps` ignores them."""
        plan = self.plan("train", 0)
        most = self.trainer.max_steps if self.trainer is not None else -1
        steps = min(self.steps_per_epoch, most) if most >= 0 else self.steps_per_epoch
        return {
            "num_samples": plan.samples_in(plan.num_steps),
            "num_replicas": self.num_replicas,
            **asdict(self.batching),
            "steps_per_epoch": steps,
            "samples_per_epoch": plan.samples_in(steps),
            "planned_steps": plan.num_steps,
            "plan_digest": self.request("train").digest(),
            "rehearsal": asdict(self.rehearsed) if self.rehearsed else None,
        }

    def _trainer_stage(self) -> str:
        """Return the verb of the trainer's call, "fit" if there is none."""
        fn = None if self.trainer is None else self.trainer.state.fn
        return "fit" if fn is None else fn.value

    def request(self, stage: Stage) -> PlanRequest:
        """Return everything that the plan of a stage depends on."""
        if stage not in self.datasets:
            verb = next(verb for verb, stages in STAGES_OF.items() if stage in stages)
            raise RuntimeError(f'no data for {stage} yet: call prepare_data() and setup("{verb}").')
        dataset = self.datasets[stage]
        return PlanRequest(
            fingerprint=dataset.fingerprint,
            num_samples=len(dataset.lengths),
            global_batch_size=self.global_batch_size,
            seed=self.seed if stage == "train" else 0,
            bucket_window=self.plan_options.bucket_window,
            shuffle=stage != "predict",
        )

    def _replicas(self) -> tuple[int, int]:
        """Return (number of replicas, index of this one)."""
        strategy = self.trainer.strategy if self.trainer is not None else None
        sampler = getattr(strategy, "distributed_sampler_kwargs", None)
        return (sampler["num_replicas"], sampler["rank"]) if sampler else (1, 0)

    def plan(self, stage: Stage, epoch: int) -> Plan:
        """Return the global steps of one epoch; the last four plans stay in memory."""
        key, dataset = (self.request(stage), epoch), self.datasets[stage]
        plan = self._plans.pop(key, None) or planned_epoch(key[0], dataset.lengths, epoch)
        self._plans = {**dict(list(self._plans.items())[-3:]), key: plan}
        return plan

    def _loader(self, stage: Stage) -> PlannedLoader:
        plan = self.plan(stage, 0)
        if stage == "predict":
            done = self.find_done_batches()
            batches = partial(iterate_whole_batches, plan, *self._replicas(), done)
            todo = math.ceil((plan.num_steps - len(done)) / self.num_replicas)
            length = max(todo, min(plan.num_steps, 1))  # see `iterate_whole_batches`
        else:
            batches = partial(self.micro_batches, stage)
            length = plan.num_steps * self.batching_of(stage).accumulate_grad_batches
        on_cpu = self.trainer is None or self.trainer.strategy.root_device.type == "cpu"
        workers = self.loader_options.num_workers
        if workers == "auto":
            workers = auto_workers(1 if self.trainer is None else self.trainer.num_devices, on_cpu)
        # A GPU copies from page-locked memory without waiting.
        kwargs: dict[str, Any] = {"num_workers": workers, "pin_memory": not on_cpu}
        if workers:
            kwargs |= {"prefetch_factor": PREFETCHED, "persistent_workers": stage == "train"}
            if sys.platform == "linux" and multiprocessing.get_start_method() == "spawn":
                # Spawned workers of a ddp_spawn rank import everything anew: 20 s instead of 1.
                kwargs["multiprocessing_context"] = "fork"
        return PlannedLoader(self.datasets[stage], batches, length, kwargs)

    def micro_batches(self, stage: Stage) -> Iterator[MicroBatch]:
        """Yield this replica's micro-batches of the current epoch, from a resume position on."""
        batching, epoch, first = self.batching_of(stage), 0, 0
        if stage == "train":
            epoch = self.trainer.current_epoch if self.trainer is not None else 0
            position, self.resume_position = self.resume_position, None
            first = position[1] if position and position[0] == epoch else 0
            if 0 < self.steps_per_epoch <= first:
                return iter(())  # all steps are done; only the end of the epoch was not reached
            if self.trainer is not None and self.trainer.overfit_batches > 0:
                epoch = 0  # the same few batches in every epoch
        plan, dataset = self.plan(stage, epoch), self.datasets[stage]
        sizes = (dataset.lengths, dataset.target_counts)
        return iterate_micro_batches(plan, *sizes, batching, *self._replicas(), epoch, first)
