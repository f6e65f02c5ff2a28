"""What a state takes of a device by hand, and the strategy that follows."""

import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_models.training.memory import (
    GIB,
    StateCheck,
    choose_strategy,
    most_resident_bytes,
    state_bytes,
)
from lit_models.training.rules import Settings, Verdict
from tests.distributed.jobs import bytes_here
from tests.toy import LitToy, ToyData, toy_trainer

MIB = 2**20
TWO = Verdict("cuda", 2, 2, 2)
SAYS = "from lit_models.training.memory import most_resident_bytes; print(most_resident_bytes())"


class Built(LightningModule):
    """A network of 2^20 weights that its constructor builds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2**20))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Bytes of each GPU, of which the tests choose."""
    of_gpu: dict[int, int] = {0: GIB, 1: GIB}
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(total_memory=of_gpu[index]),
    )
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
    ("mib", "strategy"), [(1024, "ddp"), (20, "ddp"), (19, "fsdp"), (10, "fsdp"), (9, None)]
)
def test_ddp_where_the_state_leaves_room_on_each_gpu_else_fsdp(memory, mib, strategy):
    memory[1] = mib * MIB  # the smallest decides; the state takes 16 MiB
    if strategy is None:
        with pytest.raises(ValueError, match="do not fit even divided by fsdp. Use 3 devices"):
            choose_strategy(Settings(), TWO, Built())
        return
    choice = choose_strategy(Settings(), TWO, Built())
    assert choice.strategy == strategy
    assert choice.unchecked_bytes is None
    assert "0.02 GiB of the" in choice.line


def test_a_network_that_the_data_shapes_is_compared_before_the_first_step(memory):
    choice = choose_strategy(Settings(), TWO, LitToy())
    assert (choice.strategy, choice.unchecked_bytes) == ("ddp", GIB)
    assert "known once the data is read" in choice.line


def test_processors_and_evaluation_take_ddp_and_named_strategies_stay(memory):
    assert choose_strategy(Settings(), TWO, Built(), is_training=False).strategy == "ddp"
    assert choose_strategy(Settings(), Verdict("cpu", 2, 2, 2), Built()).strategy == "ddp"
    assert choose_strategy(Settings(), Verdict("cuda", 1, 1, 1), Built()) is None
    assert choose_strategy(Settings(strategy="ddp_spawn"), TWO, Built()) is None
    assert choose_strategy(Settings(strategy=None), TWO, Built()) is None
    assert choose_strategy(Settings(), Verdict("mps", 2, 2, 2), Built()) is None


def test_a_network_that_turns_out_too_large_is_refused_before_the_first_step(tmp_path):
    state = 13 * 8 * 4  # toy weights, gradients and two moments each, in float64
    with pytest.raises(ValueError, match=r"--trainer\.strategy=fsdp takes"):
        toy_trainer(tmp_path, callbacks=[StateCheck(state - 1)]).fit(LitToy(), ToyData())
    with pytest.warns(UserWarning, match="activations come on top"):
        toy_trainer(tmp_path, max_steps=1, callbacks=[StateCheck(state)]).fit(LitToy(), ToyData())
    toy_trainer(tmp_path, max_steps=1, callbacks=[StateCheck(2 * state)]).fit(LitToy(), ToyData())


def test_the_memory_of_the_program_that_started_a_process_is_not_counted():
    def of_a_process() -> int:
        command = [sys.executable, "-c", SAYS]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    small = of_a_process()
    held = b"\x01" * max(2 * small, 512 * MIB)
    assert abs(of_a_process() - small) < 50 * MIB < len(held)
    unit = 1 if sys.platform == "darwin" else 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    assert most_resident_bytes() == pytest.approx(most, rel=0.5)
