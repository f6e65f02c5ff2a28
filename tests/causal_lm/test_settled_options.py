"""What an evaluation takes from its checkpoint is never silently other than what was asked for."""

import re
from pathlib import Path

import pytest

from lit_models.cli import changes
from lit_models.commands.export import export_checkpoint
from tests.causal_lm.test_resume import SHAPE, TEXT

pytestmark = pytest.mark.slow

SIZES = ["--data.context_length=16", "--data.global_batch_size=8", "--data.split.by=tail"]
QUIET = [f"--trainer.enable_{name}=false" for name in ("progress_bar", "model_summary")]
DEVICE = ["--trainer.accelerator=cpu", "--trainer.devices=1"]
LORA = ["--model.lora.targets=[q_proj]", "--model.lora.rank=2", "--model.lora.alpha=16"]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Options of data and device, in a new working folder."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    return ["--data=datamodules.TextDataModule", "--data.train_files=text.txt", *SIZES, *DEVICE]


def test_an_evaluation_refuses_another_function_than_its_checkpoints(data, unisono):
    shape = [f"--model.network.{name}={value}" for name, value in SHAPE.items()]
    model = ["--model=lit_models.LitCausalLM", "--model.optimizer=torch.optim.SGD"]
    model += ["--model.optimizer.lr=0.01", *shape, *LORA]
    fit = [*model, *data, *QUIET, "--trainer.default_root_dir=run", "--trainer.max_steps=1"]
    status, output = unisono("fit", *fit)
    assert status == 0, output
    evaluate = [*data, *QUIET, "--ckpt_path=run/checkpoints/last.ckpt"]
    for option, told in (
        ("--model.lora.alpha=64", "model.lora.alpha 16.0 there and 64.0 here"),
        ("--model.lora=null", "model.lora .*alpha.* there and None here"),
        ("--model.network.num_heads=1", "model.network.num_heads 2 there and 1 here"),
        ("--model.network=gpt2-124m", "model.network .* there and gpt2-124m here"),
        ("--model.pretrained=base", "model.pretrained None there and base here"),
    ):
        status, output = unisono("validate", *evaluate, option)
        assert status == 2, output
        shown = " ".join(output.split())
        assert "weights of run/checkpoints/last.ckpt were trained for" in shown
        assert re.search(told, shown), shown
        assert len(output.splitlines()) <= 24
    status, output = unisono("validate", *evaluate, *LORA, "--model.lora.alpha=16")
    assert status == 0, output
    export_checkpoint(Path("run/checkpoints/last.ckpt"), Path("export"))
    status, output = unisono("validate", *data, *QUIET, "--ckpt_path=export", *LORA)
    assert status == 0, output
    assert "has no effect beside this checkpoint" in output


def test_changes_are_named_by_their_keys():
    then = {"a": {"init_args": {"b": 1, "c": [1, 2]}}, "d": None, "e": 2.0, "gone": 1}
    now = {"a": {"init_args": {"b": 3, "c": (1, 2), "new": 4}}, "d": {"x": 1}, "e": 2}
    assert list(changes(then, now)) == [("a.b", 1, 3), ("d", None, {"x": 1})]
