"""The self-test finds networks whose documents see each other, and leaves no trace."""

import time

import pytest
import torch

from lit_models.causal_lm import network as network_file
from lit_models.causal_lm.network import (
    Decoder,
    DecoderConfig,
    Documents,
    check_isolation,
    documents_of,
)
from lit_models.causal_lm.pretrained import PretrainedDecoder
from tests.causal_lm.folders import made

TINY = DecoderConfig(vocab_size=31, max_positions=8, hidden_size=16, num_layers=2, num_heads=2)
GPT2 = DecoderConfig(
    **{"vocab_size": 31, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "norm": "layer"},
    **{"positions": "learned", "activation": "gelu", "bias": True},
)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", [TINY, GPT2], ids=["llama", "gpt2"])
def test_own_decoders_pass(config, dtype):
    check_isolation(Decoder(config).to(dtype))


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen2", "Qwen3", "Mistral", "Gemma"])
def test_models_of_transformers_pass(kind):
    check_isolation(PretrainedDecoder(made(kind), {}))


class Cached(PretrainedDecoder):
    """With a cache transformers does not look at positions."""

    def forward(self, input_ids, position_ids, document_ids):
        model = self.model.base_model
        return model(input_ids, position_ids=position_ids, use_cache=True).last_hidden_state


class Masked(PretrainedDecoder):
    """With a mask of what is padding it does not either."""

    def forward(self, input_ids, position_ids, document_ids):
        mask = document_ids >= 0
        return self.model.base_model(
            input_ids, position_ids=position_ids, attention_mask=mask, use_cache=False
        ).last_hidden_state


@pytest.mark.parametrize("leaking", [Cached, Masked])
@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen2", "Qwen3"])
def test_models_of_transformers_that_leak_are_refused(kind, leaking):
    model = made(kind)
    with pytest.raises(RuntimeError, match=f"{type(model).__name__} lets a token see"):
        check_isolation(leaking(model, {}))


def bare(kind, **sizes):
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 29, **sizes}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


def test_models_without_causal_attention_are_refused():
    network = PretrainedDecoder(bare("Bert", num_attention_heads=2, intermediate_size=16), {})
    with pytest.raises(RuntimeError, match="lets a token see what it must not"):
        check_isolation(network)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("Mamba", {}, "takes no position_ids"),
        ("Bloom", {}, "takes no position_ids"),
        ("Llama4Text", {"num_attention_heads": 2, "pad_token_id": 0}, "does not say which part"),
    ],
)
def test_models_that_cannot_tell_documents_apart_are_refused(kind, sizes, message):
    model = bare(kind, **sizes)
    with pytest.raises(ValueError, match=f"{type(model).__name__} {message}"):
        PretrainedDecoder(model, {})


def everything(document_ids, *options):
    return Documents()


def whole_documents(document_ids, *options):
    return Documents(mask=document_ids[:, None, :, None] == document_ids[:, None, None, :])


def small_leak(document_ids, *options):
    mask = documents_of(document_ids, as_mask=True).mask.clone()
    mask[0, 0, -2, 0] = True  # only the last token sees only the first
    return Documents(mask=mask)


@pytest.mark.parametrize("fault", [everything, whole_documents, small_leak])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_own_decoder_that_leaks_is_refused(monkeypatch, fault, dtype):
    network = Decoder(TINY).to(dtype)
    monkeypatch.setattr(network_file, "documents_of", fault)
    with pytest.raises(RuntimeError, match="Decoder lets a token see"):
        check_isolation(network)


@pytest.mark.parametrize(
    ("fault", "message"),
    [(everything, "depends on another document"), (whole_documents, "depends on one that follows")],
)
def test_gradients_alone_find_it(monkeypatch, fault, message):
    """Where rounding is coarse the hidden states need not differ by enough."""
    monkeypatch.setattr(network_file, "documents_of", fault)
    monkeypatch.setattr(network_file, "TOLERANCES", {torch.float32: float("inf")})
    with pytest.raises(RuntimeError, match=message):
        check_isolation(Decoder(TINY))


def test_it_leaves_no_trace_and_takes_no_time():
    torch.manual_seed(1)
    network = Decoder(TINY)
    network.layers[0].eval()
    network.embedding.weight.requires_grad_(False)
    modes = [module.training for module in network.modules()]
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    check_isolation(network)
    start = time.process_time()
    with torch.no_grad():
        check_isolation(network)
    assert time.process_time() - start < 0.2
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in network.modules()]
    assert all(p.grad is None for p in network.parameters())
    assert not network.embedding._forward_hooks
    assert all(torch.equal(weights[name], value) for name, value in network.state_dict().items())
