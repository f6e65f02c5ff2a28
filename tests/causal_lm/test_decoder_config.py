"""Shapes of decoders: sizes of the presets, and what is refused."""

from dataclasses import replace

import pytest
import torch

from lit_models.causal_lm.network import (
    PRESETS,
    Decoder,
    DecoderConfig,
    named_network,
)

SMALL = DecoderConfig(vocab_size=31, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2)


@pytest.mark.parametrize(
    ("name", "vocab_size", "count"),
    [
        ("gpt2-124m", None, 124_439_808 - 12 * 768),  # GPT-2's own without its key biases
        ("shakespeare-cpu", 66, 800_128),
        ("shakespeare-gpu", 66, 10_647_168),
        ("llama-tiny", 256, 108_864),
        ("1b", 32_000, 1_038_682_112),
    ],
)
def test_presets_have_their_sizes(name, vocab_size, count):
    config = named_network(name)
    with torch.device("meta"):
        network = Decoder(replace(config, vocab_size=vocab_size or config.vocab_size))
    assert sum(p.numel() for p in network.parameters()) == count
    assert set(PRESETS) == {"gpt2-124m", "llama-tiny", "shakespeare-cpu", "shakespeare-gpu", "1b"}


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
        named_network("gpt5")
