"""The shape of the own decoder, and what fits it.

Shapes: D hidden, H heads, G key and value heads, K head size.
"""

from dataclasses import dataclass
from typing import Literal

from lit_models.causal_lm.rotary import RopeScaling

_SIZES = ("vocab_size", "max_positions", "hidden_size", "num_layers", "num_heads")
_POSITIVE = (*_SIZES, "num_kv_heads", "feed_forward", "norm_eps", "rope_theta")


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder.

    Args:
        vocab_size: rows of the embedding; none takes the tokenizer's.
        max_positions: longest document that it is made for. Learned positions end there; rotary
            ones go on, at contexts that it was not trained for.
        hidden_size: D.
        num_layers: blocks.
        num_heads: H.
        num_kv_heads: G, a divisor of H; none is H.
        feed_forward: inner width of the feed-forward part; none is 4 D, or 8/3 D for swiglu.
        norm: RMSNorm or LayerNorm.
        norm_eps: its epsilon.
        positions: rotary, or a learned table of max_positions rows.
        rope_theta: base of the rotary frequencies.
        rope_scaling: the longer contexts of Llama 3.1, or none.
        activation: swiglu, or gelu in its tanh form.
        bias: of linear layers and LayerNorm; keys have none, since with learned positions it
            changes nothing.
        tied: the head shares the embedding's weights.
        dropout: after embedding, attention and feed-forward, 0 to below 1.

    Raises:
        ValueError: a size or a rate is out of its range, or sizes do not fit each other.
    """

    vocab_size: int | None = None
    max_positions: int = 1024
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    feed_forward: int | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    positions: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    activation: Literal["swiglu", "gelu"] = "swiglu"
    bias: bool = False
    tied: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.rope_scaling, dict):  # of a checkpoint's plain values
            object.__setattr__(self, "rope_scaling", RopeScaling(**self.rope_scaling))
        _check_sizes(self)

    @property
    def head_size(self) -> int:
        """K."""
        return self.hidden_size // self.num_heads

    @property
    def kv_heads(self) -> int:
        """G."""
        return self.num_kv_heads or self.num_heads

    @property
    def inner_size(self) -> int:
        """Inner width of the feed-forward part."""
        if self.feed_forward is not None:
            return self.feed_forward
        if self.activation == "gelu":
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // 3 // 8) * 8


def check_context(config: DecoderConfig, context_length: int) -> None:
    """Refuse documents that are longer than a table of learned positions.

    Raises:
        ValueError: they are.
    """
    if config.positions == "learned" and context_length > config.max_positions:
        raise ValueError(
            f"context_length {context_length} is longer than the network's {config.max_positions} "
            f"learned positions; lower data.context_length to {config.max_positions} or less, "
            "raise max_positions for a network from scratch, or take one with rotary positions."
        )


def _check_sizes(config: DecoderConfig) -> None:
    for name in _POSITIVE:
        size = getattr(config, name)
        if size is not None and size <= 0:
            raise ValueError(f"{name} must be positive, got {size}.")
    width, heads = config.hidden_size, config.num_heads
    if width % heads:
        raise ValueError(
            f"hidden_size {width} must be a multiple of num_heads {heads}; change one of them."
        )
    if heads % config.kv_heads:
        raise ValueError(
            f"num_kv_heads {config.kv_heads} must divide num_heads {heads}: as many query heads "
            "share each; change one of them."
        )
    if config.positions == "rotary" and config.head_size % 2:
        raise ValueError(
            f"rotary positions turn pairs: hidden_size / num_heads must be even, got {width} / "
            f"{heads} = {config.head_size}; change one of them or take positions: learned."
        )
    if config.rope_scaling is not None and config.positions == "learned":
        raise ValueError("rope_scaling needs positions: rotary; leave it out with learned ones.")
    if not 0 <= config.dropout < 1:
        raise ValueError(f"dropout must be 0 to below 1, got {config.dropout}.")
