"""The teacher's text: what an explanation is before the networks learn together.

Shapes: B samples, T tokens, t words, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, arange

from datamodules.core.batches import ActivationBatch

_NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class TeacherText:
    """Which words of the text up to the position the teacher's text is made of.

    The most recent words tell most of an activation; rare ones name what a document is about.

    Args:
        rare: words that are the rarest ones of the text, by their number in the training part; all
            others are the most recent ones.
        rare_first: the rare words stand before the recent ones, not after them.

    Raises:
        ValueError: rare is below 0.
    """

    rare: int = 0
    rare_first: bool = False

    def __post_init__(self) -> None:
        if self.rare < 0:
            raise ValueError(f"teacher.rare must be 0 or more, got {self.rare}.")

    def check(self, num_words: int) -> None:
        """Refuse more rare words than an explanation has words.

        Raises:
            ValueError: there are more.
        """
        if self.rare > num_words:
            raise ValueError(
                f"teacher.rare {self.rare} is more than the {num_words} words of an explanation; "
                "lower it, or raise lens.num_words."
            )

    def words(
        self,
        input_ids: Tensor,
        position: Tensor,
        num_words: int,
        token_counts: Tensor,
        is_word: Tensor,
    ) -> Tensor:
        """Return the teacher's text [B, t] int64, words alone: the verbalizer says nothing else.

        Args:
            input_ids: [B, T] int64.
            position: [B] int64, that of the activation.
            num_words: t.
            token_counts: [V] int64, how often each token occurs in the training part; 0 for what
                is no word.
            is_word: [V] bool.
        """
        recent = recent_words(input_ids, position, max(1, num_words - self.rare), is_word)
        last, recent = recent[:, :1], recent[:, : num_words - self.rare]
        if not self.rare:
            return recent
        rare = rare_words(input_ids, position, self.rare, token_counts, recent)
        rare = rare.where(is_word[rare], last)  # where the position holds no word
        return torch.cat([rare, recent] if self.rare_first else [recent, rare], dim=1)


def current_token(batch: ActivationBatch) -> Tensor:
    """Return [B] int64: the words at the positions of the activations."""
    return batch["input_ids"].gather(1, batch["position"][:, None])[:, 0]


def recent_words(input_ids: Tensor, position: Tensor, num_words: int, is_word: Tensor) -> Tensor:
    """Return [B, t] int64: the last words up to the position, the most recent one first.

    Tokens that are no words, such as one that begins every document, are passed over. The earliest
    word is repeated where there are fewer, and the vocabulary's first one where there is none.

    Args:
        input_ids: [B, T] int64.
        position: [B] int64, that of the activation.
        num_words: t.
        is_word: [V] bool.
    """
    length = input_ids.shape[1]
    age = position[:, None] - arange(length, device=position.device)  # [B, T]
    counts = (age >= 0) & is_word[input_ids]
    places = age.where(counts, length).argsort(1)  # words first, from the most recent one on
    steps = arange(num_words, device=position.device)
    last = counts.sum(1, keepdim=True) - 1  # [B, 1], -1 without any word
    found = input_ids.gather(1, places.gather(1, torch.minimum(steps, last.clamp(min=0))))
    return found.where(last >= 0, is_word.int().argmax())


def rare_words(
    input_ids: Tensor, position: Tensor, num_words: int, token_counts: Tensor, known: Tensor
) -> Tensor:
    """Return [B, t] int64: distinct words up to the position, the rarest one first.

    Of equally rare words the most recent one comes first. The word at the position stands where
    the text has no other word.

    Args:
        input_ids: [B, T] int64.
        position: [B] int64.
        num_words: t.
        token_counts: [V] int64; tokens with 0 are never taken.
        known: [B, k] int64, words that are not taken.
    """
    length = input_ids.shape[1]
    age = position[:, None] - arange(length, device=position.device)  # [B, T]
    counts = token_counts[input_ids]
    is_free = (age >= 0) & (counts > 0) & (input_ids[..., None] != known[:, None]).all(-1)
    order = counts * length + age
    current, found = input_ids.gather(1, position[:, None]), []  # [B, 1]
    for _ in range(num_words):
        place = order.where(is_free, _NEVER).argmin(1, keepdim=True)
        word = input_ids.gather(1, place).where(is_free.any(1, keepdim=True), current)
        is_free = is_free & (input_ids != word)
        found.append(word)
    return torch.cat(found, dim=1)
