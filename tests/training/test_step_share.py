"""What a micro-batch adds to its step's loss, and how long its gradients are there."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lit_models.training.callbacks import default_callbacks
from lit_models.training.optim import free_gradients
from lit_models.training.record import LossSum, share_of_step
from tests.toy import LitToy, ToyData, toy_trainer


class Seen(Callback):
    """Notes where in a step there are gradients."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def _note(self, place: str, module: LitToy) -> None:
        if any(p.grad is not None for p in module.parameters()):
            self.places.append(place)

    def on_train_batch_start(self, trainer, pl_module, *_: Any) -> None:
        self._note("start", pl_module)

    def on_before_zero_grad(self, trainer, pl_module, *_: Any) -> None:
        self._note("forward", pl_module)

    def on_train_batch_end(self, trainer, pl_module, *_: Any) -> None:
        self._note("end", pl_module)


@pytest.mark.parametrize(
    ("micro_batch_size", "expected"),
    [(8, ["end"] * 2), (4, ["end", "start", "end"] * 2)],
)
def test_gradients_are_there_to_the_end_of_their_step_and_not_in_the_next_forward_pass(
    tmp_path, micro_batch_size, expected
):
    seen = Seen()
    trainer = toy_trainer(tmp_path, max_steps=2, callbacks=[*default_callbacks(), seen])
    module = LitToy()
    trainer.fit(module, ToyData(global_batch_size=8, micro_batch_size=micro_batch_size))
    assert seen.places == expected
    assert all(p.grad is None for p in module.parameters())


def test_an_optimizer_that_frees_gradients_in_its_own_way_is_asked_to():
    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = True) -> None:
            for group in self.param_groups:
                group["params"][0].grad.zero_()

    for kind, expected in ((Own, [0.0, 0.0]), (torch.optim.SGD, None)):
        weight = torch.nn.Parameter(torch.ones(2))
        weight.grad = torch.ones(2)
        free_gradients(kind([weight]))
        assert (None if weight.grad is None else weight.grad.tolist()) == expected


def test_a_share_is_the_weighed_sum_of_totals_by_their_counts():
    three, none = torch.tensor(3.0, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    names = {"a": three, "b": three, "c": torch.tensor(7.0, dtype=torch.float64), "d": none}
    batch = {"weight": torch.ones(2), "step_denominators": {**names, "e": three}}
    totals = {
        "a": torch.tensor(1.3, requires_grad=True),
        "b": torch.tensor(2.7, dtype=torch.float64),
        "c": torch.tensor(0.5, dtype=torch.bfloat16),
        "d": torch.tensor(0.0),
        "e": torch.tensor(100.0),
    }
    terms = {name: LossSum(total, torch.tensor(1.0)) for name, total in totals.items()}
    share = share_of_step(terms, batch, {"b": 0.1, "e": 0.0})
    by_hand = torch.tensor(1.3) / 3 + torch.tensor(0.27, dtype=torch.float64) / 3
    expected = by_hand + (torch.tensor(0.5, dtype=torch.bfloat16) / 7).float()
    torch.testing.assert_close(share, expected)
    share.backward()
    assert totals["a"].grad == pytest.approx(1 / 3)
    halves = {"c": terms["c"]}
    assert share_of_step(halves, batch, {}).dtype == torch.float32  # sums of steps are no halves
    nothing = share_of_step({"e": terms["e"]}, batch, {"e": 0.0})
    assert nothing == 0
    assert nothing.shape == ()
