"""Models of transformers as networks: packed rows, recipes without folders, what is refused."""

import json

import pytest
import torch

from datamodules.tokenizers.trained import character_tokenizer
from datamodules.tokenizers.wanted import TEXT_RECIPE_KEY
from lit_models.causal_lm.exported_model import model_layout
from lit_models.causal_lm.model_folders import CONFIG
from lit_models.causal_lm.network import Decoder
from lit_models.causal_lm.pretrained import (
    PretrainedDecoder,
    load_network,
    recipe_of,
)
from tests.causal_lm.folders import (
    made,
    packed_logits,
    ragged_logits,
    saved,
    worst_difference,
    written,
)

KINDS = ("GPT2", "Llama", "Qwen2", "Qwen3")


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_have_the_logits_that_transformers_gives_each(tmp_path, kind):
    model = saved(tmp_path, kind, **({"head_dim": 4} if kind == "Qwen3" else {}))
    network = load_network(tmp_path, "transformers")
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


def test_auto_takes_the_own_decoder_where_it_can(tmp_path):
    for kind, network_class in (
        ("GPT2", Decoder),
        ("Llama", Decoder),
        ("Qwen2", PretrainedDecoder),
    ):
        model = saved(tmp_path / kind, kind)
        network = load_network(tmp_path / kind)
        assert type(network) is network_class
        assert network.training
        assert worst_difference(packed_logits(network), ragged_logits(model)) < 1e-5
    saved(tmp_path / "wide", "Llama", head_dim=8)
    assert type(load_network(tmp_path / "wide")) is PretrainedDecoder
    with pytest.raises(ValueError, match="has head_dim 8"):
        load_network(tmp_path / "wide", "own")


@pytest.mark.parametrize("kind", ["GPT2", "Qwen2"])
@pytest.mark.parametrize("backend", ["auto", "transformers"])
def test_an_exported_network_is_one_of_transformers(tmp_path, kind, backend):
    from transformers import AutoModelForCausalLM

    saved(tmp_path / "base", kind)
    network = load_network(tmp_path / "base", backend)
    with torch.no_grad():
        network.embedding.weight[3] += 1
    tokenizer = character_tokenizer(iter(["some text"]))
    recipe = {"tokenizer": tokenizer.to_dict(), "network": recipe_of(network), "lora": None}
    state = {f"network.{name}": tensor.detach() for name, tensor in network.state_dict().items()}
    layout = model_layout({TEXT_RECIPE_KEY: recipe}, state)
    written(tmp_path / "new", json.loads(layout.texts[CONFIG]), layout.weights)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new").eval()
    assert worst_difference(packed_logits(network), ragged_logits(model)) < 1e-5
    again = load_network(tmp_path / "new", backend)
    assert all(
        torch.equal(*pair)
        for pair in zip(packed_logits(network), packed_logits(again), strict=True)
    )
    if kind == "GPT2" and backend == "transformers":
        assert {m.p for m in network.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
        assert model.config.resid_pdrop == 0.1  # as the base has it


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo
def test_recomputed_and_compiled_blocks_change_nothing(tmp_path):
    saved(tmp_path, "Qwen2")
    batch = (torch.arange(8)[None], torch.arange(8)[None], torch.zeros(1, 8, dtype=torch.long))
    gradients = []
    for change in ("none", "recompute_blocks", "compile_blocks"):
        network = load_network(tmp_path)
        names = list(network.state_dict())
        if change == "compile_blocks":
            network.compile_blocks(backend="eager")
        elif change != "none":
            network.recompute_blocks()
            assert all(block.gradient_checkpointing for block in network.blocks())
        network(*batch).sin().sum().backward()
        gradients.append([p.grad for p in network.model.model.parameters()])
        assert list(network.state_dict()) == names
    for plain, *others in zip(*gradients, strict=True):
        assert all(torch.allclose(plain, other, rtol=1e-4, atol=1e-6) for other in others)


def test_a_model_comes_in_training_mode():
    network = PretrainedDecoder(made("Qwen2").eval(), {})
    assert all(module.training for module in network.modules())


def test_the_token_of_padding_learns_too(tmp_path):
    saved(tmp_path, "Qwen2", pad_token_id=2)
    network = load_network(tmp_path)
    places = torch.arange(3)[None]
    network(torch.tensor([[1, 2, 3]]), places, torch.zeros_like(places)).sin().sum().backward()
    assert network.embedding.weight.grad[2].any()


def test_a_dtype_is_asked_for(tmp_path):
    saved(tmp_path, "Qwen2", dtype="bfloat16").bfloat16().save_pretrained(tmp_path)
    for dtype, found in ((torch.float32, torch.float32), (None, torch.bfloat16)):
        assert {p.dtype for p in load_network(tmp_path, dtype=dtype).parameters()} == {found}


def changed(folder, **values):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **values}))


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("Qwen2", {"model_type": "nonesuch"}, 'model_type "nonesuch", of which transformers'),
        ("Qwen2", {"model_type": "t5"}, 'model_type "t5", of which transformers'),
        ("Qwen2", {"quantization_config": {"bits": 4}}, "holds quantised weights"),
        ("Qwen2", {"num_hidden_layers": 3}, "refuses config.json of .*num_hidden_layers"),
        (
            "Qwen2",
            {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},
            r"lacks model.layers.2.*\(12 faults in all\)",
        ),
        ("Qwen2", {"intermediate_size": 25}, "has another shape of .*mlp"),
        ("Granite", {"logits_scaling": 2.0}, "is a GraniteForCausalLM, whose logits are not the"),
        ("Gemma2", {}, "is a Gemma2ForCausalLM, whose logits are not the"),  # capped
        ("Phi", {}, "is a PhiForCausalLM, whose logits are not the"),  # with a bias
    ],
)
def test_models_that_cannot_be_trained_are_refused(tmp_path, kind, values, message):
    saved(tmp_path, kind, pad_token_id=0)
    changed(tmp_path, **values)
    with pytest.raises(ValueError, match=message) as caught:
        load_network(tmp_path)
    assert len(str(caught.value)) < 700


def test_damaged_weights_are_refused(tmp_path):
    saved(tmp_path, "Qwen2")
    path = tmp_path / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="are damaged"):
        load_network(tmp_path)
    path.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="a pickle"):
        load_network(tmp_path)


def test_weights_may_be_sharded(tmp_path):
    model = saved(tmp_path, "Qwen2", max_shard_size="4KB")
    network = load_network(tmp_path)
    assert worst_difference(packed_logits(network), ragged_logits(model)) < 1e-5


def test_a_hub_name_says_what_to_do():
    with pytest.raises(FileNotFoundError, match="hf download Qwen/Qwen3-0.6B --local-dir models/Q"):
        load_network("Qwen/Qwen3-0.6B")
