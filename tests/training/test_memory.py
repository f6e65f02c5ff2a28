"""What a state takes of a device by hand, the strategy that follows, and the line that says why."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule
from torch import nn

from lit_models.training.callbacks.state_check import StateCheck
from lit_models.training.memory import (
    GIB,
    StateSize,
    activation_bytes,
    choose_strategy,
    fitting_devices,
    gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
    replicated_bytes,
    sharded_bytes,
)
from lit_models.training.rules import Settings, Verdict
from lit_models.training.state_size import moments_per_parameter, size_before_setup, size_of
from lit_models.training.strategy_choice import choose, device_memory_bytes
from tests.distributed.jobs import bytes_here
from tests.toy import LitToy, ToyData, toy_trainer

MILLION = 1_000_000
ADAMW = StateSize(MILLION, MILLION, gathered_parameters=100_000)
TWO = Verdict("cpu", 2, 2, 2)


class Layers(LightningModule):
    """Three layers of 20 x 20, an embedding of 10 x 20 beside them."""

    def __init__(self, optimizer: Any = None) -> None:
        super().__init__()
        self.optimizer = optimizer or partial(torch.optim.AdamW, lr=0.1)
        self.layers: nn.ModuleList | None = None

    def configure_model(self) -> None:
        self.layers = nn.ModuleList(nn.Linear(20, 20, bias=False) for _ in range(3))
        self.embedding = nn.Embedding(10, 20)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Evaluation gathers the whole network."""


class ShapedByData(LitToy):
    """A network that cannot be built before the data is read."""

    def configure_model(self) -> None:
        assert self.trainer.datamodule.datasets
        super().configure_model()


def test_a_million_weights_with_adamw_are_4_and_4_and_8_megabytes():
    assert parameter_bytes(ADAMW) == gradient_bytes(ADAMW) == 4 * MILLION
    assert optimizer_bytes(ADAMW) == 8 * MILLION
    assert replicated_bytes(ADAMW, 1) == 16 * MILLION
    assert replicated_bytes(ADAMW, 2) == 20 * MILLION  # the gradients once more, in ddp's buckets
    # A quarter, and weights and gradients of the largest block.
    assert sharded_bytes(ADAMW, 4) == 4 * MILLION + 2 * 400_000
    evaluated = replace(ADAMW, evaluated_parameters=MILLION)
    assert sharded_bytes(evaluated, 4) == 4 * MILLION + 4 * MILLION
    assert optimizer_bytes(replace(ADAMW, moments_per_parameter=0)) == 0
    frozen = replace(ADAMW, num_trained=100_000, bytes_per_parameter=2)
    assert replicated_bytes(frozen, 1) == 2 * MILLION + 200_000 + 400_000
    assert activation_bytes(1000, 8, 512) == 4_096_000


@pytest.mark.parametrize(
    ("memory_mb", "strategy", "line"),
    [
        (1000, "ddp", "strategy ddp: 0.02 GiB of weights, gradients and moments on each of 4 dev"),
        (25, "ddp", "0.0 GiB there"),
        (24, "fsdp", "strategy fsdp: 0.00 GiB .* on each of 4 devices, where ddp would hold 0.02"),
        (5, "fsdp", "strategy fsdp"),
    ],
)
def test_ddp_where_the_state_leaves_room_on_each_device_else_fsdp(memory_mb, strategy, line):
    choice = choose_strategy(ADAMW, 4, memory_mb * MILLION)
    assert choice.strategy == strategy
    assert choice.unchecked_bytes is None
    assert line.split(".*")[0] in choice.line
    assert line.split(".*")[-1] in choice.line


def test_the_error_says_what_is_missing_and_how_many_devices_are_enough():
    large = StateSize(10**9, 10**9, 10**7)  # 16 GB of state, 0.08 GB gathered
    sums = r"3.80 GiB \(.* 3.73 GiB, .* 0.07 GiB\), 1.00 GiB are there: 2.80 GiB are missing"
    with pytest.raises(ValueError, match=sums):
        choose_strategy(large, 4, GIB)
    with pytest.raises(ValueError, match="Use 17 devices, --trainer.precision=bf16-true"):
        choose_strategy(large, 4, GIB)
    assert choose_strategy(large, 17, GIB).strategy == "fsdp"
    with pytest.raises(ValueError, match="Use --trainer.precision"):  # one block is too large
        choose_strategy(replace(large, gathered_parameters=10**9), 4, GIB)


sizes = st.builds(
    lambda n, trained, gathered, evaluated, bytes_each, moments: StateSize(
        n, min(n, trained), min(n, gathered), evaluated * n, bytes_each, moments
    ),
    *(st.integers(1, 10**12) for _ in range(3)),
    st.integers(0, 1),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([0.0, 0.1, 1.0, 2.0]),
)


