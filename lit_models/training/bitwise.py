"""Bitwise exactness: gradients summed in one fixed binary tree, equal bits on 1, 2, 4 processes.

An optimizer step is split into C chunks, a power of two. Chunks c and C - 1 - c are added first,
then their sums in the same way. `datamodules.core.plan.deal` gives each replica a subtree.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from datamodules.core.planned import PlannedDataModule
from lit_models.training.dropout import DrawGuard
from lit_models.training.exact import ExactModule
from lit_models.training.strategies import BATCH_NORMS, strategy_name

Gradients = list[Tensor | None]  # one per parameter; `None` if no loss has reached it


class TreeSum:
    """Adds gradients pairwise as they arrive: a binary counter whose digits are partial sums."""

    def __init__(self) -> None:
        self.count = 0
        self._sums: list[tuple[int, Gradients]] = []  # sizes fall from left to right

    def push(self, gradients: Gradients) -> None:
        """Add the gradients of the next micro-batch; their tensors now belong to the sum."""
        size = 1
        while self._sums and self._sums[-1][0] == size:
            _, earlier = self._sums.pop()
            gradients = added(earlier, gradients)
            size *= 2
        self._sums.append((size, gradients))
        self.count += 1

    def pop(self) -> Gradients:
        """Return the whole sum and start anew; the number of micro-batches is a power of two."""
        ((_, gradients),) = self._sums
        self.count, self._sums = 0, []
        return gradients


def added(left: Gradients, right: Gradients) -> Gradients:
    """Return left + right, in the tensors of `left`."""
    pairs = zip(left, right, strict=True)
    return [b if a is None else a if b is None else a.add_(b) for a, b in pairs]


def added_over_ranks(
    gradients: Gradients, parameters: list[nn.Parameter], rank: int, world_size: int
) -> Gradients:
    """Return the sum over all ranks in the order of the tree; a collective that overwrites the
    tensors of `gradients`. In each round two ranks swap their sums: a + b is b + a in every bit."""
    while world_size > 1:
        partner = rank ^ (world_size - 1)
        # For each parameter 1 or 0, whether it has a gradient, then all gradients.
        present = parameters[0].new_tensor([float(g is not None) for g in gradients])
        flat = [
            torch.zeros_like(p).flatten() if g is None else g.flatten()
            for g, p in zip(gradients, parameters, strict=True)
        ]
        mine = torch.cat([present, *flat])
        theirs = torch.empty_like(mine)
        swap = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
        for work in dist.batch_isend_irecv(swap):
            work.wait()
        present, *flat = theirs.split([len(parameters), *(p.numel() for p in parameters)])
        others = [
            part.view_as(p).to(p.dtype) if is_there else None
            for part, p, is_there in zip(flat, parameters, present.tolist(), strict=True)
        ]
        gradients = added(gradients, others)
        world_size //= 2
    return gradients


@contextmanager
def pinned() -> Iterator[None]:
    """Limit this process to one thread, and kernels to a fixed order of additions."""
    threads = torch.get_num_threads()
    is_on = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # Filling only helps to find reads of uninitialized memory, and takes a fifth of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(is_on, warn_only=only_warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills


def check_run(strategy: str | None, precision: str | int | None, world_size: int) -> None:
    """Raise ValueError for a run that cannot give equal bits, before its data is read; `strategy`
    is a name, or `None` if the configuration names a class."""
    needed = []
    if not (strategy or "auto").startswith(("auto", "single_device", "ddp")):  # ddp_spawn too
        needed.append(f"trainer.strategy ddp or ddp_spawn, got {strategy}")
    if str(precision).removesuffix("-true") not in ("None", "32", "64"):
        needed.append(f"trainer.precision 32-true or 64-true, got {precision}")
    if world_size.bit_count() != 1:
        needed.append(f"a power of two of processes, got {world_size}")
    if needed:
        raise ValueError(
            f"exactness: bitwise needs {' and '.join(needed)}; change it, or take "
            "--exactness=gradient."
        )


def check_cut(data: PlannedDataModule) -> None:
    """Raise ValueError if the sizes given to data and trainer do not split a step into the same
    chunks on every number of devices."""
    total, accumulation = data.batching.global_batch_size, data.batching.accumulate_grad_batches
    num_replicas, size = data.num_replicas, data.micro_batch_size
    num_chunks, is_cut_by_size = num_replicas * accumulation, data.given_accumulation == 1
    if is_cut_by_size and size == "auto":
        raise ValueError(
            f"exactness: bitwise cuts a step alike on any number of devices, but nothing says how: "
            f"give data.micro_batch_size, for example {max(1, total // 8)} for 8 chunks of "
            f"data.global_batch_size {total}."
        )
    expected = -(-total // int(size)) if is_cut_by_size else num_chunks
    if num_chunks.bit_count() != 1 or num_chunks != expected:
        # With more devices than chunks of this size, chunks would become smaller.
        raise ValueError(
            f"exactness: bitwise needs a power of two of micro-batches in a step, not fewer than "
            f"devices: {num_replicas} devices x {accumulation} accumulated are {num_chunks}, and "
            f"data.global_batch_size {total} in micro-batches of {size} makes {expected}; change "
            "the devices or one of the sizes."
        )


class BitwiseSum(Callback):
    """Adds the gradients of micro-batches, and then of ranks, in one fixed binary tree.

    Each gradient is removed after its backward pass; the sum is put back before ledger, clipping
    and optimizer read it. Memory: log2(accumulation) + 1 copies of the gradients, at least three
    if ranks swap them. During `fit` torch uses deterministic algorithms and one thread, as kernels
    may split a sum by threads. Bits are equal on one kind of processor with one version of the
    libraries.

    Raises:
        ValueError: in `fit`, if the run cannot give equal bits.
    """

    def __init__(self) -> None:
        self.exactness_facts: dict[str, Any] = {}
        self._resumed_chunks: int | None = None
        self._sum = TreeSum()
        self._parameters: list[nn.Parameter] = []
        self._accumulation = 1
        self._guard = DrawGuard()
        self._undo: ExitStack | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a run that cannot be bitwise; fix threads and kernels before weights are drawn."""
        if stage != "fit":
            return
        data = getattr(trainer, "datamodule", None)
        check_run(strategy_name(trainer.strategy), trainer.precision, trainer.world_size)
        if not isinstance(pl_module, ExactModule) or not isinstance(data, PlannedDataModule):
            raise ValueError(
                "exactness: bitwise needs an ExactModule and a PlannedDataModule, got "
                f"{type(pl_module).__name__} and {type(data).__name__}; use them, or no BitwiseSum."
            )
        self._undo = ExitStack()
        self._undo.enter_context(pinned())
        pl_module.averages_replicas = False
        self._undo.callback(setattr, pl_module, "averages_replicas", True)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check chunks and network, which are known now; dropout is noticed when a step draws."""
        data = trainer.datamodule
        check_cut(data)
        for name, module in pl_module.named_modules():
            if isinstance(module, BATCH_NORMS):
                raise ValueError(
                    f"exactness: bitwise: {name} ({type(module).__name__}) keeps running "
                    "statistics, of its own samples in each process; use LayerNorm or GroupNorm."
                )
        self._accumulation = data.batching.accumulate_grad_batches
        self._parameters = list(pl_module.parameters())
        num_chunks = data.num_replicas * self._accumulation
        self.exactness_facts = {
            "level": "bitwise",
            "num_chunks": num_chunks,
            "gradient_copies": max(self._accumulation.bit_length(), 3 * (data.num_replicas > 1)),
        }
        if self._resumed_chunks not in (None, num_chunks):  # sums would differ
            raise ValueError(
                f"exactness: bitwise: the checkpoint's run had {self._resumed_chunks} chunks, this "
                f"one {num_chunks}, and its bits would be others; restore data.micro_batch_size "
                "and the accumulation."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep ddp from averaging gradients; weights are already equal on all ranks."""
        self._sum = TreeSum()
        if isinstance(wrapped := trainer.strategy.model, DistributedDataParallel) and self._undo:
            self._undo.enter_context(wrapped.no_sync())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._guard.begin(pl_module.device)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._guard.check(pl_module.device, "exactness: bitwise")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move a micro-batch's gradients into the sum; after the last one set the step's sum."""
        own, rank = self._parameters, trainer.global_rank
        self._sum.push([p.grad for p in own])
        pl_module.zero_grad(set_to_none=True)
        if self._sum.count < self._accumulation:
            return
        total = added_over_ranks(self._sum.pop(), own, rank, trainer.world_size)
        for parameter, gradient in zip(own, total, strict=True):
            parameter.grad = gradient

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self._sum.count:
            raise RuntimeError(
                f"exactness: bitwise: a step ended after {self._sum.count} of "
                f"{self._accumulation} micro-batches; training_step must return a loss for each "
                "of them, a zero one where nothing counts."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"num_chunks": self.exactness_facts["num_chunks"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed_chunks = state_dict["num_chunks"]

    def teardown(self, *_: Any, **__: Any) -> None:
        if self._undo is not None:
            self._undo.close()
            self._undo = None

    on_exception = teardown
