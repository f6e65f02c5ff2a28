"""Level B: the same bits in every parameter on 1, 2, 4 ... ddp processes."""

from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from datamodules.core.planned import PlannedDataModule
from lit_models.training.bitwise import (
    Cut,
    TreeSum,
    added_over_ranks,
    check_cut,
    check_network,
    check_run,
    pinned,
)
from lit_models.training.callbacks.exact_dropout import ExactDropout
from lit_models.training.exact import ExactModule
from lit_models.training.keyed_dropout import DrawGuard
from lit_models.training.strategies import strategy_name


class BitwiseSum(Callback):
    """Adds the gradients of micro-batches, and then of ranks, in one fixed binary tree.

    Each gradient is taken away after its backward pass; the sum is put back before anybody reads
    it (ledger, clipping, optimizer). ddp adds nothing by itself. Memory: log2(accumulation) + 1
    copies of the gradients in all, at least three where ranks swap them.
    Deterministic algorithms are on and threads are pinned while it fits: kernels may split a sum
    by threads. Bits are equal on one kind of processor and one version of the libraries.

    Args:
        num_threads: of each process; runs that shall be equal need the same number.

    Raises:
        ValueError: fewer than one thread. While fitting: a run that cannot give equal bits.
    """

    def __init__(self, num_threads: int = 1) -> None:
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}.")
        self.num_threads = num_threads
        self.exactness_facts: dict[str, Any] = {}
        self._resumed: dict[str, int] = {}
        self._sum = TreeSum()
        self._parameters: list[nn.Parameter] = []
        self._accumulation = 1
        self._guard = DrawGuard()
        self._undo: ExitStack | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be, and fix threads and kernels before a weight is drawn."""
        if stage != "fit":
            return
        strategy, data = trainer.strategy, getattr(trainer, "datamodule", None)
        is_single = isinstance(strategy, SingleDeviceStrategy)
        name = "auto" if is_single else strategy_name(strategy)
        check_run(name, trainer.precision, trainer.world_size)
        if not isinstance(pl_module, ExactModule) or not isinstance(data, PlannedDataModule):
            raise ValueError(
                "exactness: bitwise needs an ExactModule and a PlannedDataModule, got "
                f"{type(pl_module).__name__} and {type(data).__name__}; use them, or leave "
                "BitwiseSum out."
            )
        self._undo = ExitStack()
        self._undo.enter_context(pinned(self.num_threads))
        pl_module.averages_replicas = False
        self._undo.callback(setattr, pl_module, "averages_replicas", True)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the cut and the network, which are known now."""
        data = trainer.datamodule
        batching = data.batching
        cut = Cut(
            data.num_replicas,
            batching.accumulate_grad_batches,
            batching.global_batch_size,
            data.micro_batch_size,
            data.batch_size,
            data.given_accumulation > 1,
        )
        check_cut(cut)
        check_network(pl_module, any(isinstance(c, ExactDropout) for c in trainer.callbacks))
        self._accumulation = batching.accumulate_grad_batches
        self._parameters = list(pl_module.parameters())
        self.exactness_facts = {
            "level": "bitwise",
            "num_chunks": cut.num_chunks,
            "num_threads": self.num_threads,
            "gradient_copies": max(self._accumulation.bit_length(), 3 * (data.num_replicas > 1)),
        }
        self._check_resumed()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep ddp from adding gradients; weights are already alike on all ranks."""
        self._sum = TreeSum()
        wrapped = trainer.strategy.model
        if isinstance(wrapped, DistributedDataParallel) and self._undo is not None:
            self._undo.enter_context(wrapped.no_sync())

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._guard.begin(pl_module.device)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        self._guard.check(pl_module.device, "exactness: bitwise")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the gradients of a micro-batch away; after the last one put the step's back."""
        self._sum.push([p.grad for p in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None
        if self._sum.count < self._accumulation:
            return
        total = added_over_ranks(
            self._sum.pop(), self._parameters, trainer.global_rank, trainer.world_size
        )
        for parameter, gradient in zip(self._parameters, total, strict=True):
            parameter.grad = gradient

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._sum.count:
            raise RuntimeError(
                f"exactness: bitwise: a step ended after {self._sum.count} of "
                f"{self._accumulation} micro-batches; training_step must return a loss for each "
                "of them, a zero one where nothing counts."
            )

    def state_dict(self) -> dict[str, Any]:
        return {k: self.exactness_facts[k] for k in ("num_chunks", "num_threads")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._resumed = dict(state_dict)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._restore()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restore()

    def _check_resumed(self) -> None:
        """Refuse to go on with another cut: the sums would be others.

        Raises:
            ValueError: the checkpoint's run had other chunks or threads.
        """
        for name, then in self._resumed.items():
            if then != self.exactness_facts[name]:
                raise ValueError(
                    f"exactness: bitwise: the checkpoint's run had {name} {then}, this one "
                    f"{self.exactness_facts[name]}, and its bits would be others; restore "
                    "data.micro_batch_size, the accumulation and the threads."
                )

    def _restore(self) -> None:
        if self._undo is not None:
            self._undo.close()
            self._undo = None
