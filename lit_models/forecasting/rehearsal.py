"""Some steps of a run on this machine before it begins: their seconds and their memory."""

import itertools
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from datamodules.activations.store import threads_pinned
from datamodules.core.loader import collated
from datamodules.core.plan import Batching, MicroBatch, Plan, PlanRequest, count_targets, deal
from datamodules.core.planned import PlannedDataModule
from datamodules.heaviest import heaviest_ids
from lit_models.training.meters import DeviceMeter, HostMeter, has_host_meter
from lit_models.training.sharding import total_norm
from lit_models.training.trial import try_batch, without_trace

MOST_STEPS, REPEATS = 100, 3
# Of one number of devices, each looked at only where work has ended: the heaviest steps are all
# taken once and a round is finished, one step is timed in any case.
HEAVIEST_S = 15.0  # no further round of the heaviest steps begins later
TIMED_S = 30.0  # no further step is timed later


@dataclass(frozen=True)
class Rehearsed:
    """What a device's part of a step took here, without anything between devices.

    Args:
        step_s: seconds of batches, forward, backward, norm and update of one optimizer step.
        kept_bytes: what autograd keeps of the heaviest micro-batch, each memory once.
        logit_bytes: of those, tensors as wide as a vocabulary.
        peak_bytes: the most that steps took beside the state, the heaviest among them; temporary
            tensors and the allocator's gaps included; none where the system does not tell.
        program_bytes: host memory without state: libraries and data; none on a GPU, whose memory
            has neither.
    """

    step_s: float
    kept_bytes: int
    logit_bytes: int
    peak_bytes: int | None = None
    program_bytes: int | None = None

    @property
    def activation_bytes(self) -> int:
        """What a step takes beside the state: measured, or at least what autograd keeps."""
        return self.kept_bytes if self.peak_bytes is None else self.peak_bytes


class Rehearsal:
    """A device's part of some steps, of a run on so many devices.

    Args:
        trainer: fully set up, on one device.
        module: its module.
        data: its data.
        plan: of the run on so many devices.
        request: from which the plan was made.
        num_devices: of that run.
        batching: of that run.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: Any,
        data: PlannedDataModule,
        plan: Plan,
        request: PlanRequest,
        num_devices: int,
        batching: Batching,
    ) -> None:
        self.trainer, self.module, self.data = trainer, module, data
        self.plan, self.request = plan, request
        self.num_devices, self.batching = num_devices, batching
        self.dataset = data.datasets["train"]
        self.device = trainer.strategy.root_device

    def run(self) -> Rehearsed:
        """Return what was measured; weights, moments and random states are put back."""
        meter = _meter(self.device)
        with ExitStack() as stack:
            if self.device.type == "cpu":
                stack.enter_context(threads_pinned(threads_of_rank(self.num_devices)))
            copied_bytes = stack.enter_context(without_trace(self.trainer, self.module))
            kept, logits = self._kept()
            if meter is None:
                return Rehearsed(self._step_s(), kept, logits)
            meter.start()
            before = meter.used_bytes()
            self._run_heaviest()
            step_s = self._step_s()
            peak = max(0, meter.peak_bytes() - before)
            if self.device.type == "cuda":
                return Rehearsed(step_s, kept, logits, peak)
            program = before - copied_bytes - _state_bytes(self.trainer, self.module)
            return Rehearsed(step_s, kept, logits, peak, max(0, program))

    def _kept(self) -> tuple[int, int]:
        """Return what autograd keeps; gradients and moments are made on the way."""
        most = (0, 0)
        for batch in self._heaviest():
            kept = KeptBytes(self.module)
            with kept:
                try_batch(self.trainer, self.module, batch, keeps_gradients=False)
            most = max(most, (kept.num_bytes, kept.logit_bytes))
        return most

    def _run_heaviest(self) -> None:
        """Take the heaviest steps again and again: the heap of a run has gaps, and they grow in
        the first steps."""
        keeps_gradients = self.batching.accumulate_grad_batches > 1
        begun = time.perf_counter()
        for _ in range(REPEATS):
            for batch in self._heaviest():
                try_batch(self.trainer, self.module, batch, keeps_gradients)
            if time.perf_counter() - begun > HEAVIEST_S:
                break

    def _step_s(self) -> float:
        """Return the mean over steps of all widths, each taken once: a few wide ones make most of
        an epoch's time, and a step that is repeated finds its data and its memory ready."""
        seconds: list[float] = []
        widths, begun = step_widths(self.plan, self.dataset.lengths), time.perf_counter()
        steps = spread_steps(widths)
        for step in steps:
            seconds.append(self._timed(step))
            if time.perf_counter() - begun > TIMED_S:
                break
        # Where time was short, those that were taken may be narrower than the epoch's are.
        taken = widths[steps[: len(seconds)]]
        return statistics.fmean(seconds) * float(widths.mean() / taken.mean())

    def _timed(self, step: int) -> float:
        """Return the seconds of one step: of one micro-batch as often as it is accumulated, and
        of one update."""
        begun = time.perf_counter()
        batch = self._batch_of(step)
        workers = self.data.loader_options.num_workers
        waits = workers == 0 or (workers == "auto" and self.device.type == "cpu")
        made_s = time.perf_counter() - begun if waits else 0.0
        self._wait()
        begun = time.perf_counter()
        try_batch(self.trainer, self.module, batch, keeps_gradients=False)
        self._wait()
        worked_s = time.perf_counter() - begun
        updated_s = 0.0
        times = self.batching.accumulate_grad_batches
        if times > 1:
            begun = time.perf_counter()
            for optimizer in self.trainer.optimizers:
                type(optimizer).step(optimizer)
            self._wait()
            updated_s = time.perf_counter() - begun
        begun = time.perf_counter()
        grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        if grads:
            float(total_norm(grads))  # read by the ledger in every step
        norm_s = time.perf_counter() - begun
        return (made_s + worked_s - updated_s) * times + updated_s + norm_s

    def _batch_of(self, step: int) -> dict[str, Any]:
        ids, lengths = self.plan.step_ids(step), self.dataset.lengths
        accumulated = self.batching.accumulate_grad_batches
        ranks = range(self.num_devices)
        parts = [deal(ids, lengths, self.num_devices, rank, accumulated)[0] for rank in ranks]
        # All wait for the one with most to compute.
        chunk, weights = max(parts, key=lambda part: int(lengths[part[0]].max()))
        counts = count_targets(ids, self.dataset.target_counts)
        return collated(self.dataset, MicroBatch(0, step, chunk, weights, counts))

    def _heaviest(self) -> Iterator[dict[str, Any]]:
        chunks = self.num_devices * self.batching.accumulate_grad_batches
        for ids in heaviest_ids(self.request, self.plan, self.dataset.lengths, chunks):
            counts = count_targets(ids, self.dataset.target_counts)
            weights = np.ones(len(ids), np.float32)
            yield collated(self.dataset, MicroBatch(0, 0, ids, weights, counts))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def step_widths(plan: Plan, lengths: np.ndarray) -> np.ndarray:
    """Return [steps] positions of each step: its rows times its longest sample.

    Args:
        plan: of an epoch.
        lengths: of all samples.
    """
    longest = np.maximum.reduceat(lengths[plan.order], plan.offsets[:-1])
    return np.diff(plan.offsets) * longest.astype(np.int64)


