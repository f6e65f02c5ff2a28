"""Character n-grams of framed texts as hash keys.

Shapes: B batch, S characters, P = S + 2 positions, G sizes of n-grams.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

TEXT_BEGIN, TEXT_END = 2, 3  # control characters that no cleaned text holds
SALT_SHIFT = 41  # a salt stands above every key
_HASH_PRIME, _HASH_MASK = 1_000_003, (1 << 40) - 1


def frame(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Texts with a begin and an end mark [B, S + 2], and their lengths with the marks [B]."""
    lengths = attention_mask.sum(1) + 2
    framed = F.pad(input_ids * attention_mask, (1, 1))
    framed[:, 0] = TEXT_BEGIN
    return framed.scatter(1, (lengths - 1)[:, None], TEXT_END), lengths


def ngram_keys(framed_ids: Tensor, lengths: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys below 2 ** 40 of the n-grams that begin at each position, and which lie inside.

    Args:
        framed_ids: texts with their marks [B, P], as `frame` returns them.
        lengths: of the texts with their marks [B].
        sizes: the G lengths of n-grams.

    Returns:
        Keys [B, P, G] int64, equal for equal n-grams, and [B, P, G] bool; sizes in rising order.
    """
    positions = framed_ids.shape[1]
    padded = F.pad(framed_ids, (0, max(sizes)))
    rolling = torch.zeros_like(framed_ids)
    start = torch.arange(positions, device=framed_ids.device)
    keys, inside = [], []
    for size in range(1, max(sizes) + 1):
        rolling = rolling * _HASH_PRIME + padded[:, size - 1 : size - 1 + positions] + size
        rolling = rolling & _HASH_MASK
        if size in sizes:
            keys.append(rolling)
            inside.append(start[None, :] + size <= lengths[:, None])
    return torch.stack(keys, -1), torch.stack(inside, -1)


def mix(keys: Tensor) -> Tensor:
    """Well-spread non-negative int64 of each key (multiply and shift, as in splitmix)."""
    keys = (keys ^ (keys >> 30)) * -4658895280553007687
    keys = (keys ^ (keys >> 27)) * -7723592293110705685
    return (keys ^ (keys >> 31)) & 0x7FFFFFFFFFFFFFFF
