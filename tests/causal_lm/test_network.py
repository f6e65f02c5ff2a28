"""The decoder: neighbours, padding and the future change nothing; a self-test finds leaks."""

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lit_models.causal_lm import network as network_file
from lit_models.causal_lm.module import LitCausalLM
from lit_models.causal_lm.network import (
    PRESETS,
    Decoder,
    DecoderConfig,
    Documents,
    attend,
    check_isolation,
    documents_of,
)
from lit_models.causal_lm.pretrained import PretrainedDecoder
from lit_models.training.dropout import SampleKeys, key_dropout, release_dropout
from tests.causal_lm.folders import made, of_transformers

SMALL = DecoderConfig(
    vocab_size=31, max_positions=16, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2
)
GPT2 = {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True}
LEARNED = replace(SMALL, num_heads=2, num_kv_heads=None, **GPT2)
BOTH = pytest.mark.parametrize("config", [SMALL, LEARNED], ids=["llama", "gpt2"])
Batch = tuple[Tensor, Tensor, Tensor]


def network_of(config: DecoderConfig) -> Decoder:
    torch.manual_seed(0)
    network = Decoder(config).double()
    for parameter in network.parameters():  # no zeros, that would hide a bias or a leak
        torch.nn.init.normal_(parameter, std=0.3)
    return network


def packed(rows: list[list[int]], width: int = 0) -> Batch:
    """Rows of documents of the given lengths; the tokens are drawn."""
    width = max([width, *map(sum, rows)])
    tokens = torch.randint(31, (len(rows), width), generator=torch.Generator().manual_seed(1))
    positions, ids = torch.zeros_like(tokens), torch.full_like(tokens, -1)
    document = 0
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            positions[row, start : start + length] = torch.arange(length)
            ids[row, start : start + length] = document
            start, document = start + length, document + 1
    return tokens, positions, ids


def logits(network: Decoder, batch: Batch) -> Tensor:
    return network.head(network(*batch))


@BOTH
@torch.no_grad()
def test_a_document_in_a_row_has_the_logits_it_has_alone(config):
    network = network_of(config)
    tokens, positions, ids = packed([[3, 5, 1], [9], [2, 6]], width=11)
    together = logits(network, (tokens, positions, ids))
    for document in range(6):
        own = ids == document
        alone = (tokens[own][None], positions[own][None], torch.zeros_like(ids[own])[None])
        torch.testing.assert_close(together[own], logits(network, alone)[0], rtol=0, atol=1e-12)


@BOTH
@torch.no_grad()
def test_the_future_and_padding_change_nothing(config):
    network = network_of(config)
    tokens, positions, ids = packed([[6, 3], [7]], width=10)
    before = logits(network, (tokens, positions, ids))
    for place in (4, 9):
        changed = tokens.clone()
        changed[:, place:] = (changed[:, place:] + 5) % 31
        after = logits(network, (changed, positions, ids))
        assert torch.equal(before[:, :place], after[:, :place])
        assert not torch.equal(before[:, place], after[:, place])


@BOTH
@torch.no_grad()
def test_a_mask_and_single_rows_give_the_same(config):
    network = network_of(config)
    batch = packed([[3, 5], [8]])
    expected = logits(network, batch)
    network.compile_blocks(backend="eager")  # masks
    torch.testing.assert_close(logits(network, batch), expected, rtol=0, atol=1e-12)
    single = packed([[8], [5]])
    whole = network.head(network(*single, has_single_documents=True))
    real = single[2] >= 0
    expected = logits(network, single)[real]
    torch.testing.assert_close(whole[real], expected, rtol=0, atol=1e-12)


