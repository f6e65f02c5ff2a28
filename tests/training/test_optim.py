"""Parameter groups, schedules, Muon and averaged weights."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import cli
from torch import Tensor, nn
from torch.optim import lr_scheduler

from lit_models.blocks import layer_rates
from lit_models.commands.verify import verify_run
from lit_models.run_files import read_checkpoint
from lit_models.training import AveragedWeights, LastCheckpoint, optim
from lit_models.training.checkpoints import newest_checkpoint
from tests.toy import AfterSteps, LitToy, ToyData, callbacks_with, ledger_lines, toy_trainer


def rates(steps, total, **options):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = optim.WarmupDecay(optimizer, **options)
    schedule.set_total_steps(total)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_warm_up_and_decay_follow_their_formulas():
    assert rates(4, 100, warmup=3, decay="constant") == [0.25, 0.5, 0.75, 1.0]
    assert rates(10, 20, warmup=0.15) == rates(10, 20, warmup=3)
    linear = rates(11, 10, decay="linear", final_factor=0.2)
    assert linear == pytest.approx([1 - 0.08 * step for step in range(11)])
    cosine = rates(10, 10)
    assert cosine == pytest.approx([0.5 * (1 + math.cos(math.pi * s / 10)) for s in range(10)])


def test_the_schedule_is_the_same_over_accumulation_and_reaches_the_end(tmp_path):
    seen = []
    for micro in (None, 2):
        schedule = partial(optim.WarmupDecay, warmup=0.25, decay="linear")
        folder = tmp_path / str(micro)
        toy_trainer(folder).fit(LitToy(lr_scheduler=schedule), ToyData(micro_batch_size=micro))
        seen.append([line["learning_rate"] for line in ledger_lines(folder)])
    assert seen[0] == seen[1]
    assert len(seen[0]) == 14
    assert max(seen[0]) == pytest.approx(0.01, rel=0.1)
    assert seen[0][-1] == pytest.approx(0.01 / (14 - 3.5), rel=1e-6)


def test_a_schedule_that_follows_a_metric_falls_after_epochs_and_must_name_it(tmp_path):
    plateau = {"factor": 0.5, "patience": 0, "threshold": 1e9}
    schedule = partial(lr_scheduler.ReduceLROnPlateau, **plateau)
    with pytest.raises(ValueError, match="does not name the metric that it follows"):
        toy_trainer(tmp_path).fit(LitToy(lr_scheduler=schedule), ToyData())
    schedule = partial(cli.ReduceLROnPlateau, monitor="val/loss", **plateau)
    with pytest.raises(ValueError, match="ReduceLROnPlateau follows val/loss, but this run"):
        toy_trainer(tmp_path, limit_val_batches=0).fit(LitToy(lr_scheduler=schedule), ToyData())
    for every in (1, 2):  # epochs between validations
        folder, options = tmp_path / str(every), {"max_epochs": 3 * every}
        trainer = toy_trainer(folder, check_val_every_n_epoch=every, **options)
        trainer.fit(LitToy(lr_scheduler=schedule), ToyData())
        rates = [line["learning_rate"] for line in ledger_lines(folder)]
        expected = [0.01 * 0.5**falls for falls in range(3) for _ in range(7 * every)]
        assert rates == pytest.approx(expected)


def test_a_longer_run_follows_its_own_length_after_a_resume(tmp_path):
    schedule = partial(optim.WarmupDecay, decay="linear")
    toy_trainer(tmp_path, max_epochs=1).fit(LitToy(lr_scheduler=schedule), ToyData())
    last = tmp_path / "checkpoints" / "last.ckpt"
    longer = toy_trainer(tmp_path, max_epochs=2)
    longer.fit(LitToy(lr_scheduler=schedule), ToyData(), ckpt_path=last)
    assert ledger_lines(tmp_path)[8]["learning_rate"] == pytest.approx(0.01 * (1 - 8 / 14))


def test_vectors_and_tables_do_not_decay_and_a_prefix_has_its_rate():
    parts = {"low": nn.Linear(2, 2), "table": nn.Embedding(3, 2), "top": nn.Linear(2, 1)}
    net = nn.ModuleDict(parts)
    groups = optim.parameter_groups(net, {"low": 0.25})
    found = {name: group for group in groups for name, _ in group["params"]}
    assert found["table.weight"]["weight_decay"] == found["low.bias"]["weight_decay"] == 0
    assert "weight_decay" not in found["top.weight"]
    assert found["low.weight"]["lr_factor"] == 0.25
    assert found["top.weight"]["lr_factor"] == 1


def network() -> nn.Sequential:
    torch.manual_seed(5)
    layers = [nn.Embedding(5, 4), nn.Linear(4, 3), nn.Linear(3, 7), nn.Linear(7, 5, bias=False)]
    return nn.Sequential(*layers)


def groups_of(net: nn.Sequential) -> list[dict[str, Any]]:
    return optim.parameter_groups(net, heads=[net[3].weight])


def muon(**values: Any) -> optim.MuonAdamW:
    return optim.MuonAdamW(groups_of(network()), **values)


def loss_of(net: nn.Module) -> Tensor:
    return net(torch.arange(5)).square().sum()


def test_a_head_that_is_the_embedding_too_is_trained_as_that() -> None:
    tied = nn.ModuleList([nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)])
    tied[1].weight = tied[0].weight
    [group] = optim.parameter_groups(tied, heads=[tied[1].weight])
    assert (group["kind"], group["weight_decay"]) == ("others", 0.0)


def test_muon_equals_torchs_on_matrices_and_torchs_adamw_on_the_rest():
    ours, theirs = network().bfloat16(), network().bfloat16()  # torch iterates in bfloat16 only
    both = {"lr": 0.02, "weight_decay": 0.1}
    optimizer = optim.MuonAdamW(groups_of(ours), adamw_factor=0.5, **both)
    muon = torch.optim.Muon([m.weight for m in theirs[1:3]], **both, adjust_lr_fn="match_rms_adamw")
    others = [theirs[0].weight, theirs[1].bias, theirs[2].bias]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": [theirs[3].weight]}]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for _ in range(4):
        for net, optimizers in ((ours, [optimizer]), (theirs, [muon, adamw])):
            loss_of(net).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)
    matrices = torch.randn(4, 5, 3, dtype=torch.float64)  # as a batch, and one by one
    one_by_one = torch.stack([optim.orthogonal(matrix.clone()) for matrix in matrices])
    torch.testing.assert_close(optim.orthogonal(matrices), one_by_one)


def test_parameters_without_a_gradient_stand_still():
    net = network()
    optimizer = optim.MuonAdamW(groups_of(net), lr=0.1)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert not optimizer.state
    (net[1](torch.ones(4)).sum()).backward()
    optimizer.step()
    moved = [name for name, p in net.named_parameters() if not torch.equal(p, before[name])]
    assert moved == ["1.weight", "1.bias"]


def test_muon_skips_a_step_with_found_inf():
    nets = [network(), network()]
    skipping, plain = (optim.MuonAdamW(groups_of(net), lr=0.1) for net in nets)
    for found_inf in (0.0, 1.0, 0.0):
        for net in nets:
            net.zero_grad()
            loss_of(net).backward()
        if found_inf:
            nets[0][1].weight.grad.fill_(math.nan)
        else:
            plain.step()
        skipping.found_inf = torch.tensor(found_inf)
        skipping.step()
    for found, expected in zip(*(net.parameters() for net in nets), strict=True):
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(skipping.state[found], plain.state[expected])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: muon(lr=-1.0), "must be 0 or more, .*: {'lr': -1.0"),
        (lambda: muon(momentum=1.0), "momentum and betas below 1: .*'momentum': 1.0"),
        (lambda: muon(betas=(0.9, 1.0)), "momentum and betas below 1: .* 1.0"),
        (lambda: optim.MuonAdamW(network().parameters()), "which parameters.*parameter_groups"),
        (lambda: AveragedWeights(1.0), "decay must lie between 0 and 1, got 1"),
        (lambda: optim.WarmupDecay(muon(), warmup=-1), "warmup must be 0 or more, got -1"),
        (lambda: rates(1, 14, warmup=30), "warmup is 30 steps, but the run has 14"),
        (lambda: layer_rates(network(), None, 0), "layer_decay must be above 0"),
        (lambda: optim.parameter_groups(nn.Module()), "no parameter is left to train"),
    ],
)
def test_wrong_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


class Validated(AfterSteps):
    """Keeps the weights used in validation too."""

    def on_validation_batch_start(self, trainer, pl_module, *_):
        self.validated = {n: p.detach().clone() for n, p in pl_module.named_parameters()}


def fit_averaged(folder, decay=0.8, **options):
    seen = Validated()
    callbacks = callbacks_with(LastCheckpoint(every_n_steps=5), AveragedWeights(decay), seen)
    resume = options.pop("ckpt_path", None)
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "callbacks": callbacks, **options}
    trainer = toy_trainer(folder, **options)
    trainer.fit(LitToy(), ToyData(), ckpt_path=resume, weights_only=True)
    return seen, trainer


def average(weights, decay):
    """Return the moving average of a list of values, which starts at the first."""
    mean = weights[0]
    for step, value in enumerate(weights[1:], 1):
        keep = min(decay, (1 + step) / (10 + step))
        mean = keep * mean + (1 - keep) * value
    return mean


def test_checkpoints_hold_the_average_which_validation_and_a_test_see(tmp_path):
    (seen, trainer), module = fit_averaged(tmp_path), LitToy()
    path = tmp_path / "checkpoints" / "last.ckpt"
    fresh, content = toy_trainer(tmp_path), read_checkpoint(path)
    calls = {"datamodule": ToyData(), "weights_only": True, "verbose": False}
    fresh.test(module, ckpt_path=path, **calls)
    for name, value in content[optim.AVERAGED].items():
        expected = average([w[name] for w in seen.weights], 0.8)
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(seen.validated[name], expected, rtol=1e-12, atol=1e-14)
        assert torch.equal(content["state_dict"][name], seen.weights[-1][name])
        assert torch.equal(module.get_parameter(name), value)
    # The run's own trainer uses them too, and so does a checkpoint of weights only.
    light, before = path.with_name("light.ckpt"), path.with_name("previous.ckpt")
    trainer.save_checkpoint(light, weights_only=True)
    assert "light.ckpt (step 14)" in verify_run(tmp_path).checkpoints
    assert newest_checkpoint(tmp_path) == path
    for given, same in ((None, path), (path, path), (light, path), (before, before)):
        own, other = ({"ckpt_path": kept, **calls} for kept in (given, same))
        expected = [call(LitToy(), **other) for call in (fresh.test, fresh.validate)]
        run = trainer.lightning_module
        assert [call(run, **own) for call in (trainer.test, trainer.validate)] == expected
    again = [callback for callback in trainer.callbacks if isinstance(callback, AveragedWeights)]
    toy_trainer(tmp_path / "new", callbacks=again, max_steps=1).fit(LitToy(), ToyData())
    anew = read_checkpoint(tmp_path / "new" / "checkpoints" / "last.ckpt")[optim.AVERAGED]
    for name, value in anew.items():  # not with those of the checkpoint that it evaluated
        torch.testing.assert_close(value, average([w[name] for w in seen.weights[:2]], 0.8))


def test_a_resumed_average_is_that_of_the_whole_run(tmp_path):
    fit_averaged(tmp_path / "whole")
    fit_averaged(tmp_path / "cut", max_steps=5)
    fit_averaged(tmp_path / "cut", ckpt_path=tmp_path / "cut" / "checkpoints" / "last.ckpt")
    paths = [tmp_path / name / "checkpoints" / "last.ckpt" for name in ("whole", "cut")]
    whole, cut = map(read_checkpoint, paths)
    for key in ("state_dict", optim.AVERAGED):
        assert all(torch.equal(cut[key][name], value) for name, value in whole[key].items())
    _, over = fit_averaged(tmp_path / "whole", ckpt_path=paths[0])  # without a step, and tested
    calls = {"datamodule": ToyData(), "verbose": False, "weights_only": True}
    found = over.test(over.lightning_module, **calls)
    assert found == over.test(LitToy(), ckpt_path=paths[0], **calls)
