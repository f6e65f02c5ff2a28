"""Damaged, foreign and missing model folders give an error of one screen."""

import json

import pytest
from safetensors.torch import load_file, save_file

from lit_models.causal_lm.layouts import read_hugging_face
from tests.causal_lm.folders import saved


def damage(folder, fault):
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if fault == "no config":
        (folder / "config.json").unlink()
    elif fault == "no json":
        (folder / "config.json").write_text("{")
    elif fault == "a list":
        (folder / "config.json").write_text("[]")
    elif fault == "foreign":
        (folder / "config.json").write_text('{"class_path": "x"}')
    elif fault == "no size":
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
    elif fault == "pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif fault == "nothing":
        (folder / "model.safetensors").unlink()
    elif fault == "torn":
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    elif fault in ("no shard", "outside"):
        (folder / "model.safetensors").unlink()
        name = "../a.safetensors" if fault == "outside" else "a.safetensors"
        index = {"weight_map": {"transformer.wte.weight": name}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif fault == "other size":
        (folder / "config.json").write_text(json.dumps({**config, "n_positions": 13}))
    else:
        change = {"lacking": weights.pop, "unknown": lambda name: weights.update(new=weights[name])}
        change.get(fault, lambda name: weights.update({"lm_head.weight": weights[name] + 1}))(
            "transformer.wte.weight"
        )
        save_file({k: v.clone() for k, v in weights.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        ("no config", FileNotFoundError, "config.json is missing: .* is no model in the Hugging"),
        ("no json", ValueError, "config.json is damaged"),
        ("a list", ValueError, "config.json holds no object"),
        ("foreign", ValueError, "names no model_type"),
        ("no size", ValueError, "config.json of .* lacks 'vocab_size'"),
        ("pickle", ValueError, "pytorch_model.bin, a pickle, which can run any code"),
        ("nothing", FileNotFoundError, "holds no model.safetensors and no"),
        ("torn", ValueError, "model.safetensors is damaged"),
        ("no shard", FileNotFoundError, r"lacks 1 of 1 files that its index names \(a.safetens"),
        ("outside", ValueError, "has no weight_map of file names beside it"),
        ("other size", ValueError, r"has transformer.wpe.weight of shape \[12, 8\], not \[13, 8\]"),
        ("lacking", ValueError, "lacks transformer.wte.weight"),
        ("unknown", ValueError, "has the unknown transformer.new"),
        ("untied head", ValueError, "says tie_word_embeddings, but its lm_head.weight differs"),
    ],
)
def test_damaged_and_foreign_folders_are_refused(tmp_path, fault, error, message):
    saved(tmp_path, "GPT2")
    damage(tmp_path, fault)
    with pytest.raises(error, match=message) as caught:
        read_hugging_face(tmp_path)
    assert len(str(caught.value)) < 700


def test_a_hub_name_is_told_from_a_folder():
    with pytest.raises(FileNotFoundError, match="hf download org/tiny --local-dir models/tiny"):
        read_hugging_face("org/tiny")