@BOTH
@pytest.mark.parametrize("has_keys", [False, True])
def test_recomputed_blocks_have_the_same_gradients(config, has_keys):
    batch, gradients, keys = packed([[9], [8]]), [], SampleKeys()
    for recomputes in (False, True):
        network = network_of(replace(config, dropout=0.3)).train()
        calls: list[int] = []
        network.layers[0].attention.register_forward_hook(lambda *given, to=calls: to.append(1))
        if recomputes:
            network.recompute_blocks()
        if has_keys:
            key_dropout(network, keys)
        keys.begin(5, torch.tensor([0, 1]))
        torch.manual_seed(7)
        loss = logits(network, batch).square().sum()
        keys.is_backward = True
        loss.backward()
        release_dropout(network)
        assert len(calls) == 1 + recomputes
        gradients.append([p.grad for p in network.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo
@pytest.mark.parametrize("recomputes", [False, True])
def test_compiled_in_place_names_and_results_stay(recomputes):
    plain, compiled = network_of(SMALL), network_of(SMALL)
    compiled.compile_blocks(backend="eager")
    if recomputes:
        compiled.recompute_blocks()
    for batch in (packed([[3, 5], [8]]), packed([[9], [4, 3]])):
        for network in (plain, compiled):
            logits(network, batch).square().sum().backward()
    for (name, one), (same, other) in zip(
        plain.named_parameters(), compiled.named_parameters(), strict=True
    ):
        assert name == same
        torch.testing.assert_close(one.grad, other.grad)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert compiled.blocks() == list(compiled.layers)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo
def test_what_is_compiled_fits_other_documents():
    graphs: list[int] = []
    network = network_of(SMALL)
    network.compile_blocks(backend=lambda graph, inputs: graphs.append(1) or graph)
    for rows in ([[3, 5], [8]], [[8], [1, 7]], [[2, 2, 4], [4, 4]]):
        logits(network, packed(rows))
        assert len(graphs) == 1  # of all layers


ROWS = [[0, 0, 0, 1, 1, 2, -1, -1], [3, 3, 3, 3, 3, 3, 3, 3], [4, 5, 5, 5, 5, 5, 5, -1]]


def heads_of(num_rows: int, kv_heads: int, length: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = [(num_rows, heads, length, 6) for heads in (4, kv_heads, kv_heads)]
    q, k, v = (torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)
    return q, k, v


def slowly(q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor) -> Tensor:
    """Every position of every head by itself; heads of k and v repeated."""
    out = torch.zeros_like(q)
    share = q.shape[1] // k.shape[1]
    rows, heads, length, size = q.shape
    for row, head, place in torch.cartesian_prod(*map(torch.arange, (rows, heads, length))):
        seen = [i for i in range(place + 1) if document_ids[row, i] == document_ids[row, place]]
        keys, values = k[row, head // share, seen], v[row, head // share, seen]
        weights = torch.softmax(keys @ q[row, head, place] / size**0.5, 0)
        out[row, head, place] = weights @ values
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("as_mask", [False, True])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], ROWS[1:2], [ROWS[0]] * 2])
def test_both_ways_equal_a_slow_reference(rows, as_mask, kv_heads):
    ids = torch.tensor(rows)
    q, k, v = heads_of(len(rows), kv_heads)
    documents = documents_of(ids, as_mask=as_mask)
    assert (documents.mask is not None) == as_mask
    expected = slowly(q, k, v, ids)
    torch.testing.assert_close(attend(q, k, v, documents), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("as_mask", [False, True])
def test_gradients_stay_in_their_document(as_mask):
    ids = torch.tensor(ROWS)
    inputs = [x.requires_grad_() for x in heads_of(3, 2)]
    attended = attend(*inputs, documents_of(ids, as_mask=as_mask))
    for document in range(6):
        is_own = (ids == document)[:, None, :, None]
        total = (attended * is_own).sin().sum()
        for gradient in torch.autograd.grad(total, inputs, retain_graph=True):
            assert gradient.isfinite().all()
            assert not (gradient * ~is_own).any()


@pytest.mark.parametrize(
    ("name", "vocab_size", "count"),
    [
        ("gpt2-124m", None, 124_439_808 - 12 * 768),  # GPT-2's own without its key biases
        ("shakespeare-cpu", 66, 800_128),
        ("shakespeare-gpu", 66, 10_647_168),
        ("llama-tiny", 256, 108_864),
    ],
)
def test_presets_have_their_sizes(name, vocab_size, count):
    config = PRESETS[name]
    with torch.device("meta"):
        network = Decoder(replace(config, vocab_size=vocab_size or config.vocab_size))
    assert sum(p.numel() for p in network.parameters()) == count
    assert set(PRESETS) == {"gpt2-124m", "llama-tiny", "shakespeare-cpu", "shakespeare-gpu"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "hidden_size 16 must be a multiple of num_heads 3"),
        ({"num_kv_heads": 3}, "num_kv_heads 3 must divide num_heads 4"),
        ({"num_heads": 16, "num_kv_heads": 4}, "must be even, got 16 / 16 = 1"),
        ({"num_layers": 0}, "num_layers must be positive, got 0"),
        ({"norm_eps": -1e-5}, "norm_eps must be positive"),
        ({"dropout": 1.0}, "dropout must be 0 to below 1, got 1.0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match='"gpt5" is no preset; choose one of gpt2-124m'):
        LitCausalLM(torch.optim.SGD, network="gpt5")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@BOTH
def test_own_decoders_pass(config, dtype):
    check_isolation(Decoder(config).to(dtype))


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen2", "Qwen3", "Mistral", "Gemma"])
def test_models_of_transformers_pass(kind):
    check_isolation(of_transformers(kind))


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
    network = Decoder(SMALL).to(dtype)
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
        check_isolation(Decoder(SMALL))


def test_it_leaves_no_trace_and_takes_no_time():
    torch.manual_seed(1)
    network = Decoder(SMALL)
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
