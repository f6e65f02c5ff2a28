"""The decoder: neighbours, padding and future tokens change nothing; a self-test finds leaks."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from datamodules.core.batches import document_bounds
from lit_models.causal_lm import network as decoder
from lit_models.causal_lm.network import Decoder, DecoderConfig, check_isolation, documents_of
from lit_models.causal_lm.pretrained import PretrainedDecoder
from lit_models.training.dropout import SampleKeys, key_dropout, release_dropout
from tests.causal_lm.folders import made, of_transformers
from tests.causal_lm.tiny import Made

SMALL = DecoderConfig(
    vocab_size=31, max_positions=16, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2
)
GPT2 = {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True}
LEARNED = replace(SMALL, num_heads=2, num_kv_heads=None, **GPT2)
BOTH = pytest.mark.parametrize("config", [SMALL, LEARNED], ids=["llama", "gpt2"])
HALF_AND_FULL = (torch.bfloat16, torch.float32)
AS_MASK = pytest.mark.parametrize("as_mask", [False, True])
Batch = tuple[Tensor, Tensor, Tensor]


def network_of(config: DecoderConfig) -> Decoder:
    torch.manual_seed(0)
    network = Decoder(config).double()
    for parameter in network.parameters():  # zeros would hide a bias or a leak
        torch.nn.init.normal_(parameter, std=0.3)
    return network


def packed(rows: list[list[int]], width: int = 0) -> Batch:
    """Return rows of documents of the given lengths, with random tokens."""
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
@AS_MASK
@torch.no_grad()
def test_a_document_in_a_row_has_the_logits_it_has_alone(config, as_mask):
    network = network_of(config)
    network.is_compiled = as_mask
    tokens, positions, ids = packed([[3, 5, 1], [9], [2, 6]], width=11)
    together = logits(network, (tokens, positions, ids))
    for document in range(6):
        own = ids == document
        alone = (tokens[own][None], positions[own][None], torch.zeros_like(ids[own])[None])
        torch.testing.assert_close(together[own], logits(network, alone)[0], rtol=0, atol=1e-12)
    batch = packed([[8], [5]])  # rows of single documents have no ids
    single = network.head(network(*batch, has_single_documents=True))[batch[2] >= 0]
    expected = logits(network, batch)[batch[2] >= 0]
    torch.testing.assert_close(single, expected, rtol=0, atol=1e-12)


@BOTH
@pytest.mark.parametrize("has_keys", [False, True])
def test_recomputed_blocks_have_the_same_gradients(config, has_keys):
    batch, gradients, keys, products = packed([[9], [8]]), [], SampleKeys(), []
    for keeps_products in (None, True, False):
        network = network_of(replace(config, dropout=0.3)).train()
        calls: list[int] = []
        network.layers[0].attention.register_forward_hook(lambda *inputs, to=calls: to.append(1))
        if keeps_products is not None:
            network.recompute_blocks(keeps_products)
        if has_keys:
            key_dropout(network, keys)
        keys.begin(5, torch.tensor([0, 1]))
        torch.manual_seed(7)
        with FlopCounterMode(display=False) as counter:
            loss = logits(network, batch).square().sum()
            keys.is_backward = True
            loss.backward()
        release_dropout(network)
        assert len(calls) == 1 + (keeps_products is not None)
        products.append(counter.get_total_flops())
        gradients.append([p.grad for p in network.parameters()])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*gradients, strict=True))
    assert products[0] == products[1] < products[2]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo
@pytest.mark.parametrize("keeps_products", [None, True])
def test_compiled_in_place_names_and_results_stay(keeps_products):
    plain, compiled = network_of(SMALL), network_of(SMALL)
    decoder.compile_blocks(compiled, "eager")
    if keeps_products is not None:
        compiled.recompute_blocks(keeps_products)
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


def on_meta(rows: list[list[int]]) -> tuple[list[Tensor], tuple[Tensor, int]]:
    """Return a batch without values, on "meta": code that waits for a value on a GPU fails here."""
    batch = packed(rows)
    bounds, longest = document_bounds(batch[2].numpy())
    return [x.to("meta") for x in batch], (torch.from_numpy(bounds).to("meta"), longest)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo
@pytest.mark.parametrize(("kind", "most"), [("", 1), ("on a GPU", 2), ("GPT2", 2), ("Llama", 1)])
def test_what_is_compiled_fits_other_documents(kind, most):
    graphs, is_on_gpu, longer = [], kind == "on a GPU", {"max_position_embeddings": 16}
    own = Decoder(replace(SMALL, hidden_size=32))
    network = of_transformers(kind, **longer) if kind[:1].isupper() else own
    decoder.compile_blocks(network, lambda graph, inputs: graphs.append(1) or graph)
    network = network.to("meta", torch.bfloat16) if is_on_gpu else network
    for rows in ([[9, 7], [16]], [[3, 13], [2, 14]], [[1] * 16, [16]], [[5, 11], [1, 15]]):
        batch, bounds = on_meta(rows) if is_on_gpu else (packed(rows), None)
        network(*batch, bounds=bounds).sum().backward()
        assert 0 < len(graphs) <= most  # shared by all layers; one more if numbers vary


ROWS = [[0, 0, 0, 1, 1, 2, -1, -1], [3, 3, 3, 3, 3, 3, 3, 3], [4, 5, 5, 5, 5, 5, 5, -1]]


def heads_of(num_rows: int, kv_heads: int, length: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = [(num_rows, heads, length, 6) for heads in (4, kv_heads, kv_heads)]
    q, k, v = (torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)
    return q, k, v


def slowly(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """Return attention by its definition, with heads of k and v repeated."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@AS_MASK
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], ROWS[1:2], [ROWS[0]] * 2])
def test_both_ways_and_their_gradients_equal_a_slow_reference(rows, as_mask, kv_heads):
    ids = torch.tensor(rows)
    inputs = [x.requires_grad_() for x in heads_of(len(rows), kv_heads)]
    documents = documents_of(ids, inputs[0], 6, as_mask=as_mask)
    assert (documents.mask is not None) == as_mask
    found = decoder.attend(*inputs, documents)
    expected = slowly(*inputs, (ids[:, None, :, None] == ids[:, None, None]).tril())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(each.sin().sum(), inputs) for each in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)


