"""Folders as checkpoints: the shards of a run, and what `unisono export` wrote."""

import json

import pytest
import torch
import torch.distributed as dist

from datamodules.occupations.datamodule import RECIPE_KEY
from datamodules.text.texts import TextDataModule
from lit_models.causal_lm.module import LitCausalLM
from lit_models.commands.export import export_checkpoint
from lit_models.occupation_coder.module import LitOccupationCoder
from lit_models.training.checkpoints import read_checkpoint, write_folder
from lit_models.training.predictions import PredictionWriter
from tests.causal_lm.test_resume import SGD, model, run
from tests.toy import toy_trainer

STANDS_FOR = "_sharded_tensor"


def write_shards(content, folder):
    """Write a checkpoint as a rank does that holds all of its weights."""
    weights = content["state_dict"]
    rest = {**content, "state_dict": {name: {STANDS_FOR: name} for name in weights}}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        write_folder(rest, {name: w.clone() for name, w in weights.items()}, folder)
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint, its shards in a folder, and its export."""
    home = tmp_path_factory.mktemp("runs")
    written = run(home / "run", model())
    write_shards(read_checkpoint(written), home / "shards.ckpt")
    export_checkpoint(written, home / "exported", class_path="lit_models.LitCausalLM")
    return {"file": written, "shards": home / "shards.ckpt", "export": home / "exported"}


@pytest.mark.parametrize("kind", ["shards", "export"])
def test_a_folder_is_evaluated_as_the_file_is(trained, tmp_path, kind):
    expected = torch.load(trained["file"], weights_only=True)["state_dict"]
    for verb in ("validate", "test"):
        module = model()
        run(tmp_path / verb, module, verb, ckpt_path=trained[kind])
        for name, value in expected.items():
            assert torch.equal(module.state_dict()[name].float(), value.float()), name


@pytest.mark.parametrize("kind", ["shards", "export"])
def test_a_folder_predicts_as_the_file_does(trained, tmp_path, kind):
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n', encoding="utf-8")
    written = []
    for name in ("file", kind):
        trainer = toy_trainer(
            tmp_path / name, callbacks=[PredictionWriter()], enable_checkpointing=False
        )
        trainer.ckpt_path = str(trained[name])
        data = TextDataModule(predict_files=str(prompts), global_batch_size=1)
        module = LitCausalLM(SGD)  # another shape than the checkpoint's
        trainer.predict(module, data, return_predictions=False, weights_only=True)
        written.append((tmp_path / name / "mine.completed.jsonl").read_text("utf-8"))
    assert written[0] == written[1]
    assert "completion" in json.loads(written[0])


def test_a_training_goes_on_from_shards(trained, tmp_path):
    whole = run(tmp_path / "whole", model(), steps=2)
    resumed = run(tmp_path / "resumed", model(), steps=2, ckpt_path=trained["shards"])
    for name, value in torch.load(whole, weights_only=True)["state_dict"].items():
        assert torch.equal(torch.load(resumed, weights_only=True)["state_dict"][name], value)


def test_the_recipe_of_occupations_is_read_from_shards(tmp_path):
    recipe = {"languages": ["unk", "da"]}
    content = {"state_dict": {"weight": torch.zeros(4, 2)}, RECIPE_KEY: recipe}
    write_shards(content, tmp_path / "last.ckpt")
    content = read_checkpoint(tmp_path / "last.ckpt", mmap=True)
    assert LitOccupationCoder.stored_recipe(content) == recipe
    with pytest.raises(ValueError, match="of another family: it holds no text_recipe"):
        LitCausalLM.stored_recipe(content)
