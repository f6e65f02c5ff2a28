"""DeepSpeed's engine (ZeRO 1 and 2) for every module, on CPU (gloo) and GPU (nccl).

Every rank has all weights; moments, and the gradients of a finished step, are cut between ranks.
DeepSpeed trains; clipping, the check for what is not finite and checkpoints are the project's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_models.training.preflight import check_deepspeed
from lit_models.training.strategies.before_sharding import equal_weights
from lit_models.training.strategies.meshes import mesh_of
from lit_models.training.strategies.processes import ManagedProcesses
from lit_models.training.strategies.zero_optimizer import ZeroOptimizer, check_optimizer

BUCKET_NUMBERS = 25 * 2**20 // 4  # as many bytes of float32 as ddp sends together
WAY_OUT = "use ddp or fsdp"


class ZeroStrategy(ManagedProcesses, DDPStrategy):
    """`deepspeed`: trains as ddp does, with a part of the optimizer's state on each rank.

    Buffers begin with those of rank 0, and are then each rank's own, as under fsdp.

    Args:
        stage: 1 cuts the moments between ranks; 2 also the gradients while they accumulate, for
            which every micro-batch is communicated.
        process_group_backend: gloo, nccl or mpi; none takes the one for the device.
        timeout: how long a rank waits for another.

    Raises:
        ValueError: another stage, the extra `deepspeed` is not installed, or a module, an optimizer
            or a precision that this strategy would train otherwise than one device does.
    """

    strategy_name = "deepspeed"

    def __init__(
        self,
        stage: Literal[1, 2] = 2,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        if stage not in (1, 2):
            raise ValueError(
                f"stage must be 1 or 2, got {stage}; --trainer.strategy=fsdp shards the weights "
                "too, as DeepSpeed's stage 3 does."
            )
        check_deepspeed()
        super().__init__(process_group_backend=process_group_backend, timeout=timeout)
        self.stage = stage
        self._engine: Any = None
        self._reached = ReachedParameters([])

    def configure_ddp(self) -> None:
        """Begin with the weights of rank 0; nothing wraps the module."""
        assert self.lightning_module is not None
        equal_weights(self.lightning_module, self.root_device)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Make the engine around the module's step and its optimizer."""
        super().setup_optimizers(trainer)
        module = self.lightning_module
        assert module is not None
        check_module(module, self.optimizers, self.precision_plugin)
        (optimizer,) = self.optimizers
        parameters = [list(group["params"]) for group in optimizer.param_groups]
        step = _Step(module, super().training_step)
        self._engine = make_engine(step, optimizer, self.stage, self.root_device)
        # A rank that lacks a gradient would leave the others waiting: it is looked for before.
        self._engine.enable_backward_allreduce = False
        self._reached = ReachedParameters([p for group in parameters for p in group])
        mesh = mesh_of(self.root_device, replicate=1, shard=self.world_size)
        self.optimizers = [ZeroOptimizer(self._engine, optimizer, parameters, mesh)]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as ddp does, with the engine's hooks around it."""
        return self._engine(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate: the backward pass inside is not the last one of its step."""
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Run the engine's backward pass; after the last one of a step the optimizer shows the
        mean gradient, which `ExactModule.exact_mean` has undone the mean of.

        Raises:
            RuntimeError: a parameter got no gradient in the whole step.
        """
        module = self.lightning_module
        assert module is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self._run_backward(closure_loss)
        return self.precision_plugin.post_backward(closure_loss, module)

    def try_backward(self, loss: Tensor, is_last: bool) -> None:
        """Run a backward pass of a rehearsal; the last one of a step communicates like it."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._run_backward(loss)
        self._engine.set_gradient_accumulation_boundary(True)

    def _run_backward(self, loss: Tensor) -> None:
        engine = self._engine
        engine.backward(loss, scale_wrt_gas=False)  # the trainer has divided already
        is_last = engine.is_gradient_accumulation_boundary()
        if is_last:
            self._reached.check(self.lightning_module)  # type: ignore[arg-type]
        engine.allreduce_gradients()
        if is_last:
            self.optimizers[0].take_gradients()  # type: ignore[attr-defined]

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state in the form of one device on rank 0; a collective."""
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return optimizer.whole_state(keeps=self.is_global_zero)  # type: ignore[attr-defined]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take each rank's part of whole moments, by parameter name."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take whole weights."""
        super().load_model_state_dict(checkpoint, strict=strict)
        self.renew_weights()

    def renew_weights(self) -> None:
        """Make the engine's own part of the weights, where there is one, that of the module's."""
        if self._engine is not None:
            self._engine.optimizer.refresh_fp32_params()

    def teardown(self) -> None:
        self._reached.remove()
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None
        super().teardown()


class _Step(nn.Module):
    """A module's training step as the forward method that the engine wants.

    Autocast begins inside: the engine would switch one off that it finds outside.
    """

    def __init__(self, module: LightningModule, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._compute = module, compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._compute(*args, **kwargs)


class ReachedParameters:
    """Notes which parameters the backward passes of a step have reached on this rank.

    Args:
        parameters: those that are trained.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._all = parameters
        self._found: set[int] = set()
        self._hooks = [p.register_post_accumulate_grad_hook(self._note) for p in parameters]

    def _note(self, parameter: Tensor) -> None:
        self._found.add(id(parameter))

    def check(self, module: nn.Module) -> None:
        """Begin anew; refuse a step that reached some parameters alone.

        The row in which they lie would move them by momentum and decay.
        """
        missing = {id(p) for p in self._all if id(p) not in self._found}
        self._found.clear()
        if missing:
            names = [name for name, p in module.named_parameters() if id(p) in missing]
            raise RuntimeError(
                f"{', '.join(names[:3])}{' …' * (len(names) > 3)} got no gradient in this step; "
                "strategy deepspeed would move them by momentum and decay. Freeze them, or use "
                "--trainer.strategy=ddp_find_unused_parameters_true."
            )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def check_module(
    module: LightningModule, optimizers: list[Optimizer], precision_plugin: Any
) -> None:
    """Refuse what DeepSpeed's engine would train otherwise than one device does.

    Raises:
        ValueError: optimization by hand, several optimizers, one that needs shapes, gradients that
            the module changes or leaves out, weights that are frozen, empty, without a dimension
            or of another type than float32, a loss scaler.
    """
    name = type(module).__name__
    if not module.automatic_optimization or len(optimizers) != 1:
        raise ValueError(
            f"strategy deepspeed takes one optimizer that the trainer steps; {name} has "
            f"{len(optimizers)} or steps by itself; {WAY_OUT}."
        )
    check_optimizer(optimizers[0])
    if type(module).on_after_backward is not LightningModule.on_after_backward:
        raise ValueError(
            f"{name} changes gradients in on_after_backward, which strategy deepspeed keeps in its "
            f"engine; {WAY_OUT}."
        )
    if not getattr(module, "reaches_all_parameters", True):
        raise ValueError(
            f"{name} leaves parameters without a gradient in some steps, which strategy deepspeed "
            f"would move by momentum and decay; {WAY_OUT}."
        )
    if getattr(precision_plugin, "scaler", None) is not None:
        raise ValueError(
            "strategy deepspeed trains without a loss scaler, got trainer.precision 16-mixed; use "
            "bf16-mixed, or ddp or fsdp."
        )
    _check_weights(module, optimizers[0])


def _check_weights(module: LightningModule, optimizer: Optimizer) -> None:
    name = type(module).__name__
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(p.requires_grad and p.numel() for p in trained):
        raise ValueError(
            f"the optimizer of {name} holds parameters that are frozen or empty, for which "
            f"strategy deepspeed has no place; leave them out of it, or {WAY_OUT}."
        )
    scalars = [parameter for parameter, p in module.named_parameters() if p.dim() == 0]
    if scalars:
        raise ValueError(
            f"{scalars[0]} of {name} has the shape (), which DeepSpeed cannot send; give it the "
            f"shape (1,), or {WAY_OUT}."
        )
    packed = [name for name, p in module.named_parameters() if not p.is_floating_point()]
    if packed:
        raise ValueError(
            f"{packed[0]} is packed in whole numbers, which nobody has tried under strategy "
            f"deepspeed; set model.lora.base_dtype to bfloat16, or {WAY_OUT}."
        )
    dtypes = {str(p.dtype).removeprefix("torch.") for p in trained} - {"float32"}
    if dtypes:
        raise ValueError(
            f"strategy deepspeed trains float32 weights, got {', '.join(sorted(dtypes))}; use "
            f"--trainer.precision=32-true or bf16-mixed, or {WAY_OUT}."
        )


def make_engine(step: nn.Module, optimizer: Optimizer, stage: int, device: torch.device) -> Any:
    """Return DeepSpeed's engine; nothing is compiled, and it clips and scales nothing itself.

    Args:
        step: whose forward method returns the loss.
        optimizer: whose groups then hold this rank's part of their parameters.
        stage: of ZeRO, 1 or 2.
        device: of this rank; the process group is there.

    Raises:
        RuntimeError: this process has used DeepSpeed on another kind of device.
    """
    kind = "cuda" if device.type == "cuda" else "cpu"
    with _environ("DS_ACCELERATOR", kind):  # read once, at the first use in a process
        import deepspeed

        found = deepspeed.accelerator.get_accelerator().device_name()
    if found != kind:
        raise RuntimeError(
            f"DeepSpeed works on {found} in this process since its first use there, and this run "
            f"is on {kind}; start it in a process of its own."
        )
    # Its collective through shared memory is compiled at first use; gloo is there.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    numbers = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    config = {
        "train_micro_batch_size_per_gpu": 1,  # counted by DeepSpeed, of no effect
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "timers": {"throughput": {"enabled": False}},  # it would wait for the device
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": min(BUCKET_NUMBERS, numbers),
            "overlap_comm": False,
            "compute_grad_norm": False,
        },
    }
    with _environ("LOCAL_RANK", str(device.index or 0)):  # the index of this rank's device
        engine, *_ = deepspeed.initialize(
            model=step, optimizer=optimizer, config=config, dist_init_required=False
        )
    engine.set_gradient_accumulation_boundary(True)
    return engine


@contextmanager
def _environ(name: str, value: str) -> Iterator[None]:
    """Give DeepSpeed a variable that it reads, for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