def test_the_kernel_is_for_half_precision_on_newer_gpus_where_bits_may_differ(monkeypatch):
    def fitting(is_new: bool, is_bitwise: bool) -> list:
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: is_new)
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_bitwise)
        cases = product(("cuda", "cpu", "mps"), dtypes, (12, 64, 256, 264))
        return [case for case in cases if decoder.has_flash(torch.device(case[0]), *case[1:])]

    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    assert fitting(True, False) == list(product(["cuda"], dtypes[:2], [64, 256]))
    assert fitting(False, False) == fitting(True, True) == []


@pytest.mark.parametrize("kind", ["own", "Llama", "Qwen3"])
def test_packed_rows_on_a_gpu_have_no_mask_and_no_repeated_heads(kind):
    own = Decoder(replace(SMALL, hidden_size=32))
    network = own if kind == "own" else of_transformers(kind, head_dim=8)
    rows, bounds = on_meta([[300, 212], [500]])
    with Made() as seen:
        network.to("meta", torch.bfloat16)(*rows, bounds=bounds).sum().backward()
    assert seen.largest() < 512 * 512
    kernels = [args for name, _, args in seen.seen if name == "torch_attn::_varlen_attn"]
    for args in kernels:
        assert [x.shape for x in args[:3]] == [(1024, heads, 8) for heads in (4, 2, 2)]
        assert (args[3] is args[4], args[5:8], args[9]) == (True, (512, 512, True), [-1, 0])
    assert len(kernels) == 2


@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize(("length", "has_mask"), [(1, True), (1, False), (40, True), (40, False)])
@torch.no_grad()
def test_heads_share_keys_and_values_of_which_a_token_copies_none(is_cpu, length, has_mask):
    (q, _, _), (_, k, v) = heads_of(3, 2, length), heads_of(3, 2, 40)
    mask = torch.ones(40, 40, dtype=torch.bool).tril()[-length:]
    with Made() as seen:
        found = decoder.attended(q, k, v, mask if has_mask else None, None, is_cpu)
    assert length > 1 or seen.largest() < k.numel()
    torch.testing.assert_close(found, slowly(q, k, v, mask), rtol=0, atol=1e-12)


def test_all_layers_keep_one_mask_for_the_backward_pass():
    network, saved = network_of(replace(SMALL, num_layers=4)).float(), []
    network.is_compiled = True  # attention then uses masks
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        logits(network, packed([[40, 24]]))
    assert len({x.data_ptr() for x in saved if x.shape[-2:] == (64, 64)}) == 1


