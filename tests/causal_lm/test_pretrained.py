"""Models of transformers as networks: packed rows, recipes without folders, and refused models."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from lit_models.causal_lm.adapters import target_layers
from lit_models.causal_lm.network import DecoderConfig, Documents, compile_blocks
from lit_models.causal_lm.pretrained import (
    PretrainedDecoder,
    check_recipe,
    load_network,
    model_of,
    network_from_config,
    parameters_on_meta,
    read_recipe,
)
from lit_models.training.sharding import check_tensor_plan, planned_layers
from tests.causal_lm import folders
from tests.causal_lm.folders import made, packed_logits, ragged_logits, saved, worst_difference

BART = {f"{part}_{n}": 2 for part in ("encoder", "decoder") for n in ("layers", "attention_heads")}
BART |= {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": folders.VOCAB}
SEES = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1}
IMAGES = {"vision_config": {**SEES, "image_size": 28}, "mm_tokens_per_image": 4}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("GPT2", {}),
        ("GPT2", {"tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True}),
        ("Llama", {}),
        ("Llama", {"rope_parameters": folders.LLAMA3_ROPE, "tie_word_embeddings": True}),
        ("Llama", {"head_dim": 8, "attention_bias": True}),
        ("Mistral", {"sliding_window": 3}),
        ("Qwen2", {"max_shard_size": "4KB"}),
        ("Qwen3", {"head_dim": 4}),
    ],
)
def test_packed_documents_have_the_logits_that_transformers_gives_each(tmp_path, kind, options):
    model = saved(tmp_path, kind, **options)
    network = load_network(tmp_path)
    assert isinstance(network, PretrainedDecoder)
    assert all(module.training for module in network.modules())
    assert worst_difference(packed_logits(network), ragged_logits(model)) < 1e-5
    assert len(network.blocks()) == 2
    tokens = torch.arange(8).view(2, 4)
    ids = torch.tensor([[0, 0, 0, 0], [1, 1, 1, -1]])
    places = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 0]])
    with torch.no_grad():
        masked = network(tokens, places, ids)
        single = network(tokens, places, ids, has_single_documents=True)
    torch.testing.assert_close(masked[ids >= 0], single[ids >= 0], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo
def test_recomputed_and_compiled_blocks_change_nothing(tmp_path):
    saved(tmp_path, "Qwen2")
    batch = (torch.arange(8)[None], torch.arange(8)[None], torch.zeros(1, 8, dtype=torch.long))
    gradients = []
    for change in ("none", False, True, "compile_blocks"):
        network = load_network(tmp_path)
        names = list(network.state_dict())
        if change == "compile_blocks":
            compile_blocks(network, "eager")
        elif change != "none":
            network.recompute_blocks(keeps_products=change)
            assert all(block.gradient_checkpointing for block in network.blocks())
        network(*batch).sin().sum().backward()
        gradients.append([p.grad for p in network.model.model.parameters()])
        assert list(network.state_dict()) == names
    for plain, *others in zip(*gradients, strict=True):
        assert all(torch.allclose(plain, other, rtol=1e-4, atol=1e-6) for other in others)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Mixtral", {**folders.LLAMA, "num_local_experts": 2, "router_jitter_noise": 0.3}),
        ("Bart", {**BART, "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}),
        ("Gemma3", {"text_config": {**folders.LLAMA, "attention_dropout": 0.5}, **IMAGES}),
    ],
)
def test_no_training_step_of_a_folder_draws_random_numbers(kind, options):
    import transformers

    content = getattr(transformers, f"{kind}Config")(**options).to_dict()
    model, tokens = model_of(content, auto_class="AutoModel").train(), torch.arange(20)[None]
    types = {"token_type_ids": torch.zeros_like(tokens)} if kind == "Gemma3" else {}
    before = torch.get_rng_state()
    model(input_ids=tokens, **types)
    assert torch.equal(before, torch.get_rng_state())


def test_parts_that_see_images_stand_still(tmp_path):
    import transformers

    config = transformers.Gemma3Config(text_config=folders.LLAMA, **IMAGES)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    network, tokens = load_network(tmp_path), torch.arange(5)[None]
    network.head(network(tokens, tokens, torch.zeros_like(tokens))).sum().backward()
    learns = {name for name, p in network.named_parameters() if p.requires_grad}
    assert learns == {name for name, p in network.named_parameters() if p.grad is not None}
    assert all(p.requires_grad for block in network.blocks() for p in block.parameters())
    adapted = target_layers(network, ["q_proj"])
    assert {name.split(".")[2] for name in (*learns, *adapted)} == {"language_model"}
    before = torch.get_rng_state()
    with parameters_on_meta():  # as under fsdp, which draws adapters afterwards
        network_from_config(network.recipe)
    assert torch.equal(before, torch.get_rng_state())


def test_the_token_of_padding_learns_too(tmp_path):
    saved(tmp_path, "Qwen2", pad_token_id=2)
    network = load_network(tmp_path)
    places = torch.arange(3)[None]
    network(torch.tensor([[1, 2, 3]]), places, torch.zeros_like(places)).sin().sum().backward()
    assert network.embedding.weight.grad[2].any()


def changed(folder, **values):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **values}))


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("Qwen2", {"model_type": "nonesuch"}, 'model_type "nonesuch", of which transformers'),
        ("Qwen2", {"quantization_config": {"bits": 4}}, "holds quantised weights"),
        ("Qwen2", {"num_hidden_layers": 3}, "refuses config.json of .*num_hidden_layers"),
        ("GPT2", {"n_head": 3}, "refuses config.json of .*must be divisible by num_heads"),
        ("Qwen2", {"intermediate_size": 25}, "has another shape of .*mlp"),
        ("Granite", {"logits_scaling": 2.0}, "is a GraniteForCausalLM, whose logits are not the"),
        ("Gemma2", {}, "is a Gemma2ForCausalLM, whose logits are not the"),  # capped logits
        ("Phi", {}, "is a PhiForCausalLM, whose logits are not the"),  # with a bias
    ],
)
def test_models_that_cannot_be_trained_are_refused(tmp_path, kind, values, message):
    saved(tmp_path, kind, pad_token_id=0)
    changed(tmp_path, **values)
    with pytest.raises(ValueError, match=message) as caught:
        load_network(tmp_path)
    assert len(str(caught.value)) < 700


def test_heads_that_do_not_fit_each_other_are_refused(tmp_path):
    saved(tmp_path, "Llama", num_key_value_heads=3)
    with pytest.raises(
        ValueError, match="refuses config.json of .*must match the size of tensor b"
    ):
        load_network(tmp_path)


def damage(folder, fault):
    weights = load_file(folder / "model.safetensors")
    texts = {"no json": "{", "foreign": '{"class_path": "x"}'}
    if fault in texts:
        (folder / "config.json").write_text(texts[fault])
    elif fault == "no config":
        (folder / "config.json").unlink()
    elif fault == "pickle":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif fault == "torn":
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    elif fault == "no shard":
        (folder / "model.safetensors").unlink()
        saved(folder, "GPT2", max_shard_size="2KB")
        (folder / "model-00002-of-00006.safetensors").unlink()
    elif fault == "other size":
        changed(folder, n_positions=13)
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
        ("foreign", ValueError, "config.json is damaged or not of .*no model_type"),
        ("pickle", FileNotFoundError, "but pytorch_model.bin, a pickle, which can run any code"),
        ("torn", ValueError, "the weights of .* are damaged"),
        ("no shard", FileNotFoundError, "model-00002-of-00006.safetensors"),
        ("other size", ValueError, "has another shape of .*wpe"),
        ("lacking", ValueError, "lacks transformer.wte.weight"),
        ("unknown", ValueError, "has the unknown new"),
        ("untied head", ValueError, "says tie_word_embeddings, but its lm_head.weight differs"),
    ],
)
def test_damaged_and_foreign_folders_are_refused(tmp_path, fault, error, message):
    saved(tmp_path, "GPT2")
    damage(tmp_path, fault)
    with pytest.raises(error, match=message) as caught:
        load_network(tmp_path)
    assert len(str(caught.value)) < 700


def test_a_hub_name_is_told_from_a_folder():
    with pytest.raises(FileNotFoundError, match="hf download org/tiny --local-dir models/tiny"):
        load_network("org/tiny")


@pytest.mark.parametrize("tied", [True, False])
def test_a_recipe_rebuilds_the_network_where_the_folder_has_gone(tmp_path, tied):
    saved(tmp_path / "base", "Llama", tie_word_embeddings=tied)
    recipe = json.loads(json.dumps(read_recipe(tmp_path / "base")))
    assert recipe["kind"] == "transformers"
    network = load_network(tmp_path / "base")
    assert (network.head.weight is network.embedding.weight) == tied
    shutil.rmtree(tmp_path / "base")
    again = network_from_config(recipe)
    again.load_state_dict(network.state_dict())
    assert worst_difference(packed_logits(network), packed_logits(again)) == 0
    names = [name for name, _ in network.named_parameters()]
    assert names == [name for name, _ in again.named_parameters()]


def test_data_that_does_not_fit_is_refused(tmp_path):
    check_recipe(DecoderConfig().recipe, 10_000, 300)  # rotary, and it takes the tokenizer's
    saved(tmp_path, "GPT2")
    learned = DecoderConfig(vocab_size=29, max_positions=12, positions="learned", norm="layer")
    for recipe in (read_recipe(tmp_path), learned.recipe):
        check_recipe(recipe, 12, 29)
        with pytest.raises(ValueError, match="context_length 13 is longer than the network's 12 l"):
            check_recipe(recipe, 13, 29)
        with pytest.raises(ValueError, match="the tokenizer has 30 tokens and the network embeds"):
            check_recipe(recipe, 12, 30)
    saved(tmp_path, "Qwen2")
    check_recipe(read_recipe(tmp_path), 10_000, 29)


def part_of(network, rank, size):
    """Return the part of one device in a group, cut by hand."""
    part = copy.deepcopy(network)
    for _, layer, split in planned_layers(part, part.tensor_plan()):
        axis = {"columns": 0, "rows": 1}[split.style]
        layer.weight = nn.Parameter(layer.weight.chunk(size, axis)[rank])
        if layer.bias is not None and split.style == "columns":
            layer.bias = nn.Parameter(layer.bias.chunk(size)[rank])
    return part


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_a_tensor_group_shares_every_matrix_of_a_block(kind):
    options = {"head_dim": 4} if kind == "Qwen3" else {}
    network = PretrainedDecoder(made(kind, **options), {}).double()
    plan = network.tensor_plan()
    check_tensor_plan(network, plan, 2)
    split = {id(layer) for _, layer, _ in planned_layers(network, plan)}
    blocks = nn.ModuleList(network.blocks())
    assert split == {id(m) for m in blocks.modules() if isinstance(m, nn.Linear)}
    hidden = torch.randn(1, 5, 16, dtype=torch.float64)
    rotation = network.model.model.rotary_emb(hidden, torch.arange(5)[None])

    def computed(part):
        block, documents = part.blocks()[0], Documents()
        given = {"position_embeddings": rotation, "attention_mask": None, "documents": documents}
        return torch.cat([block.self_attn(hidden, **given)[0], block.mlp(hidden)])

    added = sum(computed(part_of(network, rank, 2)) for rank in range(2))
    torch.testing.assert_close(added, computed(network), rtol=1e-12, atol=1e-12)
    assert PretrainedDecoder(made("GPT2"), {}).tensor_plan() == {}
