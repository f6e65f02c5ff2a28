"""Memory of a training state, the strategy that follows from it, and `micro_batch_size: auto`."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torchmetrics.aggregation import SumMetric

from datamodules.core.plan import PlanOptions, PlanRequest, deal, make_plan
from lit_models.run_files import read_checkpoint
from lit_models.training import ExactDropout
from lit_models.training.checkpoints import LastCheckpoint
from lit_models.training.memory import GIB, Rehearsal, choose_strategy, heaviest_ids, state_bytes
from lit_models.training.optim import WarmupDecay
from lit_models.training.rules import Verdict
from lit_models.training.run import Topology
from lit_models.training.strategies import strategy_name
from tests.distributed.jobs import HandMade, bytes_here
from tests.toy import LitToy, ToyData, callbacks_with, ledger_lines, toy_trainer

MIB = 2**20
TWO = Verdict("cuda", [0, 1], 2)


class Built(LightningModule):
    """A network of 2^20 weights, built in its constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2**20))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes of each GPU; tests change them."""
    of_gpu: dict[int, int] = {0: GIB, 1: GIB}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: Mock(total_memory=of_gpu[i]))
    return of_gpu


def test_a_trained_weight_takes_16_bytes_and_a_frozen_one_4():
    layer = nn.Linear(20, 30, bias=False)
    assert state_bytes(layer) == 600 * 16
    assert state_bytes(layer, "bf16-true") == 600 * 8
    assert state_bytes(layer, "bf16-mixed") == 600 * 16
    assert state_bytes(layer.requires_grad_(False)) == 600 * 4


def test_the_rule_is_what_a_run_holds(tmp_path):
    trainer = toy_trainer(tmp_path, max_steps=1)
    trainer.fit(LitToy(), ToyData())
    module = trainer.lightning_module
    gradients = sum(parameter.nbytes for parameter in module.parameters())
    assert bytes_here(trainer)["whole"] + gradients == state_bytes(module)


@pytest.mark.parametrize(
    ("mib", "strategy"), [(1024, "ddp"), (20, "ddp"), (19, "fsdp"), (9, "fsdp")]
)
def test_ddp_where_the_state_leaves_room_on_each_gpu_else_fsdp(memory, mib, strategy):
    memory[1] = mib * MIB  # the smallest GPU decides; the state takes 16 MiB
    chosen, line = choose_strategy(TWO, Built())
    assert chosen == strategy
    assert "0.02 GiB of the" in line


def test_processors_evaluation_and_unbuilt_networks_take_ddp_and_one_device_none(memory):
    assert choose_strategy(TWO, LitToy())[0] == "ddp"
    assert choose_strategy(TWO, Built(), is_training=False)[0] == "ddp"
    assert choose_strategy(Verdict("cpu", 2, 2), Built())[0] == "ddp"
    assert choose_strategy(Verdict("cuda", [0], 1), Built()) is None
    assert choose_strategy(Verdict("mps", 2, 2), Built()) is None
    assert choose_strategy(Verdict("cuda", [0], 1), Built(), precision="bf16-mixed") is None


@pytest.mark.parametrize("verdict", [Verdict("gpu", [0], 1), TWO])
def test_gpus_that_train_in_bf16_mixed_hold_whole_copies_by_fsdp_where_they_fit(memory, verdict):
    module = Built()
    module.takes_half_weights = True
    chosen, line = choose_strategy(verdict, module, precision="bf16-mixed")
    assert (strategy_name(chosen), chosen.replicate_size) == ("fsdp", verdict.world_size)
    assert line.startswith("strategy fsdp, no shards: weights, gradients and moments")
    memory[0] = 9 * MIB
    assert choose_strategy(verdict, module, precision="bf16-mixed")[0] == "fsdp"
    assert choose_strategy(TWO, module, False, "bf16-mixed")[0] == "ddp"


class Noisy(LitToy):
    """The toy with dropout, running statistics, a metric, and a record of shapes."""

    def configure_model(self) -> None:
        super().configure_model()
        if not hasattr(self, "noise"):
            self.noise, self.seen = nn.Dropout(0.5), SumMetric()
            self.register_buffer("running_mean", torch.zeros((), dtype=torch.float64))
        self.shapes: list[tuple[int, ...]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.shapes.append(tuple(batch["values"].shape))
        self.seen.update(batch["weight"].sum())
        self.running_mean.lerp_(batch["values"].mean(), 0.1)
        batch["values"] = self.noise(batch["values"])
        self.log("train/rows", float(len(batch["weight"])))
        return super().training_step(batch, batch_idx)


class TooLong(Noisy):
    """A network of two blocks that runs out of memory at a number of positions."""

    most, in_backward = 20, False

    def blocks(self) -> list[nn.Module]:
        return [self.model[0], self.model[2]]

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        if batch["values"].numel() > self.most and not self.in_backward:
            self.ends_here()
        with self.model[1].register_forward_hook(self.watch):
            return super().training_step(batch, batch_idx)

    def watch(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        if output.shape[:-1].numel() > self.most:
            output.register_hook(self.ends_here)

    def ends_here(self, *_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")


def fit(
    folder: Path, data: ToyData, module: Noisy | None = None, most: int = 20, **options: Any
) -> tuple[Noisy, HandMade]:
    """Train with the hand-made memory; return the module and the meter."""
    module = module or Noisy(lr_scheduler=partial(WarmupDecay, warmup=3))
    resume, first = options.pop("resume", None), options.pop("first", [])
    meter = HandMade(module, most)
    saves = LastCheckpoint(every_n_steps=5, every_epoch=False)
    callbacks = [*first, *callbacks_with(saves, Topology(), Rehearsal(meter))]
    seed_everything(1, verbose=False)
    toy_trainer(folder, callbacks=callbacks, **options).fit(module, data, ckpt_path=resume)
    return module, meter


def widths(plan: Any, lengths: np.ndarray, replicas: int, micros: int) -> list[tuple[int, int]]:
    return [
        (len(ids), int(lengths[ids].max()))
        for step in range(plan.num_steps)
        for replica in range(replicas)
        for ids, _ in deal(plan.step_ids(step), lengths, replicas, replica, micros)
    ]


@pytest.mark.parametrize(("replicas", "micros"), [(1, 1), (2, 3)])
def test_no_batch_of_any_epoch_is_longer_or_wider_than_the_heaviest(replicas, micros):
    lengths = np.random.default_rng(0).integers(1, 30, 101)
    request = PlanRequest("x", 101, 16, 3, bucket_window=2)
    heaviest = heaviest_ids(lengths, 16, replicas * micros)
    dealt = [
        w
        for epoch in range(5)
        for w in widths(make_plan(request, lengths, epoch), lengths, replicas, micros)
    ]
    assert lengths[heaviest].max() == max(width for _, width in dealt) == 29
    assert len(heaviest) * 29 >= max(map(math.prod, dealt))


@pytest.mark.parametrize("kinds", [[], [ExactDropout]])
def test_the_run_is_bit_for_bit_that_of_the_number_that_was_found(tmp_path, kinds):
    plan = PlanOptions(3, 2)
    module, meter = fit(tmp_path / "auto", ToyData(plan=plan), first=[k() for k in kinds])
    assert max(rows * width for rows, width in module.shapes if rows) >= 9
    assert meter.tried[:2] == [1, 2]
    facts = json.loads((tmp_path / "auto" / "topology.json").read_text())["plan"]
    found = facts["micro_batch_size"]
    assert 1 < found < 8
    assert facts["rehearsal"]["micro_batch_size"] == found
    data = ToyData(plan=plan, micro_batch_size=found)
    given, _ = fit(tmp_path / "given", data, first=[k() for k in kinds])
    assert given.shapes == module.shapes[-len(given.shapes) :]
    assert_equal(tmp_path / "auto", tmp_path / "given")


def assert_equal(one: Path, other: Path) -> None:
    """Assert that two runs have bit-identical ledgers and checkpoints."""
    left, right = ledger_lines(one), ledger_lines(other)
    for a, b in zip(left, right, strict=True):
        assert {**a, "seconds": 0, "hash": ""} == {**b, "seconds": 0, "hash": ""}
    left, right = (read_checkpoint(f / "checkpoints" / "last.ckpt") for f in (one, other))
    dumped = partial(json.dumps, default=lambda leaf: leaf.tolist(), sort_keys=True)
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "loops", "ToyData"):
        assert dumped(left[key]) == dumped(right[key]), key


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(("strategy", "in_backward"), [("auto", False), ("fsdp", True)])
def test_a_device_out_of_memory_takes_less(tmp_path, own_environment, strategy, in_backward):
    module = TooLong()
    module.in_backward = in_backward
    fit(tmp_path, ToyData(), module, most=10**6, strategy=strategy)
    facts = json.loads((tmp_path / "topology.json").read_text())["plan"]
    assert facts["micro_batch_size"] == 2  # 2 rows of 9 positions fit into 20
    assert facts["rehearsal"]["micro_batch_size"] == 2
    lines = ledger_lines(tmp_path)
    assert len(lines) == 14
    assert all(line["grad_norm"] > 0 for line in lines)


def test_a_sample_that_never_fits_is_named_with_the_way_out(tmp_path):
    words = "the longest sample, 11 of .* 9 positions, took .*max_length"
    with pytest.raises(RuntimeError, match=words):
        fit(tmp_path / "meter", ToyData(), most=8)
    module = TooLong()
    module.most = 8
    with pytest.raises(RuntimeError, match=r"9 positions, ran out of the .*fsdp"):
        fit(tmp_path / "memory", ToyData(), module, most=10**6)


def test_a_loss_that_couples_its_samples_is_tried_whole(tmp_path):
    class Coupled(Noisy):
        may_accumulate = False

    _, meter = fit(tmp_path / "fits", ToyData(), Coupled(), most=10**6)
    assert meter.tried == [8]
    with pytest.raises(RuntimeError, match="a micro-batch of 8 does not fit"):
        fit(tmp_path / "too large", ToyData(), Coupled(), most=20)


@pytest.mark.parametrize("most", [10, 1000])
def test_a_resumed_run_may_find_another_micro_batch(tmp_path, most):
    fit(tmp_path / "whole", ToyData(micro_batch_size=2))
    fit(tmp_path / "parts", ToyData(micro_batch_size=2), max_steps=5)
    last = tmp_path / "parts" / "checkpoints" / "last.ckpt"
    fit(tmp_path / "parts", ToyData(), most=most, resume=last)
    assert len(ledger_lines(tmp_path / "parts")) == 14
    whole = [line["digest"] for line in ledger_lines(tmp_path / "whole")]
    assert [line["digest"] for line in ledger_lines(tmp_path / "parts")] == whole


def test_a_number_or_a_given_accumulation_or_a_cpu_is_not_rehearsed(tmp_path):
    assert fit(tmp_path / "1", ToyData(micro_batch_size=4))[1].tried == []
    assert fit(tmp_path / "2", ToyData(), accumulate_grad_batches=2)[1].tried == []
    module = Noisy()
    seed_everything(1, verbose=False)
    toy_trainer(tmp_path, max_epochs=1).fit(module, ToyData())
    assert len(module.shapes) == 7
    assert {rows for rows, _ in module.shapes} == {8, 2}
