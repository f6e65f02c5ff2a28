"""The teacher's text: words of the document, chosen by recency or by the activation.

Shapes: B samples, D features, T tokens, t words, V vocabulary, n pairs of a sample and a word.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, arange

from datamodules.activations.store import one_thread
from datamodules.core.batches import ActivationBatch
from datamodules.files.splitting import TRAIN
from lit_models.consistency_lens.lens import Lens

if TYPE_CHECKING:
    from datamodules.activations.datamodule import ActivationDataModule


@dataclass(frozen=True)
class TeacherText:
    """Choice of the teacher's words among those up to the position.

    The most recent words describe an activation best. The other words are those that it reveals
    most about, so that the verbalizer can learn them.

    Args:
        told: number of words that are rare and that the activation reveals, see `told_map`. They
            follow the most recent words, which make up the rest of the explanation.
    """

    told: int = 0

    def check(self, num_words: int) -> None:
        if not 0 <= self.told <= num_words:
            raise ValueError(
                f"teacher.told {self.told} must be 0 to {num_words}, the words of an explanation; "
                "lower it, or raise lens.num_words."
            )

    def of(self, lens: Lens, batch: ActivationBatch, activation: Tensor) -> Tensor:
        """Return the text [B, t] int64 of a batch with activations [B, D]."""
        ids, shares = batch["input_ids"], None
        if self.told:  # no matrix product, so that other rows of the batch do not change any bit
            layer = batch.get("layer")
            place = ids if layer is None else (layer[:, None], ids)
            table = lens.told_map[place]  # [B, T, D + 1]
            shares = (table[..., :-1] * activation[:, None]).sum(-1) + table[..., -1]
        is_word, num_words = lens.verbalizer.is_word, lens.verbalizer.num_words
        return self.words(ids, batch["position"], num_words, lens.token_counts, is_word, shares)

    def words(
        self,
        input_ids: Tensor,
        position: Tensor,
        num_words: int,
        token_counts: Tensor,
        is_word: Tensor,
        shares: Tensor | None = None,
    ) -> Tensor:
        """Return the teacher's text [B, t] int64; like the verbalizer, it uses only words.

        Args:
            input_ids: [B, T] int64.
            position: [B] int64, of the activation.
            num_words: t.
            token_counts: [V] int64, occurrences in the training part; 0 for tokens that are no
                words.
            is_word: [V] bool.
            shares: [B, T], score of each word by `told_map`; `None` if `told` is 0.
        """
        num_recent = num_words - self.told
        recent = recent_words(input_ids, position, max(1, num_recent), is_word)
        last, text = recent[:, :1], recent[:, :num_recent]
        if shares is None:
            return text
        told = chosen_words(input_ids, position, self.told, -shares, token_counts, text)
        # `told` may hold the token at the position, which may be no word.
        return torch.cat([text, told.where(is_word[told], last)], dim=1)


def recent_words(input_ids: Tensor, position: Tensor, num_words: int, is_word: Tensor) -> Tensor:
    """Return the last words up to the position [B, t] int64, the most recent one first.

    Tokens that are no words, such as a begin-of-text token, are skipped. If there are too few, the
    earliest word is repeated; if there is none, the vocabulary's first word is used. Args: as in
    `TeacherText.words`.
    """
    length = input_ids.shape[1]
    age = position[:, None] - arange(length, device=position.device)  # [B, T]
    counts = (age >= 0) & is_word[input_ids]
    places = age.where(counts, length).argsort(1)  # words first, the most recent one first
    steps = arange(num_words, device=position.device)
    last = counts.sum(1, keepdim=True) - 1  # [B, 1], -1 without any word
    words = input_ids.gather(1, places.gather(1, torch.minimum(steps, last.clamp(min=0))))
    return words.where(last >= 0, is_word.int().argmax())


def chosen_words(
    input_ids: Tensor,
    position: Tensor,
    num_words: int,
    order: Tensor,
    token_counts: Tensor,
    known: Tensor,
) -> Tensor:
    """Return distinct words up to the position [B, t] int64, by ascending `order` [B, T].

    Words of `known` [B, k] are not used. If words run out, the token at the position fills the
    rest. Other args: as in `TeacherText.words`.
    """
    age = position[:, None] - arange(input_ids.shape[1], device=position.device)  # [B, T]
    is_free = (age >= 0) & (token_counts[input_ids] > 0)
    is_free &= (input_ids[..., None] != known[:, None]).all(-1)
    current, words = input_ids.gather(1, position[:, None]), []  # [B, 1]
    for _ in range(num_words):
        place = order.where(is_free, torch.inf).argmin(1, keepdim=True)
        word = input_ids.gather(1, place).where(is_free.any(1, keepdim=True), current)
        is_free = is_free & (input_ids != word)
        words.append(word)
    return torch.cat(words, dim=1)


COUNTED_AT_ONCE = 1 << 22  # tokens


def word_counts(data: "ActivationDataModule", is_word: Tensor) -> Tensor:
    """Return the occurrences of each word in the training part [V] int64; 0 for other tokens."""
    assert data.store is not None
    tokens, counts = data.store.stream(TRAIN).tokens, np.zeros(len(is_word), np.int64)
    for start in range(0, len(tokens), COUNTED_AT_ONCE):
        counts += np.bincount(tokens[start : start + COUNTED_AT_ONCE], minlength=len(is_word))
    return torch.from_numpy(counts).to(is_word.device) * is_word


MOST_SAMPLES = 1 << 16  # of the training part, to fit the map
RIDGE = 1e-3  # relative to each input's mean square
FEWEST = 1e-3  # minimum share of documents, as the map would overrate rarer words
POWER = 1.5  # 1 admits words of every second document; 2 drops words that the activation reveals


def told_map(lens: Lens, batches: Iterator[ActivationBatch]) -> Tensor:
    """Return weights and bias [V, D + 1] float32 that score, from an activation, each word's
    presence up to its position, in favour of rare words.

    They are a ridge regression of the words' presence on the activation, divided by (share of
    documents with the word) ** POWER, so that words which distinguish documents come first. Sums
    are in float64 on one thread, so that no bit depends on the number of devices.
    """
    width, vocab_size = lens.mean.shape[-1], len(lens.token_counts)
    squares = torch.zeros(width + 1, width + 1, dtype=torch.float64, device="cpu")
    products = torch.zeros(vocab_size, width + 1, dtype=torch.float64, device="cpu")
    held, count = torch.zeros(vocab_size, dtype=torch.float64, device="cpu"), 0
    with one_thread(), torch.no_grad():
        for batch in batches:
            device = lens.mean.device
            moved = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in batch.items()}
            activation = lens.activation(moved).cpu().double()  # type: ignore[arg-type]
            one = torch.cat([activation, torch.ones_like(activation[:, :1])], dim=1)
            ids, places = batch["input_ids"], arange(batch["input_ids"].shape[1], device="cpu")
            rows = arange(len(ids), device="cpu")[:, None]
            keys = rows * vocab_size + ids
            pairs = keys[places <= batch["position"][:, None]].unique()  # [n]
            whole = keys[places < batch["lengths"][:, None]].unique() % vocab_size
            held += whole.bincount(minlength=vocab_size)
            products.index_add_(0, pairs % vocab_size, one[pairs // vocab_size])
            squares += one.T @ one
            count += len(ids)
        ridge = squares + RIDGE * squares.diag().diag()
        weights = torch.linalg.solve(ridge, products.T).T  # [V, D + 1]
    share = (held / count).clamp(min=FEWEST)[:, None]
    return (weights / share**POWER).float()
