"""Resume: after a kill, or with another accumulation, the run equals the uninterrupted one."""

import shutil
from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, SequentialLR

from lit_models.commands.verify import Status, verify, verify_run
from lit_models.run_files import read_checkpoint
from lit_models.training import LastCheckpoint, Ledger
from lit_models.training.optim import WarmupDecay
from tests.toy import LitToy, ToyData, ledger_lines, toy_trainer
from tests.toy import fit as fit_toy

MICRO = {1: None, 2: 4, 4: 2}  # accumulation -> micro-batch size at a global batch of 8


def fit(folder, accumulation=1, **options):
    data = ToyData(micro_batch_size=MICRO[accumulation])
    return fit_toy(folder, **{"data": data, "max_epochs": 3, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("whole")).state_dict()


def assert_uninterrupted(folder, module, whole):
    torch.testing.assert_close(whole, module.state_dict(), rtol=1e-12, atol=1e-12)
    verdict = verify_run(folder)
    assert verdict.findings == []
    assert (len(verdict.epochs), sum(use.num_samples for use in verdict.epochs)) == (3, 150)


# Steps of the kill and between checkpoints; micro-batches of a step before and after the kill.
@pytest.mark.parametrize(
    ("cut_at", "every", "before", "after"),
    [(5, 3, 1, 1), (7, 7, 4, 2), (8, 7, 1, 4), (8, 7, 4, 2), (10, 5, 4, 1), (15, 14, 1, 1)],
)
def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path, whole, cut_at, every, before, after):
    fit(tmp_path, before, cut_at=cut_at, every=every)
    module = fit(tmp_path, after, every=every, resume=True)
    assert_uninterrupted(tmp_path, module, whole)


@pytest.mark.parametrize(
    ("cut_at", "max_steps", "before", "after"),
    [(7, -1, 1, 1), (7, 21, 4, 2), (10, -1, 4, 2), (10, 21, 1, 1), (14, -1, 4, 2)],
)
def test_a_run_that_its_step_budget_ended_goes_on_with_a_larger_one(
    tmp_path, whole, cut_at, max_steps, before, after
):
    fit(tmp_path, before, every=100, max_steps=cut_at)
    module = fit(tmp_path, after, every=100, resume=True, max_steps=max_steps)
    assert_uninterrupted(tmp_path, module, whole)