def spread_steps(widths: np.ndarray) -> list[int]:
    """Return up to `MOST_STEPS` steps, the middle one first, in an order of which every beginning
    is spread evenly over narrow and wide ones (van der Corput's sequence over the sorted widths).

    Args:
        widths: [steps] what the time of a step follows.
    """
    by_width = np.argsort(widths, kind="stable")
    bits = max(1, (len(widths) - 1).bit_length())
    numbers = itertools.chain(range(1, 2**bits), [0])  # 0 stands for the narrowest
    places = (int(f"{number:0{bits}b}"[::-1], 2) for number in numbers)
    inside = (int(by_width[place]) for place in places if place < len(widths))
    return list(itertools.islice(inside, MOST_STEPS))


class KeptBytes:
    """Counts what autograd keeps for the backward pass, each memory once, without the weights.

    Args:
        module: whose parameters are not counted, and whose embeddings tell what a vocabulary is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._vocabularies = {
            part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)
        }
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda kept: kept)
        self._alive: list[Tensor] = []  # so that no address is used twice
        self.num_bytes = self.logit_bytes = 0

    def __enter__(self) -> "KeptBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
        self._alive.clear()

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self._alive.append(tensor.detach())
            self.num_bytes += storage.nbytes()
            if tensor.dim() > 1 and tensor.shape[-1] in self._vocabularies:
                self.logit_bytes += storage.nbytes()
        return tensor


def num_cpus() -> int:
    """Return the CPUs that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def local_devices(on_cpu: bool) -> int:
    """Return how many ranks this machine has room for: its GPUs, or a process for each CPU."""
    return num_cpus() if on_cpu else torch.cuda.device_count()


def threads_of_rank(num_devices: int) -> int:
    """Return the threads that each of so many CPU processes gets, as Lightning deals them."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if num_devices == 1 or given.isdigit():
        return torch.get_num_threads()
    return max(1, num_cpus() // num_devices)


def _meter(device: torch.device) -> HostMeter | DeviceMeter | None:
    if device.type == "cuda":
        return DeviceMeter(device)
    return HostMeter(0.0) if has_host_meter() else None


def _state_bytes(trainer: Trainer, module: nn.Module) -> int:
    """Return the bytes of all weights, buffers, gradients and moments that are there."""
    tensors = [*module.parameters(), *module.buffers()]
    tensors += [p.grad for p in module.parameters() if p.grad is not None]
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