@given(sizes, st.integers(1, 1000), st.integers(1, 1000))
def test_more_devices_never_need_more_on_each_under_fsdp(size, num_devices, more):
    assert sharded_bytes(size, num_devices + more) <= sharded_bytes(size, num_devices)


@given(sizes, st.integers(2, 1000), st.integers(1, 10**13))
def test_what_is_chosen_fits_and_what_is_refused_does_not(size, num_devices, memory_bytes):
    needs = {
        "ddp": replicated_bytes(size, num_devices),
        "fsdp": sharded_bytes(size, num_devices),
    }
    try:
        assert needs[choose_strategy(size, num_devices, memory_bytes).strategy] <= memory_bytes
    except ValueError:
        assert min(needs.values()) > memory_bytes
        enough = fitting_devices(size, memory_bytes)
        assert enough is None or sharded_bytes(size, enough) <= memory_bytes
        assert enough is None or enough > num_devices


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [
        (partial(torch.optim.AdamW, lr=0.1), 2),
        (partial(torch.optim.Adam, lr=0.1, amsgrad=True), 3),
        (partial(torch.optim.SGD, lr=0.1), 0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1),
        (None, 2),
    ],
)
def test_the_moments_of_an_optimizer_are_counted(optimizer, moments):
    assert moments_per_parameter(optimizer) == moments


def test_a_module_is_counted_without_being_built():
    module, generator = Layers(), torch.get_rng_state()
    size = size_before_setup(module, "32-true")
    assert size == StateSize(1400, 1400, 600, 1400, 4, 2.0)
    assert module.layers is None
    assert torch.equal(torch.get_rng_state(), generator)
    assert size_before_setup(module, "bf16-true").bytes_per_parameter == 2
    assert size_before_setup(module, 64).bytes_per_parameter == 8
    assert size_before_setup(module, "bf16-mixed").bytes_per_parameter == 4
    module.configure_model()
    assert size_of(module) == size_before_setup(module, None) == size
    assert size_before_setup(ShapedByData(), None) is None


def test_the_formula_is_what_a_run_holds(tmp_path):
    trainer = toy_trainer(tmp_path, max_steps=1)
    trainer.fit(LitToy(), ToyData())
    size = size_of(trainer.lightning_module)
    assert bytes_here(trainer)["whole"] == parameter_bytes(size) + optimizer_bytes(size) == 13 * 24


def test_auto_on_several_devices_becomes_ddp_or_fsdp_by_the_memory_there():
    data = ToyData(memory_budget_gib=1e-4)  # 107 kB
    choice = choose(Settings(), TWO, Layers(), data)
    assert choice.strategy == "ddp"  # 1400 x 20 bytes
    wide = Layers(partial(torch.optim.Adam, lr=0.1, amsgrad=True))
    data.memory_budget_gib = 3e-5  # 32 kB; ddp takes 33.6, fsdp 14 + 5.6
    assert choose(Settings(), TWO, wide, data).strategy == "fsdp"
    data.memory_budget_gib = 1e-5
    with pytest.raises(ValueError, match="does not fit, not even under fsdp"):
        choose(Settings(), TWO, wide, data)
    evaluated = choose(Settings(), TWO, wide, data, is_training=False)
    assert evaluated.strategy == "ddp"


def test_auto_says_where_the_number_of_weights_is_not_known():
    choice = choose(Settings(), TWO, ShapedByData(), ToyData(memory_budget_gib=8))
    assert (choice.strategy, choice.unchecked_bytes) == ("ddp", 8 * GIB)
    assert "compared then with the memory of each of 2 devices, 8.0 GiB there" in choice.line


def test_one_device_and_named_strategies_stay_as_they_are():
    assert choose(Settings(), Verdict("cpu", 1, 1, 1), Layers()) is None
    assert choose(Settings(strategy="ddp_spawn"), TWO, Layers()) is None
    assert choose(Settings(strategy=None), TWO, Layers()) is None
    assert choose(Settings(), Verdict("mps", 2, 2, 2), Layers()) is None


def test_processes_share_the_memory_of_the_machine():
    one = Verdict("cpu", 1, 1, 1)
    assert device_memory_bytes(TWO, None) == device_memory_bytes(one, None) // 2 > 2**28


def test_a_network_that_turns_out_too_large_is_refused_before_the_first_step(tmp_path):
    state = 13 * 8 * 4  # toy weights, gradients and two moments each, in float64
    with pytest.raises(ValueError, match=r"--trainer\.strategy=fsdp takes"):
        toy_trainer(tmp_path, callbacks=[StateCheck(state - 1)]).fit(LitToy(), ToyData())
    with pytest.warns(UserWarning, match="activations come on top"):
        toy_trainer(tmp_path, max_steps=1, callbacks=[StateCheck(state)]).fit(LitToy(), ToyData())
    toy_trainer(tmp_path, max_steps=1, callbacks=[StateCheck(2 * state)]).fit(LitToy(), ToyData())
