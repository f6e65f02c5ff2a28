"""Character n-grams of framed texts as hash keys.

Shapes: B batch, S characters, P = S + 2 positions, G sizes of n-grams.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

TEXT_BEGIN, TEXT_END = 2, 3  # control characters that no cleaned text holds
SPACE = ord(" ")
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


def spaced(framed_ids: Tensor, lengths: Tensor) -> Tensor:
    """Texts with a space in place of their marks, and behind them [B, P]; args of `ngram_keys`."""
    place = torch.arange(framed_ids.shape[1], device=framed_ids.device)
    is_outside = (place == 0) | (place >= lengths[:, None] - 1)
    return framed_ids.masked_fill(is_outside, SPACE)


def within_words(ids: Tensor, sizes: Sequence[int]) -> Tensor:
    """Which n-grams lie in one word and the spaces at its sides [B, P, G] bool.

    Args:
        ids: [B, P] texts as code points, with `SPACE` before, after and between words.
        sizes: the G lengths of n-grams.
    """
    positions = ids.shape[1]
    is_space = F.pad(ids == SPACE, (0, max(sizes)), value=True)
    spaces = F.pad(is_space.cumsum(1), (1, 0))  # before each position
    first = is_space[:, :positions]
    inside = []
    for size in sorted(set(sizes)):
        last = is_space[:, size - 1 : size - 1 + positions]
        between = spaces[:, size - 1 : size - 1 + positions] - spaces[:, 1 : positions + 1]
        is_blank = first & last if size < 3 else torch.zeros_like(first)
        inside.append((between <= 0) & ~is_blank)
    return torch.stack(inside, -1)


def mix(keys: Tensor) -> Tensor:
    """Well-spread non-negative int64 of each key (multiply and shift, as in splitmix)."""
    keys = (keys ^ (keys >> 30)) * -4658895280553007687
    keys = (keys ^ (keys >> 27)) * -7723592293110705685
    return (keys ^ (keys >> 31)) & 0x7FFFFFFFFFFFFFFF
