"""`unisono replay`: repeats a step exactly, and finds values in it that are not finite."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from datamodules.core.plan import rng_for
from lit_models.commands.replay import first_fault
from lit_models.run_files import read_checkpoint
from tests.conftest import TOY
from tests.toy import ToyData, ToySequences, ledger_lines
from tests.wrong_inputs import run_in

Unisono = Callable[..., tuple[int, str]]
RUN = "runs/toy"


def fit(folder: Path, *options: str) -> Path:
    """Train the toy in this folder, 7 steps an epoch, checkpoints at 7 and 14; return the run."""
    (folder / "toy.yaml").write_text(TOY)
    argv = ["--config=toy.yaml", f"--trainer.default_root_dir={RUN}", "--trainer.precision=64"]
    run_in(folder, "fit", *argv, "--trainer.logger=false", *options)
    return folder / RUN


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tmp_path_factory.mktemp("toy"), "--trainer.max_epochs=2")


@pytest.fixture
def run(trained: Path, own_folder: Path) -> Path:
    """A copy of the run, in the working folder."""
    return Path(shutil.copytree(trained, own_folder / RUN))


@pytest.fixture
def replayed(unisono: Unisono) -> Callable[..., tuple[dict, str]]:
    """Runs the command; returns its JSON file, and its output."""

    def act(run: Path, step: int, *options: str, status: int = 0) -> tuple[dict, str]:
        file = run.parent / "new" / "replay.json"
        arguments = ["replay", str(run), f"--step={step}", f"--json={file}", *options]
        arguments += ["--trust_checkpoint"]  # the toy's class is in the tests
        got, output = unisono(*arguments)
        assert got == status, output
        assert max(len(line) for line in output.splitlines() if str(run.parent) not in line) <= 80
        return json.loads(file.read_text()), output

    return act


def test_a_checkpoint_just_before_the_step_gives_the_ledgers_loss(run, replayed):
    content, output = replayed(run, 8)
    line = ledger_lines(run)[7]
    assert "checkpoint  previous.ckpt of step 7" in output
    assert content["checkpoint_step"] == content["weights_step"] == 7
    assert content["loss"] == pytest.approx(line["loss"], rel=1e-10)
    assert sum(s["share"] for s in content["samples"]) == pytest.approx(line["loss"], rel=1e-10)
    assert content["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-10)
    assert set(content["grad_norms"]) == {"model.0", "model.2"}
    total = sum(norm**2 for norm in content["grad_norms"].values()) ** 0.5
    assert content["grad_norm"] == pytest.approx(total, rel=1e-12)
    assert "finite      all losses and gradients" in output


def test_each_sample_has_its_own_losses_whole_beside_texts(run, replayed, monkeypatch):
    texts = {f"text {number}": "long " * 20 for number in range(4)}
    describe = ToySequences.describe
    monkeypatch.setattr(ToySequences, "describe", lambda *of: describe(*of) | texts)
    content, output = replayed(run, 8)
    state = read_checkpoint(run / "checkpoints/previous.ckpt")["state_dict"]
    weights = {name: value.double().numpy() for name, value in state.items()}
    toys = ToyData().build("train")
    num_values = sum(toys.lengths[s["sample_id"]] for s in content["samples"])
    assert len(content["samples"]) == 8
    for sample in content["samples"]:
        # Both terms in numpy, from the definition of the toy.
        number = sample["sample_id"]
        values = toys.values[number] + 0.01 * rng_for(0, 1, number).normal()
        hidden = np.tanh(values[:, None] @ weights["model.0.weight"].T + weights["model.0.bias"])
        each = (hidden @ weights["model.2.weight"].T + weights["model.2.bias"])[:, 0]
        by_sum = (each.sum() - (values**2).sum()) ** 2
        by_value = float(((each - values**2) ** 2).mean())
        length = len(values)
        assert sample["description"] == {"length": str(length), **texts}
        assert sample["terms"]["sum"] == pytest.approx(by_sum, rel=1e-9)
        assert sample["terms"]["values"] == pytest.approx(by_value, rel=1e-9)
        share = 0.5 * by_sum / 8 + by_value * length / num_values
        assert sample["share"] == pytest.approx(share, rel=1e-9)
        assert re.search(rf"│ +{sample['sample_id']} │ {length} ", output)


@pytest.mark.parametrize(("step", "start"), [(11, 7), (3, 0)])
def test_steps_between_are_trained_on_request(run, replayed, step, start):
    line = ledger_lines(run)[step - 1]
    content, output = replayed(run, step)
    assert content["weights_step"] == start
    assert f"{step - 1 - start} steps older" in output
    assert f"  {'previous.ckpt of step 7' if start else 'none before it: the untrained'}" in output
    assert content["loss"] != pytest.approx(line["loss"], rel=1e-6)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    content, output = replayed(run, step, "--advance=true")
    assert content["weights_step"] == step - 1
    assert f"trained {step - 1 - start} steps to it" in output
    assert content["loss"] == pytest.approx(line["loss"], rel=1e-10)
    assert content["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-10)
    assert sum(s["share"] for s in content["samples"]) == pytest.approx(line["loss"], rel=1e-10)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_run_of_other_batch_options_is_replayed_as_it_was(tmp_path, replayed):
    options = ["--data.global_batch_size=6", "--trainer.accumulate_grad_batches=2"]
    run = fit(tmp_path, *options, "--trainer.max_steps=3", "--trainer.gradient_clip_val=0.5")
    content, _ = replayed(run, 3, "--advance=true")
    line = ledger_lines(run)[2]
    assert content["loss"] == pytest.approx(line["loss"], rel=1e-10)
    assert content["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-10)


@pytest.mark.filterwarnings("ignore:.*its update was not applied")
def test_a_nan_in_one_samples_data_is_found_and_named(tmp_path, replayed):
    skipping = ["--trainer.callbacks+=lit_models.training.NonFinite"]
    skipping += ["--trainer.callbacks.policy=skip"]
    run = fit(tmp_path, "--data.nan_sample=20", "--data.num_samples=30", *skipping)
    step = next(line["step"] for line in ledger_lines(run) if not line["is_finite"])
    content, output = replayed(run, step, "--advance=true", status=1)
    assert content["faults"] == {"values of the batch": [20], "gradient of model.0": []}
    assert math.isnan(content["loss"])
    assert "not finite values of the batch; sample 20" in " ".join(output.split())
    assert "left out" in output  # the final weights cannot show it


def test_a_nan_weight_is_found_in_all_samples(run, replayed):
    path = run / "checkpoints/previous.ckpt"
    content = read_checkpoint(path)
    content["state_dict"]["model.2.weight"][0, 1] = float("nan")
    torch.save(content, path)
    content, output = replayed(run, 8, status=1)
    samples = content["faults"]["weight model.2.weight"]
    assert sorted(samples) == sorted(s["sample_id"] for s in content["samples"])
    assert "not finite weight model.2.weight; all 8 samples" in " ".join(output.split())


def test_a_step_is_that_of_the_lineage_of_the_final_weights(tmp_path, replayed, done):
    run = fit(tmp_path, "--trainer.max_epochs=2", "--trainer.max_steps=10")
    shutil.copy(run / "checkpoints/previous.ckpt", run / "checkpoints/at7.ckpt")
    again = ["--trainer.max_steps=9", f"--ckpt_path={RUN}/checkpoints/at7.ckpt"]
    fit(tmp_path, "--trainer.max_epochs=2", *again)
    assert replayed(run, 8)[0]["ledger"]["attempt"] == 2
    output = done("replay", str(run), "--step=10", status=1)
    assert "has no step 10: it has steps 1 to 9." in " ".join(output.split())


def test_samples_of_the_coder_are_texts_and_codes(copied_run, replayed):
    run = Path("runs/mine")
    content, output = replayed(run, 1)
    line = ledger_lines(run)[0]
    assert content["loss"] == pytest.approx(line["loss"], rel=1e-6)
    assert content["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-5)
    rows = {tuple(row.split(",")) for row in (copied_run / "train.csv").read_text().splitlines()}
    for words in (sample["description"] for sample in content["samples"]):
        assert (words["text"], words["language"], words["codes"]) in rows
    assert "network.encoder.layers.0" in content["grad_norms"]
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["init_args"]["loss"] = {"flat_dropout": 0.25}
    (run / "config-2.yaml").write_text(yaml.safe_dump(config))
    content, output = replayed(run, 1)
    assert "config-2.yaml" in output


def test_data_that_have_changed_are_refused(copied_run, done):
    table = copied_run / "train.csv"
    table.write_text(table.read_text().replace("smith aa", "smith of Bergen"))
    output = done("replay", "runs/mine", "--step=1", status=1)
    assert "the data are not those of runs/mine" in output
    assert "fingerprint: " in " ".join(output.split())
    table.unlink()
    output = done("replay", "runs/mine", "--step=1", status=1)
    assert "train.csv does not exist" in " ".join(output.split())


def test_a_step_that_used_other_samples_is_refused(run, done):
    ledger = run / "ledger.jsonl"
    digest = ledger_lines(run)[7]["digest"]
    ledger.write_text(ledger.read_text().replace(digest, "0" * 16))
    output = done("replay", RUN, "--step=8", "--trust_checkpoint", status=1)
    shown = " ".join(output.split())
    assert f"used 8 samples with digest {'0' * 16}, but the plan has 8 with {digest}" in shown


def test_an_option_of_an_earlier_version_is_named_with_its_line(run, done):
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("nan_sample:", "prints_last:"))
    shown = " ".join(done("replay", RUN, "--step=1", "--trust_checkpoint", status=2).split())
    assert re.search(rf"{RUN}/config.yaml:\d+: there is no option `prints_last`.*delete", shown)


@pytest.mark.parametrize(
    ("harm", "step", "message"),
    [
        (lambda run: run.rename(run.parent / "other"), 1, "there is no run folder runs/toy"),
        (lambda run: (run / "ledger.jsonl").unlink(), 1, "runs/toy holds no ledger.jsonl; name"),
        (lambda run: (run / "config.yaml").unlink(), 1, "holds no config.yaml, from which"),
        (lambda run: (run / "config.yaml").write_text("data: {}"), 1, "lacks model and data"),
        (lambda run: (run / "plan.json").unlink(), 1, "holds no plan.json"),
        (lambda run: None, 15, "has no step 15: it has steps 1 to 14."),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_missing_is_one_screen(run, done, harm, step, message):
    harm(run)
    output = done("replay", RUN, f"--step={step}", "--trust_checkpoint", status=1)
    assert message in " ".join(output.split())
    assert len(output.splitlines()) < 24


def test_a_damaged_checkpoint_is_passed_over(run, replayed):
    (run / "checkpoints/previous.ckpt").write_bytes(b"")
    (run / "checkpoints/best.ckpt").unlink(missing_ok=True)
    content, output = replayed(run, 8)
    assert content["checkpoint"] is None
    assert "passed over: previous.ckpt" in output


def test_a_checkpoint_of_discarded_steps_is_no_start(own_folder, replayed):
    run = fit(own_folder, "--trainer.max_steps=5")
    other = own_folder / "other.ckpt"
    shutil.copy(run / "checkpoints" / "last.ckpt", other)
    shutil.rmtree(run / "checkpoints")
    fit(own_folder, "--trainer.max_steps=6", "--ckpt_path=auto", "--model.optimizer.lr=1.0")
    shutil.copy(other, run / "checkpoints" / "other.ckpt")  # after step 5, at the old rate
    assert replayed(run, 6)[0]["checkpoint_step"] == 0


class Halves(torch.nn.Module):
    """1 / x, then a mask of -inf, then a softmax: for a sample of 0 the first module yields inf."""

    def __init__(self) -> None:
        super().__init__()
        self.invert = Invert()
        self.soft = torch.nn.Softmax(-1)
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))

    def training_terms(self, batch: dict) -> torch.Tensor:
        return self.soft(self.invert(batch["value"]) + self.mask).sum()


class Invert(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1 / x


@pytest.mark.parametrize(
    ("value", "place"),
    [(0.0, "output of invert"), (float("nan"), "value of the batch"), (2.0, "the loss itself, ")],
)
def test_the_first_tensor_that_is_not_finite_is_named(value, place):
    module = Halves()
    assert first_fault(module, {"value": torch.full((1, 2), value)}).startswith(place)
    assert all(not part._forward_hooks for part in module.modules())
