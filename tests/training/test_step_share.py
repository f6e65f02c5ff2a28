"""What a micro-batch adds to its step's loss, whatever the precision."""

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision

from lit_models.training.record import LossSum, share_of_step
from tests.toy import LitToy, ToyData, toy_trainer


def test_a_batch_in_bfloat16_is_trained_on(tmp_path):
    trainer = toy_trainer(tmp_path, max_steps=2, precision="bf16-true")
    trainer.fit(LitToy(), ToyData(global_batch_size=8, micro_batch_size=8))
    assert trainer.global_step == 2


def test_a_share_is_the_weighed_sum_of_totals_by_their_counts():
    counts = {"a": 3.0, "b": 3.0, "c": 7.0, "d": 0.0, "e": 3.0}
    batch = {"weight": torch.ones(2), "step_denominators": counts}
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
    expected = by_hand + torch.tensor(0.5) / 7
    torch.testing.assert_close(share, expected)
    share.backward()
    assert totals["a"].grad == pytest.approx(1 / 3)
    halves = {"c": terms["c"]}
    assert share_of_step(halves, batch, {}).dtype == torch.float32  # sums of steps are no halves
    nothing = share_of_step({"e": terms["e"]}, batch, {"e": 0.0})
    assert nothing == 0
    assert nothing.shape == ()


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_half_precision_rounds_no_count_and_no_sum(precision):
    rows, step_count = 3001, 65_603.0  # float16 ends at 65,504, bfloat16 has 8 bits
    batch = {"weight": torch.ones(rows), "step_denominators": {"a": step_count}}
    batch = HalfPrecision(precision).convert_input(batch)
    assert batch["weight"].dtype != torch.float32
    terms = {"a": LossSum.of(torch.full_like(batch["weight"], 32.0), batch["weight"])}
    assert terms["a"].count == rows
    assert float(share_of_step(terms, batch, {})) == pytest.approx(32 * rows / step_count, rel=1e-7)
