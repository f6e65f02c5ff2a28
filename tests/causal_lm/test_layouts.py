"""GPT-2 and Llama folders of transformers: read, written, the same logits; others are refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lit_models.causal_lm.decoder_config import DecoderConfig
from lit_models.causal_lm.layout_configs import obstacle
from lit_models.causal_lm.layouts import (
    hugging_face_files,
    read_hugging_face,
)
from lit_models.causal_lm.model_folders import read_config
from lit_models.causal_lm.network import Decoder
from lit_models.causal_lm.rotary import RopeScaling
from tests.causal_lm.folders import (
    LLAMA3_ROPE,
    made,
    packed_logits,
    ragged_logits,
    saved,
    worst_difference,
    written,
)

MODELS = {
    "gpt2": ("GPT2", {}),
    "gpt2-untied": ("GPT2", {"tie_word_embeddings": False, "n_inner": 20}),
    "llama": ("Llama", {"rms_norm_eps": 1e-2}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama-3.1": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
}
OWN = {
    "gpt2": DecoderConfig(
        norm="layer", positions="learned", activation="gelu", bias=True, dropout=0.1
    ),
    "gpt2-no-bias": DecoderConfig(norm="layer", positions="learned", activation="gelu"),
    "llama": DecoderConfig(num_kv_heads=1, tied=False, rope_theta=50.0),
    "llama-bias": DecoderConfig(bias=True, rope_scaling=RopeScaling(4.0, 1.0, 2.0, 8)),
}
TINY = {"vocab_size": 29, "max_positions": 16, "hidden_size": 16, "num_layers": 2, "num_heads": 2}


def loaded(folder, **options):
    config, weights = read_hugging_face(folder, **options)
    network = Decoder(config)
    network.load_state_dict(weights)
    return network


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_transformers_gives_its_logits(tmp_path, name):
    kind, options = MODELS[name]
    model = saved(tmp_path, kind, **options)
    assert obstacle(read_config(tmp_path)) is None
    network = loaded(tmp_path)
    assert worst_difference(packed_logits(network), ragged_logits(model)) < 1e-5


@pytest.mark.parametrize("name", OWN)
def test_an_own_network_gives_its_logits_in_transformers(tmp_path, name):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    network = Decoder(replace(OWN[name], **TINY))
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    written(tmp_path, *hugging_face_files(network.config, network.state_dict()))
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    own = packed_logits(network)
    assert worst_difference(own, ragged_logits(model.eval())) < 1e-5
    again = loaded(tmp_path)
    assert all(torch.equal(*pair) for pair in zip(packed_logits(again), own, strict=True))
    bias = True if name == "gpt2-no-bias" else network.config.bias  # of zeros
    same = replace(network.config, dropout=0.0, bias=bias, num_kv_heads=again.config.num_kv_heads)
    assert again.config == replace(same, feed_forward=network.config.inner_size)


def test_what_is_written_has_the_names_of_transformers(tmp_path):
    for kind in ("GPT2", "Llama"):
        folder = tmp_path / kind
        saved(folder, kind)
        theirs = load_file(folder / "model.safetensors")
        content, ours = hugging_face_files(*read_hugging_face(folder))
        assert ours.keys() == theirs.keys()
        differing = {name for name in ours if not torch.equal(ours[name], theirs[name])}
        assert differing == {name for name in ours if name.endswith("c_attn.bias")}  # its keys
        their_content = json.loads((folder / "config.json").read_text())
        assert content["architectures"] == their_content["architectures"]


def test_shards_and_files_without_a_head_are_read(tmp_path):
    model = saved(tmp_path / "shards", "Llama", max_shard_size="4KB", tie_word_embeddings=True)
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    model.model.save_pretrained(tmp_path / "headless")
    for name in ("shards", "headless"):
        network = loaded(tmp_path / name)
        assert worst_difference(packed_logits(network), ragged_logits(model)) < 1e-5


def test_half_weights_are_read_as_float32_unless_asked(tmp_path):
    made("GPT2").bfloat16().save_pretrained(tmp_path)
    assert loaded(tmp_path).positions.weight.dtype == torch.float32
    kinds = {t.dtype for t in read_hugging_face(tmp_path, dtype=None)[1].values()}
    assert kinds == {torch.bfloat16}


def test_weights_do_not_follow_the_file(tmp_path):
    saved(tmp_path, "Llama")
    weights = read_hugging_face(tmp_path)[1]
    before = {name: tensor.clone() for name, tensor in weights.items()}
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:  # in place, as an export into the same folder might
        file.write(bytes(path.stat().st_size))
    assert all(torch.equal(weights[name], before[name]) for name in weights)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("GPT2", {"activation_function": "relu"}, "has activation_function relu"),
        ("GPT2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ("Llama", {"head_dim": 8}, "has head_dim 8, not 4"),
        ("Llama", {"attention_bias": True}, "has attention_bias True"),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, "has key biases"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}},
            "rope type linear, not default or llama3",
        ),
        ("Qwen2", {}, "model_type qwen2, not gpt2 or llama"),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused(tmp_path, kind, options, message):
    saved(tmp_path, kind, **options)
    is_seen_in_weights = message == "has key biases"
    assert (obstacle(read_config(tmp_path)) is None) == is_seen_in_weights
    with pytest.raises(ValueError, match=f"{message}.*backend: transformers"):
        read_hugging_face(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": "layer"}, "norm layer with positions rotary"),
        ({"positions": "learned"}, "norm rms with positions learned"),
        ({"activation": "gelu"}, "activation gelu"),
        (
            {"norm": "layer", "positions": "learned", "activation": "gelu", "num_kv_heads": 1},
            "1 key heads for 2",
        ),
    ],
)
def test_shapes_that_neither_layout_has_are_refused(options, message):
    network = Decoder(DecoderConfig(**TINY, **options))
    with pytest.raises(ValueError, match=f"neither layout of transformers has .*{message}"):
        hugging_face_files(network.config, network.state_dict())
