"""The moving average against its definition, and in checkpoints."""

import pytest
import torch
from lightning.pytorch import Callback

from lit_models.training.callbacks import AveragedWeights, LastCheckpoint, default_callbacks
from lit_models.training.checkpoints import AVERAGED, read_checkpoint
from tests.toy import LitToy, ToyData, toy_trainer


class Weights(Callback):
    """Keeps the weights after each step, and those that validation saw."""

    def __init__(self):
        self.after, self.validated = [], []

    def on_train_start(self, trainer, pl_module):
        self.after = [{n: p.detach().clone() for n, p in pl_module.named_parameters()}]

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.after.append({n: p.detach().clone() for n, p in pl_module.named_parameters()})

    def on_validation_batch_start(self, trainer, pl_module, *_):
        self.validated.append({n: p.detach().clone() for n, p in pl_module.named_parameters()})


def fit(folder, decay=0.8, **options):
    seen = Weights()
    callbacks = [c for c in default_callbacks() if not isinstance(c, LastCheckpoint)]
    callbacks += [LastCheckpoint(every_n_steps=5), AveragedWeights(decay), seen]
    resume = options.pop("ckpt_path", None)
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "callbacks": callbacks, **options}
    trainer = toy_trainer(folder, **options)
    trainer.fit(LitToy(), ToyData(), ckpt_path=resume, weights_only=True)
    return seen


def average(weights, decay):
    """Return the moving average of a list of values, the first one its beginning."""
    mean = weights[0]
    for step, value in enumerate(weights[1:], 1):
        keep = min(decay, (1 + step) / (10 + step))
        mean = keep * mean + (1 - keep) * value
    return mean


def test_checkpoints_hold_the_average_and_validation_sees_it(tmp_path):
    seen = fit(tmp_path)
    content = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    for name, value in content[AVERAGED].items():
        expected = average([w[name] for w in seen.after], 0.8)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(seen.validated[-1][name], expected, rtol=1e-12, atol=1e-14)
        assert torch.equal(content["state_dict"][name], seen.after[-1][name])


def test_a_resumed_average_is_that_of_the_whole_run(tmp_path):
    fit(tmp_path / "whole")
    fit(tmp_path / "cut", max_steps=5)
    fit(tmp_path / "cut", ckpt_path=tmp_path / "cut" / "checkpoints" / "last.ckpt")
    whole, cut = (
        read_checkpoint(tmp_path / name / "checkpoints" / "last.ckpt") for name in ("whole", "cut")
    )
    for key in ("state_dict", AVERAGED):
        assert all(torch.equal(cut[key][name], value) for name, value in whole[key].items())


def test_a_checkpoint_loads_with_the_average(tmp_path):
    fit(tmp_path)
    path = tmp_path / "checkpoints" / "last.ckpt"
    module = LitToy()
    trainer = toy_trainer(tmp_path, logger=False)
    trainer.test(module, ToyData(), ckpt_path=path, weights_only=True, verbose=False)
    expected = read_checkpoint(path)[AVERAGED]
    assert all(torch.equal(p, expected[name]) for name, p in module.named_parameters())


def test_a_decay_outside_its_range_is_refused():
    with pytest.raises(ValueError, match="decay must lie between 0 and 1, got 1"):
        AveragedWeights(1.0)
