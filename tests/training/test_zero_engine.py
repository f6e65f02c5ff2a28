"""Strategy deepspeed on a world of one, around a small engine in the place of DeepSpeed's."""

import os
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import nn

from lit_models.training.callbacks import NonFinite, default_callbacks
from lit_models.training.checkpoint import read_checkpoint
from lit_models.training.strategies import ZeroStrategy, deepspeed
from lit_models.training.strategies.meshes import mesh_of
from lit_models.training.strategies.zero_optimizer import ZeroOptimizer
from lit_models.training.trial import without_trace
from tests.distributed.launch import LAUNCHERS
from tests.toy import LitToy, ToyData, ledger_lines, toy_trainer
from tests.training.zero_engine import Engine, in_a_row

CPU = torch.device("cpu")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone, and an environment that is put back."""
    for name in LAUNCHERS:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(kind: Any = torch.optim.SGD, **options: Any) -> tuple[Any, Engine, ZeroOptimizer]:
    """Return two weights [2] of one group, the engine and the optimizer that shows it."""
    weights = [nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([3.0, 4.0]))]
    inner = kind(weights, lr=1.0, **options)
    engine = Engine(None, inner)
    mesh = mesh_of(CPU, replicate=1, shard=1)
    return weights, engine, ZeroOptimizer(engine, inner, [weights], mesh)


def give(engine: Engine, optimizer: ZeroOptimizer, scale: float = 1.0) -> None:
    """Compute a gradient of [0, 3, 0, 4] x scale."""
    (first, second), *_ = engine.weights
    engine.backward(scale * (3 * first[1] + 4 * second[1]), scale_wrt_gas=False)
    engine.allreduce_gradients()
    optimizer.take_gradients()


def test_clipping_in_place_reaches_the_update(world):
    weights, engine, optimizer = made()
    give(engine, optimizer)
    rows = optimizer.param_groups[0]["params"]
    norm = torch.nn.utils.clip_grad_norm_(rows, 0.5).full_tensor()
    assert float(norm) == 5.0
    optimizer.step()
    torch.testing.assert_close(in_a_row(weights), torch.tensor([1.0, 1.7, 3.0, 3.6]))
    assert rows[0].grad is None
    assert engine.averaged_gradients == engine.all_grad_tensors == {0: None}


def test_without_gradients_nothing_moves(world):
    weights, engine, optimizer = made(torch.optim.AdamW, weight_decay=0.5)
    give(engine, optimizer)
    optimizer.step()
    before, moments = in_a_row(weights), str(optimizer.state)
    give(engine, optimizer)
    optimizer.param_groups[0]["params"][0].grad = None
    optimizer.step()
    assert torch.equal(in_a_row(weights), before)
    assert str(optimizer.state) == moments
    assert all(weight.grad is None for weight in weights)


def test_what_was_found_is_handed_to_the_optimizer_inside(world):
    weights, engine, optimizer = made(torch.optim.AdamW, fused=True)
    assert optimizer._step_supports_amp_scaling
    for found, moves in ((1.0, False), (0.0, True)):
        give(engine, optimizer)
        optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(found)
        before = in_a_row(weights)
        optimizer.step()
        assert torch.equal(in_a_row(weights), before) != moves


def test_a_whole_state_is_taken_back_as_it_was(world):
    _, engine, optimizer = made(torch.optim.Adam)
    for scale in (1.0, -2.0):
        give(engine, optimizer, scale)
        optimizer.step()
    state = optimizer.whole_state(keeps=True)
    assert state["state"][1]["exp_avg"].tolist() == pytest.approx([0, 4 * (0.1 * 0.9 - 0.2)])
    assert optimizer.whole_state(keeps=False) == {}
    _, _, other = made(torch.optim.Adam)
    other.load_state_dict(state)
    torch.testing.assert_close(other.whole_state(keeps=True), state, rtol=0, atol=0)


def test_other_groups_of_a_checkpoint_are_refused(world):
    _, _, optimizer = made()
    message = r"groups of \[1, 1\] parameters, this one of \[2\]; resume with the optimizer"
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}, {"params": [1]}]})


@pytest.fixture
def engines(world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "check_deepspeed", lambda: None)
    monkeypatch.setattr(deepspeed, "make_engine", lambda step, inner, *_: Engine(step, inner))


def fit(folder: Any, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the ledger and the last checkpoint of a run in micro-batches, with a NaN and decay."""
    seed_everything(1, verbose=False)
    kept = [c for c in default_callbacks() if not isinstance(c, NonFinite)]
    kept.insert(1, NonFinite("skip"))
    resume = options.pop("resume", None)
    shared = {"precision": "32-true", "gradient_clip_val": 1.0, "callbacks": kept}
    trainer = toy_trainer(folder, **{**shared, **options})
    data = ToyData(num_samples=24, micro_batch_size=4, nan_sample=5)
    module = LitToy(partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1))
    trainer.fit(module, data, ckpt_path=resume, weights_only=True)
    return ledger_lines(folder), read_checkpoint(folder / "checkpoints" / "last.ckpt")


@pytest.mark.filterwarnings("ignore:.*not finite.*not applied", "ignore:The dirpath has changed")
def test_a_run_and_one_that_goes_on_are_those_of_one_device(engines, tmp_path):
    lines, expected = fit(tmp_path / "one")
    assert [line["is_finite"] for line in lines].count(False) == 2
    fit(tmp_path / "half", max_epochs=1)
    resume = tmp_path / "half" / "checkpoints" / "last.ckpt"
    for name, more in (("zero", {}), ("resumed", {"resume": resume})):
        found, last = fit(tmp_path / name, strategy=ZeroStrategy(), **more)
        begin = 3 if more else 0
        for a, b in zip(lines[begin:], found, strict=True):
            if a["is_finite"]:
                assert b["loss"] == pytest.approx(a["loss"], rel=1e-6)
                assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)
        (ours,), (theirs,) = last["optimizer_states"], expected["optimizer_states"]
        assert ours["param_groups"] == theirs["param_groups"]
        pairs = ((ours["state"], theirs["state"]), (last["state_dict"], expected["state_dict"]))
        for pair in pairs:
            torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)


def test_a_step_that_was_tried_leaves_no_trace_in_the_engine(engines):
    weights, engine, optimizer = made(torch.optim.AdamW)
    strategy = ZeroStrategy()
    strategy._engine = engine
    before = in_a_row(weights)
    trainer: Any = SimpleNamespace(optimizers=[optimizer], strategy=strategy)
    with without_trace(trainer, nn.ParameterList(weights)):  # type: ignore[arg-type]
        give(engine, optimizer, float("nan"))
        optimizer.step()
        assert torch.isnan(engine.rows[0]).any()
    assert torch.equal(engine.rows[0], before)
    assert torch.equal(in_a_row(weights), before)


def test_another_kind_of_device_needs_a_process_of_its_own(monkeypatch):
    used = SimpleNamespace(device_name=lambda: "cuda")
    accelerator = SimpleNamespace(get_accelerator=lambda: used)
    monkeypatch.setitem(sys.modules, "deepspeed", SimpleNamespace(accelerator=accelerator))
    monkeypatch.setenv("DS_ACCELERATOR", "")
    monkeypatch.delenv("DS_ACCELERATOR")
    with pytest.raises(RuntimeError, match="works on cuda .* is on cpu; start it in a process"):
        deepspeed.make_engine(nn.Module(), torch.optim.SGD([nn.Parameter(torch.ones(1))]), 2, CPU)
    assert "DS_ACCELERATOR" not in os.environ
