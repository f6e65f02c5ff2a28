"""Wrong inputs and options of a dump and of a lens: errors name a way out, no file is written."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from datamodules import ActivationDumpDataModule
from lit_models import LitSubject
from lit_models.causal_lm.network import DecoderConfig
from lit_models.consistency_lens.lens import LensOptions
from lit_models.consistency_lens.subject import SubjectOptions
from tests.activation_dumps import documents, dumped, stories, trainer
from tests.consistency_lens.small_lens import lens_module, story_data
from tests.consistency_lens.small_lens import trainer as lens_trainer
from tests.wrong_inputs import error_of

Unisono = Callable[..., tuple[int, str]]
SUBJECT = """
    subject:
      layer: 1
      network: {max_positions: 16, hidden_size: 16, num_layers: 3, num_heads: 2}
"""
RUN = """
trainer: {accelerator: cpu, devices: 1, max_steps: 2, enable_model_summary: false}
"""
DUMP = f"""
model:
  class_path: lit_models.LitSubject
  init_args:{SUBJECT}
data:
  class_path: datamodules.ActivationDumpDataModule
  init_args:
    train_files: mine.jsonl
    tokenizer: {{kind: words}}
    context_length: 16
    positions: {{min_position: 2, per_document: 3}}
    predict_output: acts
{RUN}"""
LENS = f"""
model:
  class_path: lit_models.LitConsistencyLens
  init_args:
    optimizer: {{class_path: torch.optim.AdamW, init_args: {{lr: 0.001}}}}
    losses: {{reconstruction: {{weight: 1.0}}}}
    lens: {{num_words: 2}}{SUBJECT}
