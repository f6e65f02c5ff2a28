"""Parts of rows and states of parameters, and what the strategy deepspeed refuses."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lit_models.training import preflight
from lit_models.training.muon import MuonAdamW
from lit_models.training.optim import parameter_groups
from lit_models.training.strategies import ZeroStrategy
from lit_models.training.strategies.deepspeed import ReachedParameters, check_module
from lit_models.training.strategies.zero_optimizer import check_optimizer, part_of, states_in

SHAPES = ((2, 3), (4,), (), (3, 1))  # 14 numbers
WORLD = 4  # parts of 4 numbers: the last one is filled up with two
PART = torch.zeros(4)
ADAMW = partial(torch.optim.AdamW, lr=0.1)


def moments(step: float = 3.0) -> tuple[list[nn.Parameter], list[dict[str, Any]]]:
    """Return parameters and what Adam would hold of them: the numbers of the row, ascending."""
    row = torch.arange(14.0)
    parameters, states, begin = [], [], 0
    for shape in SHAPES:
        parameter = nn.Parameter(torch.zeros(shape))
        value = row[begin : begin + parameter.numel()].view(shape)
        states.append({"step": torch.tensor(step), "exp_avg": value, "exp_avg_sq": -value})
        parameters.append(parameter)
        begin += parameter.numel()
    return parameters, states


def parts(states: list[dict[str, Any]], parameters: list[nn.Parameter]) -> list[dict[str, Tensor]]:
    return [part_of(states, parameters, PART, rank, {}) for rank in range(WORLD)]


def test_ranks_hold_the_row_end_to_end() -> None:
    parameters, states = moments()
    found = [part["exp_avg"].tolist() for part in parts(states, parameters)]
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 0, 0]]


def test_parts_of_all_ranks_are_the_states_that_they_came_from() -> None:
    parameters, states = moments()
    found = parts(states, parameters)
    whole = {k: torch.cat([part[k] for part in found]) for k in ("exp_avg", "exp_avg_sq")}
    again = list(states_in({"step": found[0]["step"], **whole}, parameters))
    torch.testing.assert_close(again, states, rtol=0, atol=0)
    assert again[0]["step"] is not again[1]["step"]  # one device counts for each parameter


def test_what_a_row_cannot_express_is_refused() -> None:
    parameters, states = moments()
    states[2]["step"] = torch.tensor(2.0)
    with pytest.raises(ValueError, match=r"unequal `step` .*\(2.0, 3.0\).*Resume with ddp or fsdp"):
        parts(states, parameters)
    states[2] = {}
    with pytest.raises(ValueError, match="unequal moments for parameters of one group"):
        parts(states, parameters)
    parameters, states = moments()
    states[1]["exp_avg"] = torch.zeros(5)
    with pytest.raises(ValueError, match=r"`exp_avg` of a parameter of shape \(4,\) is \(5,\)"):
        parts(states, parameters)


class Plain(LightningModule):
    """One layer and its optimizer."""

    def __init__(self, optimizer: Any = ADAMW) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.made = [optimizer(parameter_groups(self))]


class ChangesGradients(Plain):
    def on_after_backward(self) -> None:
        self.layer.bias.grad = None


class Leaves(Plain):
    reaches_all_parameters = False


class ByHand(Plain):
    automatic_optimization = False


class Wide(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layer.double()


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.layer.bias.requires_grad_(False)


class Scalar(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


class Packed(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)


class Scaled:
    scaler = object()


class Unscaled:
    scaler = None


@pytest.mark.parametrize(
    ("module", "plugin", "message"),
    [
        (Plain(partial(MuonAdamW, lr=0.1)), Unscaled, "MuonAdamW may need their shapes.*fsdp"),
        (ChangesGradients(), Unscaled, "ChangesGradients changes gradients in on_after_backward"),
        (Leaves(), Unscaled, "Leaves leaves parameters without a gradient.*use ddp or fsdp"),
        (ByHand(), Unscaled, "ByHand has 1 or steps by itself"),
        (Frozen(), Unscaled, "Frozen holds parameters that are frozen or empty.*leave them out"),
        (Scalar(), Unscaled, r"scale of Scalar has the shape \(\).*give it the shape \(1,\), or"),
        (Wide(), Unscaled, "trains float32 weights, got float64; use --trainer.precision"),
        (Packed(), Unscaled, "base is packed in whole numbers.*base_dtype to bfloat16, or use ddp"),
        (Plain(), Scaled, "without a loss scaler.*16-mixed; use bf16-mixed"),
    ],
)
def test_what_the_engine_would_train_otherwise_is_refused(module, plugin, message) -> None:
    with pytest.raises(ValueError, match=message):
        check_module(module, module.made, plugin)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_optimizers_of_torch_that_look_at_numbers_alone_are_taken(name) -> None:
    module = Plain(partial(getattr(torch.optim, name), lr=0.1))
    check_module(module, module.made, Unscaled)


def test_an_optimizer_of_the_same_name_is_another() -> None:
    class AdamW(torch.optim.AdamW):
        """Not torch's."""

    with pytest.raises(ValueError, match="the optimizer AdamW may need their shapes"):
        check_optimizer(AdamW([nn.Parameter(torch.zeros(1))]))


def test_without_the_package_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[deepspeed\]', or use .*=fsdp"):
        ZeroStrategy()


def test_a_third_stage_points_to_fsdp() -> None:
    with pytest.raises(ValueError, match="stage must be 1 or 2, got 3; --trainer.strategy=fsdp"):
        ZeroStrategy(stage=3)  # type: ignore[arg-type]


def test_a_step_that_reaches_some_parameters_alone_is_refused() -> None:
    module = nn.ModuleDict({"used": nn.Linear(2, 2), "idle": nn.Linear(2, 2)})
    reached = ReachedParameters(list(module.parameters()))
    for _ in range(2):  # two micro-batches
        module["used"](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"^idle\.weight, idle\.bias got no gradient .* Freeze"):
        reached.check(module)
    module["used"](torch.ones(1, 2)).sum().backward()
    module["idle"](torch.ones(1, 2)).sum().backward()
    reached.check(module)
    with pytest.raises(RuntimeError, match=r"^used\.weight, used\.bias, idle\.weight … got no"):
        reached.check(module)  # the next step begins anew
    reached.remove()
    module["used"](torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="got no gradient"):
        reached.check(module)
