"""Losses: the gradient of one large batch, whatever the accumulation."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins import HalfPrecision

from lit_models.training import default_callbacks
from lit_models.training.exact import share_of_step
from lit_models.training.metrics import LossSum
from tests.toy import LitToy, ToyData, ToySequences, assert_same_samples, ledger_lines, toy_trainer


class FirstGradient(Callback):
    """Keeps the gradient of the first optimizer step."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 0:
            self.gradient = torch.cat([p.grad.flatten() for p in pl_module.parameters()])


def reference_gradient(size: int) -> torch.Tensor:
    """Return the gradient of one plain batch, computed sample by sample without the Trainer."""
    data, module = ToyData(global_batch_size=size), LitToy()
    data.setup("fit")
    module.configure_model()
    module.double()
    dataset: ToySequences = data.datasets["train"]
    ids = data.plan("train", 0).step_ids(0)
    sums = squares = 0.0
    for sample_id in ids:
        values = torch.from_numpy(dataset.example(int(sample_id), 0))
        each = module.model(values[:, None])[:, 0]
        sums = sums + (each.sum() - (values**2).sum()) ** 2
        squares = squares + ((each - values**2) ** 2).sum()
    (0.5 * sums / len(ids) + squares / dataset.lengths[ids].sum()).backward()
    return torch.cat([p.grad.flatten() for p in module.parameters()])


@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
def test_the_gradient_is_that_of_the_one_big_batch(tmp_path, micro_batch_size):
    keeper = FirstGradient()
    trainer = toy_trainer(tmp_path, max_steps=1, callbacks=[*default_callbacks(), keeper])
    trainer.fit(LitToy(), ToyData(global_batch_size=8, micro_batch_size=micro_batch_size))
    torch.testing.assert_close(keeper.gradient, reference_gradient(8), rtol=1e-12, atol=1e-12)


def test_every_step_agrees_over_accumulation_and_workers(tmp_path):
    runs = {}
    for name, options in {
        "plain": {},
        "accumulated": {"micro_batch_size": 2},
        "workers": {"num_workers": 2},
    }.items():
        toy_trainer(tmp_path / name).fit(LitToy(), ToyData(**options))
        runs[name] = ledger_lines(tmp_path / name)
    assert not torch.multiprocessing.active_children()  # its workers end with the run
    assert len(runs["plain"]) == 14
    for other in ("accumulated", "workers"):
        assert_same_samples(runs["plain"], runs[other])
        norms = [[line["grad_norm"] for line in runs[name]] for name in ("plain", other)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-10)


def test_batches_without_a_plan_are_refused(tmp_path):
    batches = torch.utils.data.DataLoader(ToyData())
    for call in ("fit", "predict"):
        with pytest.raises(ValueError, match="NoneType is no PlannedDataModule, which deals them"):
            getattr(toy_trainer(tmp_path), call)(LitToy(), batches)


def test_limits_and_intervals_count_optimizer_steps_and_an_overfitted_run_repeats_them(tmp_path):
    class Validations(Callback):
        steps: tuple[int, ...] = ()

        def on_validation_start(self, trainer, pl_module):
            if not trainer.sanity_checking:
                self.steps += (trainer.global_step,)

    # Even where a step is one batch, Lightning's callbacks act at each validation, not each epoch.
    stops = EarlyStopping("val/loss", min_delta=1e9, patience=0)
    cases = [("one", None, 2, []), ("four", 2, 0.5, []), ("each", None, 1, [stops])]
    for name, micro, interval, more in cases:
        counter = Validations()
        trainer = toy_trainer(
            tmp_path / name,
            limit_train_batches=4,
            val_check_interval=interval,
            max_epochs=1,
            callbacks=[*default_callbacks(), counter, *more],
        )
        trainer.fit(LitToy(), ToyData(micro_batch_size=micro))
        assert counter.steps == ((1, 2) if more else (2, 4))
        assert trainer.global_step == counter.steps[-1]
    toy_trainer(tmp_path / "overfitted", overfit_batches=2).fit(LitToy(), ToyData())
    digests = [line["digest"] for line in ledger_lines(tmp_path / "overfitted")]
    assert digests[:2] == digests[2:]


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
    torch.testing.assert_close(share, by_hand + torch.tensor(0.5) / 7)
    share.backward()
    assert totals["a"].grad == pytest.approx(1 / 3)
    halves = {"c": terms["c"]}
    assert share_of_step(halves, batch, {}).dtype == torch.float32  # sums stay float32
    nothing = share_of_step({"e": terms["e"]}, batch, {"e": 0.0})
    assert nothing == 0
    assert nothing.shape == ()


@pytest.mark.parametrize("precision", ["16-true", "bf16-true"])
def test_half_precision_rounds_no_count_and_no_sum(precision):
    rows, step_count = 3001, 65_603.0  # the largest float16 is 65,504; bfloat16 has 8 bits
    batch = {"weight": torch.ones(rows), "step_denominators": {"a": step_count}}
    batch = HalfPrecision(precision).convert_input(batch)
    assert batch["weight"].dtype != torch.float32
    terms = {"a": LossSum.of(torch.full_like(batch["weight"], 32.0), batch["weight"])}
    assert terms["a"].count == rows
    assert float(share_of_step(terms, batch, {})) == pytest.approx(32 * rows / step_count, rel=1e-7)
