"""What a micro-batch adds to its step's loss, whatever the precision."""

import pytest
import torch

from lit_models.training.record import LossSum, share_of_step
from tests.toy import LitToy, ToyData, toy_trainer


def test_a_batch_in_bfloat16_is_trained_on(tmp_path):
    trainer = toy_trainer(tmp_path, max_steps=2, precision="bf16-true")
    trainer.fit(LitToy(), ToyData(global_batch_size=8, micro_batch_size=8))
    assert trainer.global_step == 2


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