def by_fifths(step: int) -> float:
    return 0.9 ** (step // 5)


SCHEDULES = {
    "none": None,
    "own": partial(WarmupDecay, warmup=4),
    "by a function": partial(LambdaLR, lr_lambda=by_fifths),
    "by recursion": partial(CosineAnnealingLR, T_max=30),
    "in sequence": lambda o: SequentialLR(
        o, [LambdaLR(o, by_fifths), CosineAnnealingLR(o, 9)], milestones=[8]
    ),
}


@pytest.mark.parametrize(("name", "factor"), [("own", 1), *((name, 10) for name in SCHEDULES)])
def test_a_resumed_run_takes_the_rate_and_the_decay_that_it_is_given(tmp_path, name, factor):
    def rates(folder, factor=1, **options):
        module = LitToy(partial(torch.optim.AdamW, lr=0.01 * factor, weight_decay=0.1 * factor))
        module.lr_scheduler = SCHEDULES[name]
        fit(folder, module=module, every=5, max_epochs=2, **options)
        return {row["step"]: row["learning_rate"] for row in ledger_lines(folder)}

    whole = rates(tmp_path / "whole")
    rates(tmp_path / "cut", cut_at=6)
    resumed = rates(tmp_path / "cut", factor, resume=True)
    assert {s: r for s, r in resumed.items() if s > 5} == pytest.approx(
        {s: r * factor for s, r in whole.items() if s > 5}
    )
    last = read_checkpoint(tmp_path / "cut" / "checkpoints" / "last.ckpt")
    groups = last["optimizer_states"][0]["param_groups"]
    assert [group["weight_decay"] for group in groups] == pytest.approx([0.1 * factor, 0])


@pytest.mark.parametrize("micro", [None, 2])
@pytest.mark.parametrize("own", [[], [Ledger]])
def test_the_order_of_the_callbacks_does_not_matter(tmp_path, micro, own):
    callbacks = [LastCheckpoint(every_n_steps=5, every_epoch=False), *(kind() for kind in own)]
    trainer = toy_trainer(tmp_path, max_epochs=1, callbacks=callbacks, enable_checkpointing=False)
    trainer.fit(LitToy(), ToyData(micro_batch_size=micro))
    content = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert content["global_step"] == 5
    assert content["ledger"]["hash"] == ledger_lines(tmp_path)[4]["hash"]
    assert verify([tmp_path]) == 0


def test_discarded_steps_are_listed_and_a_torn_line_is_accepted(tmp_path, capsys):
    fit(tmp_path, cut_at=5, every=3)
    with open(tmp_path / "ledger.jsonl", "a") as ledger:
        ledger.write('{"epoch": 0, "st')
    fit(tmp_path, every=3, resume=True)
    assert verify([tmp_path]) == 0
    shown = capsys.readouterr().out
    assert "attempt 1, steps 4 to 4 (repeated after the kill)" in shown
    assert "epochs 0 to 2     50 of 50 samples, each once" in shown


class Mutant(ToyData):
    """A loader with one fault, in the second step of the first epoch."""

    fault = ""

    def micro_batches(self, stage):
        for batch in super().micro_batches(stage):
            if stage == "train" and batch.epoch == 0 and batch.step == 1:
                ids, weights = batch.ids.copy(), batch.weights.copy()
                if self.fault == "skips":
                    weights[0] = 0
                elif self.fault == "repeats":
                    ids[0] = ids[1]
                else:
                    ids[0] = next(i for i in range(50) if i not in ids)
                batch = type(batch)(batch.epoch, batch.step, ids, weights, batch.denominators)
            yield batch


@pytest.mark.parametrize("fault", ["skips", "repeats", "swaps"])
def test_verify_catches_a_loader_that_skips_repeats_or_swaps_one_sample(tmp_path, fault, capsys):
    data = Mutant()
    data.fault = fault
    fit(tmp_path, data=data)
    assert verify([tmp_path]) == Status.OFF_PLAN
    assert "epoch 0, step 1" in capsys.readouterr().out


def test_a_resume_with_another_plan_is_refused_and_the_cause_is_named(tmp_path):
    fit(tmp_path, cut_at=5)
    with pytest.raises(ValueError, match=r"global_batch_size: 8 -> 10.*model\.init_from"):
        fit(tmp_path, resume=True, data=ToyData(global_batch_size=10))


def test_a_resume_with_a_smaller_epoch_warns(tmp_path):
    fit(tmp_path, cut_at=5)
    with pytest.warns(UserWarning, match=r"an epoch has 6 optimizer steps, and had 7 when"):
        fit(tmp_path, resume=True, limit_train_batches=6)
    assert [line["epoch"] for line in ledger_lines(tmp_path)] == [0] * 6 + [1] * 6 + [2] * 6


def test_an_optimizer_of_another_class_begins_without_moments(tmp_path):
    fit(tmp_path, module=LitToy(partial(torch.optim.SGD, lr=0.01, momentum=0.9)), cut_at=5)
    with pytest.warns(UserWarning, match="the checkpoint's SGD has no moments for AdamW"):
        fit(tmp_path, resume=True, every=6, max_epochs=1)
    last = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    states = last["optimizer_states"][0]["state"].values()
    assert [(len(s), float(s["step"])) for s in states] == [(3, 3)] * 4


@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
def test_numbers_beside_the_moments_are_resumed_unrounded(tmp_path, name):
    def train(folder, **options):
        return fit(folder, module=LitToy(partial(getattr(torch.optim, name), lr=0.01)), **options)

    whole = train(tmp_path / "whole").state_dict()
    train(tmp_path / "cut", cut_at=5)
    resumed = train(tmp_path / "cut", resume=True).state_dict()
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_moments_find_their_parameter_by_name(tmp_path):
    class Reordered(LitToy):
        def parameters(self, recurse=True):
            return reversed(list(super().parameters(recurse)))

        def named_parameters(self, *args, **kwargs):
            return reversed(list(super().named_parameters(*args, **kwargs)))

    fit(tmp_path, cut_at=10, every=5)
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=shutil.ignore_patterns("copy"))
    same = fit(tmp_path, resume=True).state_dict()
    module = fit(tmp_path / "copy", module=Reordered(), resume=True)
    torch.testing.assert_close(same, module.state_dict(), rtol=1e-10, atol=1e-10)
