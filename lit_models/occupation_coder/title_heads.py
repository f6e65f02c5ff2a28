"""The head of a job title: the word that most often names the occupation.

"Clerk" in "solicitor's clerk of London": the last word before the first one that ends a title's
core, such as "of" or "and". Which words do so depends on the language, so they are given. The rule
reads no grammar: the head of "boot and shoe maker" is "boot".

Shapes: B batch, P positions, E words that end a head.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_models.occupation_coder.ngrams import SPACE, mix

PLACE_SHIFT = 32  # the place of a letter in its word stands above its code point


class TitleHeads(nn.Module):
    """Finds the heads of titles.

    Words are cut at spaces and at the given signs alone.

    Args:
        ends: words that end the head, in the letters of cleaned texts, and signs of one character
            each, which stand for a space too; those before the first other word end nothing.
    """

    signs: Tensor  # [number of signs] code points
    end_keys: Tensor  # [E]

    def __init__(self, ends: Sequence[str]) -> None:
        super().__init__()
        signs = [ord(end) for end in ends if is_sign(end)]
        keys = [_key(end) for end in ends if not is_sign(end)]
        # Made once, since a copy to a GPU in each step would be waited for.
        self.register_buffer("signs", torch.tensor(signs, dtype=torch.int64), persistent=False)
        self.register_buffer("end_keys", torch.tensor(keys, dtype=torch.int64), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Which positions hold the head's characters [B, P] bool; none where a text has no word.

        Args:
            ids: [B, P] texts as code points, with `SPACE` before, after and between words.
        """
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        at_sign = _is_one_of(ids, self.signs)
        is_gap = (ids == SPACE) | at_sign
        begins = ~is_gap & F.pad(is_gap, (1, 0), value=True)[:, :-1]
        word = begins.cumsum(1)  # 1, 2 ...; of a gap, that of the word before it

        ends_head = _is_one_of(_word_keys(ids, is_gap, begins, word), self.end_keys)
        is_end = at_sign | (begins & ends_head.gather(1, word))
        is_other = begins & ~is_end
        first = torch.where(is_other, place, ids.shape[1]).amin(1, keepdim=True)
        end = torch.where(is_end & (place > first), place, ids.shape[1]).amin(1, keepdim=True)
        head = torch.where(is_other & (place < end), word, -1).amax(1, keepdim=True)
        return ~is_gap & (word == head)


def _is_one_of(values: Tensor, these: Tensor) -> Tensor:
    """Whether each value is one of these; `torch.isin` may sort, for which a GPU is waited for."""
    return (values[..., None] == these).any(-1)


def is_sign(end: str) -> bool:
    """Return whether an end is a sign, which needs no space around it, and not a word."""
    return len(end) == 1 and not end.isalnum()


def _word_keys(ids: Tensor, is_gap: Tensor, begins: Tensor, word: Tensor) -> Tensor:
    """Return a key of each word [B, P + 1] int64, equal for equal words; word 0 is none."""
    place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    start = torch.where(begins, place, 0).cummax(1).values
    letters = mix(ids + ((place - start) << PLACE_SHIFT)).masked_fill(is_gap, 0)
    keys = ids.new_zeros((len(ids), ids.shape[1] + 1), dtype=torch.int64)
    return keys.scatter_add(1, word, letters)


def _key(word: str) -> int:
    """Return what `_word_keys` makes of this word, wherever the module is built."""
    letters = torch.tensor([ord(letter) for letter in word], dtype=torch.int64, device="cpu")
    places = torch.arange(len(word), device="cpu")
    return int(mix(letters + (places << PLACE_SHIFT)).sum())
