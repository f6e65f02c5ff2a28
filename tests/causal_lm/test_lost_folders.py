"""A run outlives the folder that it began with: resumed, evaluated and replayed without it."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from datamodules.text.instructions import InstructionDataModule
from datamodules.tokenizers.text import TokenizerOptions, byte_tokenizer
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.causal_lm.module import LitCausalLM
from lit_models.training.ledger import Ledger
from tests.causal_lm.folders import saved
from tests.causal_lm.test_resume import SGD, TEXT, model, run
from tests.text_corpora import saved_tokenizer
from tests.toy import ledger_lines, toy_trainer

pytestmark = pytest.mark.slow


def test_a_checkpoint_outlives_the_folder_that_it_began_with(tmp_path):
    base = tmp_path / "base"
    saved(base, "Llama", vocab_size=257)
    saved_tokenizer(byte_tokenizer(), base)
    lora = LoraOptions(["q_proj"], 2, 16.0)

    def tuned() -> LitCausalLM:
        return LitCausalLM(SGD, pretrained=str(base), lora=lora)

    whole = torch.load(run(tmp_path / "whole", tuned(), steps=2), weights_only=True)
    half = run(tmp_path / "half", tuned())
    shutil.rmtree(base)
    for verb in ("validate", "test"):
        run(tmp_path / verb, tuned(), verb, ckpt_path=half)
    resumed = run(tmp_path / "resumed", tuned(), steps=2, ckpt_path=half)
    found = torch.load(resumed, weights_only=True)
    assert found["text_recipe"] == whole["text_recipe"]
    for name, value in whole["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], value, rtol=1e-5, atol=1e-6)
    lora = LoraOptions(["q_proj"], 2, 64.0)
    with pytest.raises(ValueError, match=r"lora.alpha 16.0 there and 64.0 here"):
        run(tmp_path / "other", tuned(), steps=2, ckpt_path=half)
    with pytest.raises(FileNotFoundError, match="base"):
        run(tmp_path / "new", tuned())


def test_a_resume_without_its_folder_trains_where_validation_has_its_own_file(tmp_path):
    base, held = tmp_path / "base", tmp_path / "held.txt"
    saved(base, "Llama", vocab_size=257)
    saved_tokenizer(byte_tokenizer(), base)
    held.write_text("a hen sat. " * 30, encoding="utf-8")
    half = run(
        tmp_path / "half", LitCausalLM(SGD, pretrained=str(base)), validation_files=str(held)
    )
    shutil.rmtree(base)
    module, again = LitCausalLM(SGD, pretrained=str(base)), {"ckpt_path": half, "steps": 2}
    resumed = run(tmp_path / "half", module, validation_files=str(held), **again)
    assert torch.load(resumed, weights_only=True)["global_step"] == 2


def test_instructions_outlive_the_folder_of_their_tokenizer(tmp_path):
    saved_tokenizer(byte_tokenizer(), tmp_path / "base")
    rows = [{"prompt": f"{n} + {n} =", "completion": str(2 * n)} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = TokenizerOptions(kind="folder", path=str(tmp_path / "base"))

    def fit(steps: int, ckpt_path: str | None = None) -> None:
        data = InstructionDataModule(
            str(tmp_path / "a.jsonl"), tokenizer=options, context_length=16, global_batch_size=4
        )
        trainer = toy_trainer(
            tmp_path, max_steps=steps, callbacks=[Ledger()], enable_checkpointing=False
        )
        trainer.ckpt_path = ckpt_path
        trainer.fit(model(), data, weights_only=True)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        trainer.ckpt_path = str(tmp_path / "a.ckpt")
        trainer.validate(model(), data, weights_only=True)

    fit(1)
    shutil.rmtree(tmp_path / "base")
    fit(2, str(tmp_path / "a.ckpt"))
    assert torch.load(tmp_path / "a.ckpt", weights_only=True)["global_step"] == 2
    # Nor are training files needed where validation has its own.
    held = {"train_files": str(tmp_path / "b.jsonl"), "validation_files": str(tmp_path / "a.jsonl")}
    data = InstructionDataModule(**held, context_length=16)
    trainer = toy_trainer(tmp_path)
    trainer.ckpt_path = str(tmp_path / "a.ckpt")
    trainer.validate(model(), data, weights_only=True)
    assert len(data.datasets["validation"].lengths) > 0
    with pytest.raises(FileNotFoundError, match=r"data.train_files: .*b.jsonl"):
        toy_trainer(tmp_path).validate(model(), InstructionDataModule(**held, context_length=16))


def test_a_replay_needs_the_checkpoint_and_no_folder(tmp_path, monkeypatch, unisono):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    saved(tmp_path / "base", "Llama", vocab_size=257)
    saved_tokenizer(byte_tokenizer(), tmp_path / "base")
    model = ["--model=lit_models.LitCausalLM", "--model.optimizer=torch.optim.SGD"]
    model += ["--model.optimizer.lr=0.01", "--model.pretrained=base"]
    model += ["--model.lora.targets=[q_proj]", "--model.lora.rank=2"]
    data = ["--data=datamodules.TextDataModule", "--data.train_files=text.txt"]
    data += ["--data.context_length=16", "--data.global_batch_size=8", "--data.split.by=tail"]
    trainer = ["--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]
    trainer += ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    fit = ["fit", *model, *data, *trainer, "--trainer.default_root_dir=run", "--ckpt_path=auto"]
    status, output = unisono(*fit, "--trainer.max_steps=1")
    assert status == 0, output
    shutil.rmtree("base")
    status, output = unisono(*fit, "--trainer.max_steps=2")
    assert status == 0, output
    status, output = unisono("replay", "run", "--step=2", "--json=told.json")
    assert status == 0, output
    told = json.loads(Path("told.json").read_text())
    assert told["weights_step"] == 1
    assert told["loss"] == pytest.approx(ledger_lines(tmp_path / "run")[1]["loss"], rel=1e-5)
    status, output = unisono("replay", "run", "--step=1")
    assert status == 1
    assert "base is no folder" in " ".join(output.split())
