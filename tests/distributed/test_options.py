"""Every option has an effect: each is changed, and the change shows in a world of one process."""

import warnings
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lit_models.causal_lm.network import Decoder
from lit_models.training import default_callbacks
from lit_models.training.strategies import FullyShardedStrategy, ReplicatedStrategy, leave_group
from tests.distributed.families import FAMILIES, LitTied, text_files
from tests.toy import LitToy, ToyData, assert_same_samples, ledger_lines, toy_trainer


class Seen(Callback):
    """State of DDP and of the module after a step."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def on_train_batch_end(self, trainer, module, *_):
        logged = trainer.strategy.model._get_ddp_logging_data()
        sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        self.facts = {
            "buckets": len(str(sizes).split(",")),
            "static_graph": bool(logged.get("static_graph")),
            "broadcast_buffers": trainer.strategy.model.broadcast_buffers,
            "grads": len(grads),
            "storages": len({g.untyped_storage().data_ptr() for g in grads}),
        }


def fit(folder: Path, more: nn.Module | None = None, **options: Any) -> dict[str, Any]:
    seen, module = Seen(), LitToy()
    module.more = more  # the loss does not depend on this layer
    few = {"max_steps": 3, "limit_val_batches": 0, "callbacks": [*default_callbacks(), seen]}
    trainer = toy_trainer(folder, strategy=ReplicatedStrategy(**options), **few)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        trainer.fit(module, ToyData())
    dist.destroy_process_group()
    words = " ".join(str(warning.message) for warning in heard)
    return {**seen.facts, "warns_of_norms": "the run depends on the number of devices" in words}


def test_every_option_is_seen_and_none_changes_the_run(tmp_path, own_environment):
    plain = {"buckets": 1, "grads": 4, "storages": 4, "broadcast_buffers": True}
    plain |= {"static_graph": False, "warns_of_norms": False}
    assert fit(tmp_path / "plain") == plain
    options = {"gradient_as_bucket_view": True, "broadcast_buffers": False, "static_graph": True}
    changes = {"storages": 1, "broadcast_buffers": False, "static_graph": True}
    assert fit(tmp_path / "options", **options) == {**plain, **changes}
    assert_same_samples(ledger_lines(tmp_path / "plain"), ledger_lines(tmp_path / "options"))
    assert fit(tmp_path / "buckets", bucket_cap_mb=5e-5)["buckets"] > 1


def test_a_module_says_what_of_it_gets_no_gradient_and_stands_still(
    tmp_path: Path, own_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LitToy, "reaches_all_parameters", False, raising=False)
    monkeypatch.setattr(LitToy, "buffers_stand_still", True, raising=False)
    facts = fit(tmp_path, nn.Linear(2, 2))
    assert (facts["grads"], facts["broadcast_buffers"]) == (4, False)


def test_a_parameter_without_a_gradient_is_an_error_that_names_the_option(
    tmp_path: Path, own_environment: None
) -> None:
    unused = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="strategy='ddp_find_unused_parameters_true'"):
        fit(tmp_path / "error", unused)
    leave_group()
    assert fit(tmp_path / "found", nn.Linear(2, 2), find_unused_parameters=True)["grads"] == 4


def test_batch_norms_are_warned_of(tmp_path: Path, own_environment: None) -> None:
    norm = nn.BatchNorm1d(3).requires_grad_(False)
    assert fit(tmp_path, norm)["warns_of_norms"]
    assert torch.equal(norm.weight, torch.ones(3, dtype=norm.weight.dtype))


class Kept(Callback):
    """Bytes of the blocks' weights that a forward pass keeps for the backward pass; dtypes of
    parameters, gradients and moments."""

    def on_train_batch_start(self, trainer, module, *_):
        self.saved: list[torch.Tensor] = []
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.keep, lambda tensor: tensor)
        self.hooks.__enter__()

    def keep(self, tensor):
        self.saved.append(tensor)
        return tensor

    def on_before_backward(self, trainer, module, *_):
        self.hooks.__exit__(None, None, None)
        weights = [p for block in module.blocks() for p in block.parameters() if p.dim() > 1]
        shapes = {frozenset(p.shape) for p in weights}
        kept = [t.untyped_storage() for t in self.saved if frozenset(t.shape) in shapes]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in kept}
        self.bytes_each = sum(sizes.values()) / sum(p.numel() for p in weights)

    def on_train_batch_end(self, trainer, module, *_):
        tensors = [t for p in module.parameters() for t in (p, p.grad)]
        tensors += [m for state in trainer.optimizers[0].state.values() for m in state.values()]
        self.dtypes = {t.dtype for t in tensors}


def test_weights_gathered_in_bfloat16_are_not_kept_for_the_backward_pass(
    tmp_path: Path, own_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {"precision": "bf16-mixed", "max_steps": 1, "limit_val_batches": 0}
    # Three blocks and the remainder; the copies that autocast makes; one group.
    ways = ((True, 0, 0, 4), (False, 0, 2, 4), (True, 2**28, 0, 1))
    for takes_half, small, bytes_each, num_groups in ways:
        monkeypatch.setattr(LitTied, "takes_half_weights", takes_half)
        monkeypatch.setattr("lit_models.training.strategies.SMALL_NETWORK", small)
        kept, folder = Kept(), tmp_path / f"{takes_half} {small}"
        trainer = toy_trainer(folder, strategy=FullyShardedStrategy(), callbacks=[kept], **few)
        trainer.fit(LitTied(), ToyData())
        groups = [m for m in trainer.lightning_module.modules() if isinstance(m, FSDPModule)]
        assert (kept.bytes_each, len(groups)) == (bytes_each, num_groups)
        assert kept.dtypes == {torch.float32}
        assert trainer.precision == "bf16-mixed"


def test_a_weight_is_freed_before_the_next_one_is_drawn(
    tmp_path: Path, own_environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn, weights = Decoder.drawn, list[Any]()

    def watched(weight: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
        assert not [one for one in weights if one() is not None]
        weights.append(weakref.ref(weight[1]))
        return weight

    monkeypatch.setattr(Decoder, "drawn", lambda network: map(watched, drawn(network)))
    text_files(tmp_path)
    few = {"precision": 32, "max_steps": 1, "limit_val_batches": 0}
    trainer = toy_trainer(tmp_path / "run", strategy=FullyShardedStrategy(), **few)
    trainer.fit(*FAMILIES["causal_lm"](tmp_path / "run", {}))
    assert len(weights) > 10


def test_an_optimizer_that_needs_whole_matrices_is_refused_under_fsdp(
    tmp_path: Path, own_environment: None
) -> None:
    trainer = toy_trainer(tmp_path, strategy=FullyShardedStrategy(), precision=32)
    with pytest.raises(ValueError, match="Adafactor takes means .*strategy=ddp"):
        trainer.fit(LitToy(partial(torch.optim.Adafactor, lr=0.01)), ToyData())
