"""Words that gradients pass through, drawn with noise that belongs to the sample.

Shapes: B samples, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_models.training.keyed_dropout import mixed

_MANTISSA = 24  # bits of a uniform number in float32


def gumbel_noise(key: Tensor, place: int, vocab_size: int) -> Tensor:
    """Return Gumbel noise [B, V] float32, the same on any device for the same keys.

    Args:
        key: [B] int64.
        place: of the word in the text, so that each has its own noise.
        vocab_size: V.
    """
    words = torch.arange(vocab_size, device=key.device)
    bits = mixed(mixed(key, place)[:, None], words) & ((1 << _MANTISSA) - 1)
    uniform = (bits.double() + 0.5) / (1 << _MANTISSA)  # never 0 or 1
    return -torch.log(-torch.log(uniform)).float()


def straight_through(logits: Tensor, noise: Tensor | None, temperature: float) -> Tensor:
    """Return one-hot words [B, V] whose gradient is that of a soft choice.

    Args:
        logits: [B, V], float32 or better.
        noise: [B, V]; none takes the most probable word.
        temperature: of the soft choice, above 0.

    Source: Jang et al. 2017, "Categorical Reparameterization with Gumbel-Softmax", section 2.2.
    """
    scores = logits if noise is None else logits + noise.to(logits.dtype)
    hard = F.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
    if not scores.requires_grad:
        return hard
    soft = (scores / temperature).softmax(-1)
    return hard + soft - soft.detach()
