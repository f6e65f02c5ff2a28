"""Export of a language model to a folder that transformers reads alone, and back."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from datamodules.tokenizers.text import TEXT_RECIPE_KEY, byte_tokenizer
from lit_models.causal_lm.adapters import LoraOptions, add_lora, lora_recipe
from lit_models.causal_lm.export import layout_of
from lit_models.causal_lm.module import LitCausalLM
from lit_models.causal_lm.network import DecoderConfig
from lit_models.causal_lm.pretrained import load_network, network_from_config
from lit_models.commands.export import export
from tests.causal_lm.folders import (
    packed_logits,
    ragged_logits,
    saved_with_bytes,
    worst_difference,
)
from tests.causal_lm.test_finetune import trained
from tests.causal_lm.tiny import SGD, run
from tests.toy import LitToy, ToyData, toy_trainer

SIZES = {"vocab_size": 260, "hidden_size": 8, "num_layers": 2, "num_heads": 2}
OWN_GPT2 = {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True}
GPT2 = {"model_type": "gpt2", "vocab_size": 260, "n_positions": 64, "n_embd": 8, "n_layer": 2}
LLAMA = {"model_type": "llama", "vocab_size": 260, "hidden_size": 8, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 2, "intermediate_size": 16, "num_key_value_heads": 1}
NETWORKS = {
    "own gpt2": DecoderConfig(**SIZES, **OWN_GPT2, dropout=0.1).recipe,
    "own gpt2 without bias": DecoderConfig(**SIZES, **{**OWN_GPT2, "bias": False}).recipe,
    "own llama": DecoderConfig(**SIZES, num_kv_heads=1, tied=False, rope_theta=50.0).recipe,
    "own llama with bias": DecoderConfig(**SIZES, bias=True).recipe,
    "gpt2": {"kind": "transformers", "config": {**GPT2, "n_head": 2, "eos_token_id": [7, 256]}},
    "llama": {"kind": "transformers", "config": {**LLAMA, "tie_word_embeddings": False}},
}
TARGETS = {"own gpt2": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}
PROMPT = "Ask, and it shall be given you"


def checkpoint(path: Path, kind: str, has_lora: bool = True, **options: Any) -> nn.Module:
    """Write a checkpoint as a run does; return its network."""
    torch.manual_seed(1)
    network = network_from_config(NETWORKS[kind])
    for parameter in network.parameters():  # biases and norms as well
        nn.init.normal_(parameter, std=0.3)
    tokenizer = byte_tokenizer()
    if kind == "llama":  # another token ends a turn
        tokenizer.backend.add_special_tokens(["<turn>"])
        tokenizer = replace(tokenizer, chat_template="{{ messages[1].content }}<turn>")
    recipe: dict[str, Any] = {"tokenizer": tokenizer.to_dict(), "network": NETWORKS[kind]}
    recipe["lora"] = None
    if has_lora:
        lora = LoraOptions(TARGETS.get(kind, ["*"]), rank=2, alpha=6.0, **options)
        recipe["lora"] = lora_recipe(network, lora, "bases/tiny")
        add_lora(network, recipe["lora"])
        trained(network)
    content = {
        "state_dict": {f"network.{name}": t for name, t in network.state_dict().items()},
        "hyper_parameters": {
            "_class_path": "lit_models.LitCausalLM",
            "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
            "pretrained": "bases/tiny",
            "lora": {"targets": ["*"]},
        },
        "global_step": 7,
        "epoch": 1,
        TEXT_RECIPE_KEY: recipe,
    }
    torch.save(content, path)
    return network.eval()


def logits(network: nn.Module, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        return network.head(network(ids, positions, torch.zeros_like(ids)))


@pytest.mark.parametrize("has_lora", [True, False])
@pytest.mark.parametrize("kind", list(NETWORKS))
def test_transformers_and_this_project_read_the_folder(kind, has_lora, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = checkpoint(tmp_path / "a.ckpt", kind, has_lora)
    export(tmp_path / "a.ckpt", to=tmp_path / "model")
    (tmp_path / "a.ckpt").unlink()

    ids = AutoTokenizer.from_pretrained(tmp_path / "model")(PROMPT, return_tensors="pt").input_ids
    assert ids[0].tolist() == byte_tokenizer().encode(PROMPT).tolist()
    theirs, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert not any(report.values())
    with torch.no_grad():
        found = theirs.eval()(ids).logits
    expected = logits(network, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.1
    ends = {"gpt2": [7, 256], "llama": [256, 257]}  # two where a turn has its own
    assert theirs.config.eos_token_id == ends.get(kind, 256)

    ours = LitCausalLM.from_exported(tmp_path / "model")
    torch.testing.assert_close(logits(ours.network, ids), expected, rtol=1e-4, atol=1e-5)
    assert not [name for name in ours.state_dict() if "lora" in name]
    if has_lora:
        return
    weights = ours.network.state_dict()
    assert all(torch.equal(weights[name], t) for name, t in network.state_dict().items())
    read = load_network(tmp_path / "model")
    assert not any(m.p for m in read.modules() if isinstance(m, nn.Dropout))
    if kind in ("gpt2", "own gpt2"):
        assert theirs.config.resid_pdrop == 0.1
    for other in (ragged_logits(theirs), packed_logits(read)):
        assert worst_difference(packed_logits(network), other) < 1e-5


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_an_adapter_alone_is_what_its_base_lacks_and_peft_reads_it(kind, tmp_path):
    network = checkpoint(tmp_path / "a.ckpt", kind)
    export(tmp_path / "a.ckpt", to=tmp_path / "lora", adapter=True)
    base = network_from_config(NETWORKS[kind])
    base.load_state_dict(network.state_dict(), strict=False)
    plain, ids = deepcopy(base.model), torch.arange(12)[None]
    config = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert config["fan_in_fan_out"] == (kind == "gpt2")
    stored = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    for name in config["target_modules"]:  # as PEFT merges adapters
        low, high = (stored.pop(f"base_model.model.{name}.lora_{x}.weight") for x in "AB")
        change = scale * (high @ low)
        base.model.get_submodule(name).weight.data += change.T if kind == "gpt2" else change
    assert not stored
    torch.testing.assert_close(logits(base.eval(), ids), logits(network, ids))
    with pytest.raises(ValueError, match="holds an adapter alone, without the weights of its base"):
        LitCausalLM.from_exported(tmp_path / "lora")
    peft = pytest.importorskip("peft", reason="extra: peft")
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "lora")
    with torch.no_grad():
        found = theirs.eval()(ids).logits
    torch.testing.assert_close(found, logits(network, ids), rtol=1e-5, atol=1e-6)


def test_the_command_says_who_reads_what_it_wrote(tmp_path, done):
    checkpoint(tmp_path / "a.ckpt", "llama")
    output = done("export", str(tmp_path / "a.ckpt"), f"--to={tmp_path / 'model'}")
    assert f'transformers: AutoModelForCausalLM.from_pretrained("{tmp_path}/model")' in output
    assert f'LitCausalLM.from_exported("{tmp_path}/model")' in output
    assert "needs" not in output
    options = [f"--to={tmp_path / 'lora'}", "--adapter=true"]
    output = done("export", str(tmp_path / "a.ckpt"), *options)
    assert f'PEFT: PeftModel.from_pretrained(model, "{tmp_path}/lora")' in output
    assert "from_exported" not in output


def test_a_base_in_bfloat16_is_exported_in_full(tmp_path):
    from transformers import AutoModelForCausalLM

    checkpoint(tmp_path / "a.ckpt", "llama", base_dtype="bfloat16")
    export(tmp_path / "a.ckpt", to=tmp_path / "model")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {p.dtype for p in theirs.parameters()} == {torch.float32}


def test_a_folder_hands_on_options_of_generation_and_the_length_of_its_tokenizer(tmp_path):
    from transformers import AutoTokenizer

    base, model = saved_with_bytes(tmp_path / "base", "Llama"), tmp_path / "model"
    for name, values in (
        ("generation_config", {"eos_token_id": [7, 256], "top_k": 5}),
        ("tokenizer_config", {"model_max_length": 48}),
    ):
        values = {**json.loads((base / f"{name}.json").read_text()), **values}
        (base / f"{name}.json").write_text(json.dumps(values))
    tuned = LitCausalLM(SGD, pretrained=str(base))
    export(run(tmp_path / "run", tuned), to=model, class_path="lit_models.LitCausalLM")
    found = json.loads((model / "generation_config.json").read_text())
    assert (found["eos_token_id"], found["top_k"]) == ([7, 256], 5)
    assert AutoTokenizer.from_pretrained(model).model_max_length == 48


def test_an_adapter_that_is_not_there_or_of_a_network_from_scratch_is_refused(tmp_path):
    checkpoint(tmp_path / "a.ckpt", "own llama")
    with pytest.raises(ValueError, match="this network is one from scratch; leave --adapter out"):
        export(tmp_path / "a.ckpt", to=tmp_path / "lora", adapter=True)
    checkpoint(tmp_path / "a.ckpt", "own gpt2", has_lora=False)
    with pytest.raises(ValueError, match="was trained without LoRA and has no adapter"):
        export(tmp_path / "a.ckpt", to=tmp_path / "lora", adapter=True)
    toy_trainer(tmp_path, max_steps=1, limit_val_batches=0).fit(LitToy(), ToyData())
    toy = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(ValueError, match="a LitToy has no adapters; leave --adapter out"):
        export(toy, to=tmp_path / "lora", class_path="tests.toy.LitToy", adapter=True)
    assert not (tmp_path / "lora").exists()


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
    with pytest.raises(ValueError, match=f"neither layout of transformers has .*{message}"):
        layout_of(DecoderConfig(**SIZES, **options))