@pytest.mark.parametrize(
    ("name", "vocab_size", "count"),
    [
        ("gpt2-124m", None, 124_439_808 - 12 * 768),  # GPT-2's number without its key biases
        ("shakespeare-cpu", 66, 800_128),
        ("shakespeare-gpu", 66, 10_647_168),
        ("llama-tiny", 256, 108_864),
        # Each layer: 4 D², 3 of D x 344, two norms; then embedding and norm; D is 128.
        ("depth-2", 66, 2 * (4 * 128**2 + 3 * 128 * 344 + 2 * 128) + 66 * 128 + 128),
    ],
)
def test_presets_have_their_sizes(name, vocab_size, count):
    config = decoder.preset(name)
    with torch.device("meta"):
        network = Decoder(replace(config, vocab_size=vocab_size or config.vocab_size))
    assert sum(p.numel() for p in network.parameters()) == count
    assert name in decoder.PRESETS or (config.num_layers, config.num_heads) == (2, 2)


@pytest.mark.parametrize("changes", [{}, {"norm": "layer", "bias": True, "tied": False}])
def test_on_meta_the_weights_are_drawn_that_the_host_draws(changes):
    config = DecoderConfig(vocab_size=31, hidden_size=16, num_heads=2, **changes)
    states = []
    for device in ("cpu", "meta"):
        torch.manual_seed(3)
        with torch.device(device):
            network = Decoder(config)
        weights = dict(network.named_parameters() if device == "cpu" else network.drawn())
        states.append({**weights, "generator": torch.get_rng_state()})
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@BOTH
def test_own_decoders_pass(config, dtype):
    check_isolation(Decoder(config).to(dtype))


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Qwen2", "Qwen3", "Mistral", "Gemma"])
def test_models_of_transformers_pass(kind):
    check_isolation(of_transformers(kind))


class Masked(PretrainedDecoder):
    """Given a padding mask, transformers does not look at positions."""

    def forward(self, input_ids, position_ids, document_ids):
        options = {"position_ids": position_ids, "attention_mask": document_ids >= 0}
        return self.model.base_model(input_ids, use_cache=False, **options).last_hidden_state


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_models_of_transformers_that_leak_are_refused(kind):
    model = made(kind)
    with pytest.raises(RuntimeError, match=f"{type(model).__name__} lets a token see"):
        check_isolation(Masked(model, {}))


def bare(kind, **sizes):
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 29, **sizes}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("Mamba", {}), ("Bloom", {}), ("Llama4Text", {"num_attention_heads": 2, "pad_token_id": 0})],
)
def test_models_that_cannot_tell_documents_apart_are_refused(kind, sizes):
    model = bare(kind, **sizes)
    with pytest.raises(ValueError, match=f"{type(model).__name__} has no base_model that takes po"):
        PretrainedDecoder(model, {})


def everything(document_ids, *options):
    return decoder.Documents()


def whole_documents(document_ids, *options):
    return decoder.Documents(mask=document_ids[:, None, :, None] == document_ids[:, None, None, :])


def small_leak(document_ids, *options):
    mask = documents_of(document_ids, torch.empty(0), 4, as_mask=True).mask == 0
    mask[0, 0, -2, 0] = True  # only the last token attends to the first
    return decoder.Documents(mask=mask)


@pytest.mark.parametrize(
    ("fault", "tolerance", "dtype", "message"),
    [
        *product([everything, whole_documents, small_leak], [1e-3], HALF_AND_FULL, [""]),
        (everything, float("inf"), torch.float32, "depends on another document"),  # by gradients
        (whole_documents, float("inf"), torch.float32, "depends on one that follows"),
    ],
)
def test_an_own_decoder_that_leaks_is_refused(monkeypatch, fault, tolerance, dtype, message):
    monkeypatch.setattr(decoder, "documents_of", fault)
    monkeypatch.setattr(decoder, "TOLERANCES", {torch.float32: tolerance})
    with pytest.raises(RuntimeError, match=f"Decoder lets a token see.*{message}"):
        check_isolation(Decoder(SMALL).to(dtype))


def test_it_leaves_no_trace():
    torch.manual_seed(1)
    network = Decoder(SMALL)
    network.layers[0].eval()
    network.embedding.weight.requires_grad_(False)
    modes = [module.training for module in network.modules()]
    weights = {name: value.clone() for name, value in network.state_dict().items()}
    state = torch.get_rng_state()
    check_isolation(network)
    assert torch.equal(state, torch.get_rng_state())
    assert modes == [module.training for module in network.modules()]
    assert all(p.grad is None for p in network.parameters())
    assert not network.embedding._forward_hooks
    assert all(torch.equal(weights[name], value) for name, value in network.state_dict().items())
