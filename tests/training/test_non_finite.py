"""A sample whose values are not numbers: its step is not applied, and it is named."""

import json
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback

from lit_models.training.callbacks import NonFinite, default_callbacks
from lit_models.training.checkpoints import LastCheckpoint
from lit_models.training.lineage import Status, verify_run
from tests.toy import LitToy, ToyData, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*its update was not applied")
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adamw fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adam amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "adadelta": partial(torch.optim.Adadelta, lr=0.01),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
}


class PlantedData(ToyData):
    """Toy sequences of which one sample holds a NaN."""

    planted = 17

    def build(self, stage):
        dataset = super().build(stage)
        if stage == "train":
            dataset.values[self.planted] = dataset.values[self.planted].copy()
            dataset.values[self.planted][0] = float("nan")
        return dataset


class States(Callback):
    """Keeps weights and optimizer state after every step."""

    def __init__(self):
        self.after = {}

    def on_train_batch_end(self, trainer, pl_module, *_):
        weights = {n: p.detach().clone() for n, p in pl_module.named_parameters()}
        moments = [
            {k: torch.as_tensor(v).clone() for k, v in state.items() if v is not None}
            for state in trainer.optimizers[0].state.values()
        ]
        self.after[trainer.global_step] = (weights, moments)


def planted_step(data):
    """Return the step, from 1, whose batch holds the planted sample."""
    plan = data.plan("train", 0)
    return 1 + next(s for s in range(plan.num_steps) if data.planted in plan.step_ids(s))


def fit(folder, optimizer, policy, **options):
    states, data, module = States(), PlantedData(), LitToy(optimizer)
    callbacks = [c for c in default_callbacks() if not isinstance(c, (NonFinite, LastCheckpoint))]
    callbacks += [NonFinite(policy), LastCheckpoint(every_n_steps=1, every_epoch=False), states]
    options = {"max_epochs": 1, "limit_val_batches": 0, "callbacks": callbacks, **options}
    toy_trainer(folder, **options).fit(module, data)
    return states.after, planted_step(data)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_changes_neither_weights_nor_moments(tmp_path, name):
    after, step = fit(tmp_path, OPTIMIZERS[name], "skip")
    assert 1 < step < max(after)
    (weights, moments), (new_weights, new_moments) = after[step - 1], after[step]
    for parameter, value in weights.items():
        assert torch.equal(new_weights[parameter], value)
        assert torch.isfinite(after[max(after)][0][parameter]).all()
        assert not torch.equal(after[step + 1][0][parameter], value)
    for old, new in zip(moments, new_moments, strict=True):
        assert old.keys() == new.keys()
        assert all(torch.equal(new[key], old[key]) for key in old)
    proof = verify_run(tmp_path)
    assert proof.status == Status.NOT_APPLIED
    assert f"step {step}: its update was not applied; 8 samples are not in" in proof.faults[0]
    assert [use.num_samples for use in proof.epochs] == [50 - 8]


def test_a_callback_of_a_script_stands_before_the_ledger_and_skips_too(tmp_path):
    states, data = States(), PlantedData()
    options = {"max_epochs": 1, "limit_val_batches": 0, "callbacks": [NonFinite("skip"), states]}
    toy_trainer(tmp_path, **options).fit(LitToy(), data)
    step = planted_step(data)
    (weights, _), (new_weights, _) = states.after[step - 1], states.after[step]
    assert all(torch.equal(new_weights[name], value) for name, value in weights.items())
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if line.get("event") == "not_applied"]
    assert (event["step"], data.planted in event["sample_ids"]) == (step, True)
    (line,) = [line for line in lines if line.get("step") == step and "digest" in line]
    assert not line["is_finite"]


def test_a_skipped_step_has_nothing_to_clip(tmp_path):
    after, step = fit(tmp_path, OPTIMIZERS["adamw"], "skip", gradient_clip_val=1.0)
    weights = after[step - 1][0]
    assert all(torch.equal(after[step][0][name], value) for name, value in weights.items())


def test_the_run_stops_and_names_the_sample(tmp_path):
    with pytest.raises(FloatingPointError) as error:
        fit(tmp_path, OPTIMIZERS["adamw"], "stop")
    assert "Samples: " in str(error.value)
    assert "unisono replay" in str(error.value)
    events = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    (event,) = [e for e in events if e.get("event") == "not_applied"]
    assert PlantedData.planted in event["sample_ids"]
    assert f"step {event['step']}:" in str(error.value)


def test_a_rollback_takes_weights_and_moments_of_the_newest_checkpoint(tmp_path):
    after, step = fit(tmp_path, OPTIMIZERS["adamw"], "rollback")
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if line.get("event") == "rolled_back"]
    assert event["to_step"] == step  # saved after the step that was not applied
    weights, new = after[step - 1][0], after[step + 1][0]  # the step behind it is undone as well
    assert all(torch.equal(new[name], value) for name, value in weights.items())
    assert len(after) == 7
    proof = verify_run(tmp_path)
    undone = [f"step {n}: {why}" for n, why in ((step, "its update"), (step + 1, "rolled back to"))]
    assert [fault.startswith(text) for fault, text in zip(proof.faults, undone, strict=True)]
    assert proof.num_steps == 5


def test_too_many_skipped_steps_stop_the_run(tmp_path):
    callbacks = [*[c for c in default_callbacks() if not isinstance(c, NonFinite)]]
    callbacks.append(NonFinite("skip", most_skipped=1))
    trainer = toy_trainer(tmp_path, max_epochs=3, limit_val_batches=0, callbacks=callbacks)
    with pytest.raises(FloatingPointError, match="1 of 1 left out so far"):
        trainer.fit(LitToy(), PlantedData())
