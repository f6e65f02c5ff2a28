"""A step of a tuned model is made again after the folder that it began with has gone."""

import json
import shutil
from pathlib import Path

import pytest

from datamodules.tokenizers.trained import byte_tokenizer
from tests.causal_lm.folders import saved
from tests.causal_lm.test_resume import TEXT
from tests.text_corpora import saved_tokenizer
from tests.toy import ledger_lines


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
