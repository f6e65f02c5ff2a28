"""Networks by name."""

from lit_models.causal_lm.decoder_config import DecoderConfig

PRESETS = {
    "gpt2-124m": DecoderConfig(
        vocab_size=50_257,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        norm="layer",
        positions="learned",
        activation="gelu",
        bias=True,
    ),
    "llama-tiny": DecoderConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2),
    "shakespeare-cpu": DecoderConfig(max_positions=64, hidden_size=128, num_layers=4, num_heads=4),
    "shakespeare-gpu": DecoderConfig(
        max_positions=256, hidden_size=384, num_layers=6, num_heads=6, dropout=0.2
    ),
    "1b": DecoderConfig(
        max_positions=2048,
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        feed_forward=8192,
        rope_theta=500_000.0,
    ),
}


def named_network(name: str) -> DecoderConfig:
    """Return the preset of this name.

    Raises:
        ValueError: there is none.
    """
    if name not in PRESETS:
        raise ValueError(f'network "{name}" is no preset; choose one of {", ".join(PRESETS)}.')
    return PRESETS[name]
