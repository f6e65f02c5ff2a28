"""A training step that leaves no trace: what it changes is put back afterwards."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lit_models.training.ledger import StepRecord
from lit_models.training.sharding import local_parts


@contextmanager
def without_trace(trainer: Trainer, module: LightningModule) -> Iterator[int]:
    """Put weights, buffers, gradients, optimizers, metrics, records and all random states back.

    Gives the bytes of host memory that the copies take. Learning rates are 0 inside, so that the
    weights stay what a network may be trusted with.

    Args:
        trainer: whose optimizers are set up.
        module: its module; it logs nothing inside.
    """
    with ExitStack() as stack:
        stack.enter_context(isolate_rng())
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_records_put_back(module))
        num_bytes = stack.enter_context(_tensors_put_back(module))
        for optimizer in trainer.optimizers:
            stack.enter_context(_optimizer_put_back(optimizer))
        yield num_bytes


def try_batch(
    trainer: Trainer, module: LightningModule, batch: dict[str, Any], keeps_gradients: bool
) -> None:
    """Run forward, backward and update on one batch, in the order of Lightning's loop.

    It calls no wrapper of the module: under ddp nothing is communicated, so that a rank that runs
    out of memory leaves no other one waiting.

    Args:
        trainer: fully set up.
        module: its module, inside `without_trace`.
        batch: on the CPU.
        keeps_gradients: whether the backward pass adds to gradients that are there.
    """
    from lit_models.training.dropout import ExactDropout  # imports this file

    plugin = trainer.precision_plugin
    batch = module._on_before_batch_transfer(plugin.convert_input(batch))
    batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
    # Masks that are keyed by sample take more memory than those of a generator.
    keyed = [callback for callback in trainer.callbacks if isinstance(callback, ExactDropout)]
    for callback in keyed:
        callback.on_train_batch_start(trainer, module, batch, 0)
    with plugin.train_step_context():
        output = module.training_step(batch, 0)
    loss = output["loss"] if isinstance(output, dict) else output
    for callback in keyed:
        callback.on_before_backward(trainer, module, loss)
    if not keeps_gradients:  # Lightning frees them only now
        module.zero_grad(set_to_none=True)
    loss.backward()
    for callback in keyed:
        callback.on_train_batch_end(trainer, module, output, batch, 0)
    for optimizer in trainer.optimizers:
        type(optimizer).step(optimizer)  # not the one that a schedule counts


@contextmanager
def _records_put_back(module: LightningModule) -> Iterator[None]:
    """Divert what a training step notes: the step's record, metrics and logged values."""
    metrics = [m for m in module.modules() if isinstance(m, Metric)]
    noted = [_metric_state(metric) for metric in metrics]
    record = getattr(module, "step_record", None)
    if record is not None:
        module.step_record = StepRecord()
    module.log = _log_nothing
    try:
        yield
    finally:
        del module.log
        if record is not None:
            module.step_record = record
        for metric, values in zip(metrics, noted, strict=True):
            vars(metric).update(values)


def _log_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand for `LightningModule.log`."""


def _metric_state(metric: Metric) -> dict[str, Any]:
    names = [*metric._defaults, "_update_count", "_computed", "_cache"]
    return copy.deepcopy({n: vars(metric)[n] for n in names if n in vars(metric)})


@contextmanager
def _tensors_put_back(module: nn.Module) -> Iterator[int]:
    trained = [p for p in module.parameters() if p.requires_grad]
    parts = [part.detach() for part in local_parts([*trained, *module.buffers()])]
    copies = [part.to("cpu", copy=True) for part in parts]
    try:
        yield sum(c.numel() * c.element_size() for c in copies)
    finally:
        module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for part, saved in zip(parts, copies, strict=True):
                part.copy_(saved)


@contextmanager
def _optimizer_put_back(optimizer: Optimizer) -> Iterator[None]:
    state = {p: {k: _copied(v) for k, v in s.items()} for p, s in optimizer.state.items()}
    groups = [{k: _copied(v) for k, v in group.items()} for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    try:
        yield
    finally:
        optimizer.state.clear()
        optimizer.state.update(state)
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            group.update(saved)


def _copied(value: Any) -> Any:
    """Return a copy of a tensor; lists of parameters are none, and stay what they are."""
    return value.detach().clone() if isinstance(value, Tensor) else value
