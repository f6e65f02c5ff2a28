"""The teacher's text: what an explanation is before the networks learn together.

Shapes: B samples, T tokens, t words.
"""

from torch import Tensor, arange


def recent_words(input_ids: Tensor, position: Tensor, num_words: int) -> Tensor:
    """Return [B, t] int64: the last words up to the position, the most recent one first.

    Args:
        input_ids: [B, T] int64.
        position: [B] int64, that of the activation.
        num_words: t; a document's first word is repeated where there are fewer.
    """
    places = position[:, None] - arange(num_words, device=position.device)
    return input_ids.gather(1, places.clamp(min=0))
