"""Encoders and text vectors: sums by hand, invariances, gradients of chunks."""

import json
import math
from functools import partial

import pytest
import torch
from torch import nn

from lit_models.blocks import layer_depths
from lit_models.seo.encoders import (
    UNREACHED,
    BagEncoder,
    Pooling,
    PretrainedEncoder,
    TransformerEncoder,
)
from lit_models.seo.networks import BiEncoder, TemperatureOptions
from lit_models.training.dropout import SampleKeys, key_dropout, release_dropout


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    encoder = BagEncoder(6, width=4).double()
    encoder.start_from(torch.tensor([9, 4, 1, 1, 0, 0]), 9)
    return encoder


def summed(encoder, *rows):
    length = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
    mask = torch.arange(length) < torch.tensor([len(row) for row in rows])[:, None]
    return encoder(ids, mask) * mask.sum(1, keepdim=True)


def test_weights_begin_as_inverse_document_frequencies(encoder):
    weights = encoder.log_weights.weight.exp()[:, 0].detach()
    assert weights[0] == pytest.approx(1.0)  # in all texts
    assert weights[1] == pytest.approx(1 + math.log(10 / 5))
    assert weights[2] == weights[3] > weights[1]
    assert (weights[4:] < 1e-12).all()  # punctuation has no weight


def test_a_text_is_the_sum_over_distinct_tokens_by_hand(encoder):
    vectors, weights = encoder.vectors.weight, encoder.log_weights.weight.exp()
    expected = (1 + math.log(2)) * weights[1] * vectors[1] + weights[2] * vectors[2]
    # In its own precision: in chunks, the default one is another in the backward pass.
    torch.testing.assert_close(summed(encoder, [1, 2, 1])[0], expected, rtol=1e-12, atol=0)


def test_order_padding_and_marks_change_nothing(encoder):
    found = summed(encoder, [1, 2, 3], [3, 1, 2], [1, 2, 3, 5], [2])
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[3], summed(encoder, [2])[0])


SIZES = {"num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 50, "hidden_size": 16}
IDS = {f"{name}_token_id": 1 for name in ("pad", "bos", "eos", "cls", "sep")}


@pytest.mark.parametrize(
    ("kind", "norm", "lowest"),
    [
        ("ModernBert", "final_norm.weight", "embeddings.tok_embeddings.weight"),
        ("MegatronBert", "encoder.ln.bias", "embeddings.word_embeddings.weight"),
        ("MPNet", None, "encoder.relative_attention_bias.weight"),
    ],
)
def test_a_last_norm_of_any_name_lies_highest(kind, norm, lowest) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SIZES, **IDS, intermediate_size=24)
    encoder = PretrainedEncoder(config.to_dict())
    depths = layer_depths(torch.nn.ModuleDict({"encoder": encoder}), encoder)
    prefix = "encoder.model."
    assert depths[prefix + lowest] == 4
    assert norm is None or depths[prefix + norm] == 1
    assert set(depths.values()) == {1, 2, 3, 4}


REACHED = {"Bert": True, "T5": True, "Esm": False}


@pytest.mark.parametrize(("kind", "is_reached"), REACHED.items())
def test_it_is_known_which_encoders_have_parameters_without_a_gradient(kind, is_reached) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**SIZES, **IDS)
    encoder = PretrainedEncoder(config.to_dict())
    encoder(*texts()).sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters()) is is_reached
    assert (config.model_type not in UNREACHED) is is_reached


def test_of_a_t5_the_encoder_is_taken(tmp_path) -> None:
    import transformers

    config = transformers.T5Config(vocab_size=50, d_model=16, d_kv=8, num_layers=2, num_heads=2)
    model = transformers.T5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    content, (ids, mask) = json.loads((tmp_path / "config.json").read_text()), texts()
    encoder = PretrainedEncoder(content, tmp_path).eval()
    hidden = model.encoder(ids, mask.long()).last_hidden_state
    torch.testing.assert_close(encoder(ids, mask), encoder.pooled(hidden, mask))
    assert len(encoder.blocks()) == 2


ROWS, POSITIONS = 12, 9


def network(pooling: Pooling = "mean", dropout: float = 0.0) -> BiEncoder:
    torch.manual_seed(3)
    encoder = TransformerEncoder(30, 16, 2, 2, 32, dropout)
    encoder.pooling = pooling
    return BiEncoder(encoder, TemperatureOptions()).double()


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 30, (ROWS, POSITIONS), generator=generator)
    lengths = torch.randint(1, POSITIONS + 1, (ROWS, 1), generator=generator)
    mask = torch.arange(POSITIONS) < lengths
    return ids * mask, mask


@pytest.mark.parametrize("pooling", ["mean", "first", "max"])
def test_padding_order_and_neighbours_change_no_vector(pooling: Pooling) -> None:
    model, (ids, mask) = network(pooling).eval(), texts()
    whole = model.encode(ids, mask)
    torch.testing.assert_close(whole.norm(dim=1), torch.ones(ROWS, dtype=torch.float64))
    wider = nn.functional.pad(ids, (0, 5)), nn.functional.pad(mask, (0, 5))
    torch.testing.assert_close(model.encode(*wider), whole, rtol=1e-12, atol=1e-12)
    order = torch.randperm(ROWS)
    turned = model.encode(ids[order], mask[order])
    torch.testing.assert_close(turned, whole[order], rtol=1e-12, atol=1e-12)


def gradients(model: BiEncoder, chunk: int | None) -> dict[str, torch.Tensor]:
    keys = SampleKeys()
    key_dropout(model, keys)
    keys.begin(7, torch.tensor([3, 8, 2, 90]))
    model.zero_grad()
    ids, mask = texts()
    queries = model.encode_samples(ids[:4], mask[:4], True, 4, chunk)
    documents = model.encode_samples(ids, mask, False, 4, chunk)
    loss = ((queries @ documents.T) / model.temperature()).logsumexp(1).sum()
    keys.is_backward = True  # the callback sets it
    loss.backward()
    release_dropout(model)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk", [1, 5, 12, 100])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_chunks_have_the_same_gradients(chunk: int, dropout: float) -> None:
    model = network(dropout=dropout).train()
    expected, found = gradients(model, None), gradients(model, chunk)
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_mask_belongs_to_a_text_not_to_its_row() -> None:
    model, keys, (ids, mask) = network(dropout=0.5).train(), SampleKeys(), texts()
    key_dropout(model, keys)
    encode = partial(model.encode_samples, is_query=False, chunk=None)
    keys.begin(7, torch.tensor([3, 8]))
    both = encode(ids[:4], mask[:4], num_samples=2)
    keys.begin(7, torch.tensor([8]))
    second = encode(ids[2:4], mask[2:4], num_samples=1)
    torch.testing.assert_close(both[2:], second, rtol=1e-12, atol=1e-12)
    same = encode(ids[:1].expand(2, -1), mask[:1].expand(2, -1), num_samples=1)
    assert not torch.allclose(same[0], same[1])  # two texts of one sample


def test_chunks_keep_no_activations_until_the_backward_pass() -> None:
    model, (ids, mask) = network(), texts()

    def kept_bytes(chunk: int | None) -> int:
        kept = 0

        def pack(value: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += value.untyped_storage().nbytes() * (value.grad_fn is not None)
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            model.encode_samples(ids, mask, False, 4, chunk)
        return kept

    assert kept_bytes(2) < kept_bytes(None) / 20