data:
  class_path: datamodules.ActivationDataModule
  init_args: {{activations: acts}}
{RUN}"""
FIT, PREDICT = ["fit", "--config=lens.yaml"], ["predict", "--config=dump.yaml"]
OTHER = "--data.predict_output=other"
CPU = ["--trainer.accelerator=cpu", "--trainer.devices=1"]
SHIPPED = [
    *("predict", "--config=consistency_lens/dump.yaml", *CPU, OTHER),
    "--data.train_files=mine.jsonl",
]


# name: (command, message)
WRONG: dict[str, tuple[list[str], str]] = {
    "a store of another subject": (
        [*FIT, "--model.subject.network.num_heads=1"],
        r"acts holds activations of another subject \(digest: \w+ there, \w+ here\); name the "
        "model that was dumped with model.subject.path",
    ),
    "a layer out of range": (
        [*PREDICT, OTHER, "--model.subject.layer=3"],
        "layer 3 is none of the subject's 3 blocks; give subject.layer or model.layers from 0 to 2",
    ),
    "a layer below 0": (
        [*PREDICT, OTHER, "--model.layers=[-1,1]"],
        "layer -1 is none of the subject's 3 blocks",
    ),
    "a null for a group of options": (
        [*FIT, "--model.subject.network=null"],
        "model.subject.network: null is read here only from YAML; write it into a file",
    ),
    "a subject with inputs of each block": (
        [*FIT, '--model.subject={"path": "gemma", "network": null}'],
        "each block of the model in gemma also reads the words",
    ),
    "a position beyond the context": (
        [*PREDICT, OTHER, "--data.positions.min_position=15"],
        "the part train has no activations: .* data.positions.min_position; lower it",
    ),
    "a context beyond the subject's": (
        [*PREDICT, OTHER, "--data.context_length=17", "--model.subject.network.positions=learned"],
        "context_length 17 .*16.*lower data.context_length",
    ),
    "more tokens than the subject's": (
        [*PREDICT, OTHER, "--model.subject.network.vocab_size=5"],
        "tokens and the network embeds 5",
    ),
    "no such store": (
        [*FIT, "--data.activations=none"],
        "none holds no schema.json, .*make it with",
    ),
    "documents in two parts": (
        [*PREDICT, OTHER, "--data.validation_files=held.jsonl"],
        "2 documents are both in train and in validation; take them out of one of the two",
    ),
    "a dump with fit": (["fit", *PREDICT[1:], OTHER], "a dump only predicts; run unisono predict"),
    "a missing subject": (
        [*SHIPPED, "--model.subject.path=none"],
        '"none" is no folder; models are read from local ones',
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents and a store of their activations."""
    folder = tmp_path_factory.mktemp("sound")
    dumped(folder / "acts", stories(folder, 40))
    twice = "".join((folder / "mine.jsonl").read_text().splitlines(keepends=True)[3:5])
    (folder / "held.jsonl").write_text(twice + '{"text": "a cat at hill"}\n')
    (folder / "gemma").mkdir()
    (folder / "gemma" / "config.json").write_text('{"model_type": "gemma3n_text"}')
    (folder / "dump.yaml").write_text(DUMP)
    (folder / "lens.yaml").write_text(LENS)
    return folder


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`")
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_input_is_one_screen_and_writes_no_store(unisono, sound, own_folder, name):
    argv, message = WRONG[name]
    shutil.copytree(sound, own_folder, dirs_exist_ok=True)
    status, output = unisono(*argv)
    assert status in (1, 2)
    assert re.search(message, error_of(output)), output
    assert "no --ckpt_path" not in output  # a subject is not trained
    assert not Path("other").exists()


def test_a_check_of_documents_and_of_a_store_says_what_they_hold(done, sound, monkeypatch):
    monkeypatch.chdir(sound)
    output = done("check", "--config=dump.yaml")
    assert re.search(r"train +32 +590 +0 +19 +139 ", output)
    assert "up to 3 of each document, from 2 on, seed 0" in output
    assert "duplicates train 0, validation 0, test 0" in output
    assert "0 different test documents are also in train" in output
    assert "2 (pet, place); documents with any: train 100.0 %" in output
    assert "norms" not in output
    of_store = done("check", "--config=lens.yaml")
    found = [line for line in output.splitlines() if line[:1] != "s"]
    assert set(found) <= set(of_store.splitlines())  # the store's documents are these
    assert "block 1 of 0 to 2, block_output, 16 features, float32" in of_store
    assert re.search(r"files +\d+ files, 0.\d MB, hold what was written", of_store)
    assert max(map(len, of_store.splitlines())) <= 80


def test_a_tokenizer_beside_that_of_the_subjects_folder_is_refused(tmp_path):
    data = ActivationDumpDataModule(str(tmp_path / "acts"), **documents(stories(tmp_path, 20)))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "gpt2"}')
    module = LitSubject(SubjectOptions(path=str(tmp_path / "model")))
    with pytest.raises(ValueError, match="data.tokenizer is kind words, and the pretrained model"):
        trainer(tmp_path).predict(module, data)


def test_explanations_beyond_learned_positions_are_refused_and_those_up_to_them_are_not(tmp_path):
    def fit(positions: Any, num_prompt: int) -> Any:
        sizes = {"max_positions": 32, "hidden_size": 8, "num_layers": 2, "num_heads": 2}
        subject = SubjectOptions(layer=0, network=DecoderConfig(**sizes, positions=positions))
        module = lens_module(subject, lens=LensOptions(num_words=2, num_prompt=num_prompt))
        run = tmp_path / f"{positions}-{num_prompt}"
        lens_trainer(run, max_steps=1).fit(module, story_data(tmp_path))
        return module

    module = fit("learned", 30)  # 30 + 1 + 2 - 1 = 32
    with pytest.raises(ValueError, match="a text has 41 tokens, the subject 32 positions"):
        module.explain(["the " * 40])
    fit("rotary", 31)
    with pytest.raises(ValueError, match=r"num_words 2 .* 31 need 33 .* learnt 32; lower"):
        fit("learned", 31)
