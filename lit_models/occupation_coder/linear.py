"""Linear support vector machine as flat head: one margin per code from hashed n-grams.

With a few thousand distinct texts it is more accurate than a head that learns its features. As its
loss is convex, it is solved before the first training step, with the same result for every seed and
number of devices.

Optional features are the n-grams of a title's head, the word that most often names the occupation:
"clerk" in "solicitor's clerk of London". It is the last word before the first word that ends the
title's core, such as "of" or "and"; `head_ends` lists these, as they depend on the language. The
rule uses no grammar: the head of "boot and shoe maker" is "boot".

Shapes: B batch, S characters, P positions, G n-grams, E words that end a head, C codes, F features,
N training texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datamodules.core.batches import padded_texts
from datamodules.tokenizers.codes import TextOptions, encode
from lit_models.occupation_coder.encoders import (
    SALT_SHIFT,
    SPACE,
    frame,
    mix,
    ngram_keys,
    spaced,
    within_words,
)

PLACE_SHIFT = 32  # a letter's place in its word occupies the bits above its code point


class TitleHeads(nn.Module):
    """Finds the heads of titles. Words are separated only by spaces and the signs in `ends`.

    Args:
        ends: words that end the head, spelled as in normalised texts, and signs of one character,
            which also separate words; those before the first other word are ignored.
    """

    signs: Tensor  # [number of signs] code points
    end_keys: Tensor  # [E]

    def __init__(self, ends: Sequence[str]) -> None:
        super().__init__()
        signs = [end for end in ends if len(end) == 1 and not end.isalnum()]  # need no spaces
        points, keys = list(map(ord, signs)), [_key(end) for end in ends if end not in signs]
        # Buffers, as a copy to a GPU in every step would block the host.
        self.register_buffer("signs", torch.tensor(points, dtype=torch.int64), persistent=False)
        self.register_buffer("end_keys", torch.tensor(keys, dtype=torch.int64), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Mask of the head's characters [B, P] bool, all False for a text without a word. Args:
        code points [B, P] with `SPACE` before, after and between words."""
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        at_sign = _is_one_of(ids, self.signs)
        is_gap = (ids == SPACE) | at_sign
        begins = ~is_gap & F.pad(is_gap, (1, 0), value=True)[:, :-1]
        word = begins.cumsum(1)  # 1, 2 ...; a gap has the number of the word before it

        start = torch.where(begins, place, 0).cummax(1).values
        letters = mix(ids + ((place - start) << PLACE_SHIFT)).masked_fill(is_gap, 0)
        keys = ids.new_zeros((len(ids), ids.shape[1] + 1), dtype=torch.int64)  # [B, words + 1]
        ends_head = _is_one_of(keys.scatter_add(1, word, letters), self.end_keys)
        is_end = at_sign | (begins & ends_head.gather(1, word))
        is_other = begins & ~is_end
        first = torch.where(is_other, place, ids.shape[1]).amin(1, keepdim=True)
        end = torch.where(is_end & (place > first), place, ids.shape[1]).amin(1, keepdim=True)
        head = torch.where(is_other & (place < end), word, -1).amax(1, keepdim=True)
        return ~is_gap & (word == head)


def _is_one_of(values: Tensor, these: Tensor) -> Tensor:
    """Whether each value is one of these; `torch.isin` may sort, which blocks on a GPU."""
    return (values[..., None] == these).any(-1)


def _key(word: str) -> int:
    """Return the key of a word as in `TitleHeads.forward`, computed on the CPU."""
    letters = torch.tensor([ord(letter) for letter in word], dtype=torch.int64, device="cpu")
    places = torch.arange(len(word), device="cpu")
    return int(mix(letters + (places << PLACE_SHIFT)).sum())


SALT, HEAD_SALT, CORE_SALT = 1 << 20, 1 << 21, 1 << 22  # the encoder's tables have other salts
SIGN_BIT = 50  # bit of a hash that gives the sign; the column depends on all bits
TEXTS_AT_ONCE = 512
TOLERANCE, MOST_ITERATIONS = 1e-4, 10_000  # of the solver
# Handicap of a code without training texts; chosen among 1.1 to 1.5 on cuts of real data.
UNLIKE = 1.5
LOGIT_PER_MARGIN = 8.0  # margins lie around -1 and 1, which a sigmoid maps too close to 0.5
FIRST_MARGIN = -1.0  # initial margin of every code: most codes do not fit a text


@dataclass
class LinearOptions:
    """Features and regularisation of the linear head.

    Args:
        ngram_sizes: lengths of the character n-grams.
        num_features: number of columns that the n-grams are hashed to.
        cost: the C of an SVM; smaller values regularise more.
        within_words: leaves out n-grams that span two words, so that a word has the same features
            beside any other.
        head_weight: weight of the additional n-grams of the title's head, the word that names the
            occupation; 0 leaves them out.
        core_weight: the same for the title's core, the text up to the end of its head.
        head_ends: words and signs that end the title's core, such as "of", "and" and ","; in lower
            case if texts are lower-cased. The core's last word is the head.
        descriptions: codes without training texts are found by their descriptions: their margin is
            the cosine of the text's features and the description's, minus 1.5.
    """

    ngram_sizes: Sequence[int] = (2, 3, 4, 5)
    num_features: int = 4096
    cost: float = 1.0
    within_words: bool = False
    head_weight: float = 0.0
    core_weight: float = 0.0
    head_ends: Sequence[str] = ()
    descriptions: bool = False

    def __post_init__(self) -> None:
        wrong = next((end for end in self.head_ends if end.split() != [end]), None)
        if wrong is not None or isinstance(self.head_ends, str):
            raise ValueError(
                f"linear.head_ends must be a list of single words or signs, got {self.head_ends!r}:"
                " a text with spaces never matches."
            )


def refuse_other_features(options: LinearOptions | None, trained: Mapping[str, Any] | None) -> None:
    """Raise ValueError if the checkpoint's weights belong to other features, which may have the
    same shapes. `trained`: the checkpoint's `loss.linear`."""
    if options is None or trained is None:
        return  # loading then fails by the shapes, with its own error
    meant, known = asdict(options), {**asdict(LinearOptions()), **trained}
    for name in sorted(meant.keys() - {"cost", "descriptions"}):
        if list(np.unique(meant[name])) != list(np.unique(known[name])):
            raise ValueError(
                f"the checkpoint was trained with loss.linear.{name} {known[name]}, but it is "
                f"{meant[name]} here, with which the weights mean something else. Use its own "
                "config, or take only its encoder with init_from_part: encoder."
            )


class LinearHead(nn.Module):
    """One logit per code, linear in the text's n-grams; it needs no encoder.

    N-grams are hashed to signed columns, so that the weight matrix is dense; similarities of texts
    stay the same up to noise of the order of 1 / sqrt(F).
    """

    def __init__(self, num_codes: int, options: LinearOptions) -> None:
        super().__init__()
        self.options = options
        self.sizes = tuple(options.ngram_sizes)
        self.title_heads: TitleHeads | None = None
        if options.head_weight or options.core_weight:
            self.title_heads = TitleHeads(options.head_ends)
        self.weight = nn.Parameter(torch.zeros(num_codes, options.num_features))
        self.bias = nn.Parameter(torch.full((num_codes,), FIRST_MARGIN))
        self.requires_grad_(False)  # `solve` sets the weights; training steps do not change them

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits [B, C]. Args: as in `Encoder.forward`."""
        features = self.features(input_ids, attention_mask)
        return LOGIT_PER_MARGIN * F.linear(features, self.weight, self.bias)

    @torch.no_grad()
    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Signed n-gram counts of texts [B, F], with norm 1, or 0 without any n-gram."""
        framed_ids, lengths = frame(input_ids, attention_mask)
        ids = spaced(framed_ids, lengths) if self.options.within_words else framed_ids
        keys, inside = ngram_keys(ids, lengths, self.sizes)
        if self.options.within_words:
            inside = inside & within_words(ids, self.sizes)
        features = self._counted(keys, inside, SALT)
        if self.title_heads is None:
            return features
        spaced_ids = spaced(framed_ids, lengths)
        is_head = self.title_heads(spaced_ids)
        to_its_end = is_head.flip(1).cumsum(1).flip(1) > 0  # core: the text up to the head's end
        parts = (
            (is_head, self.options.head_weight, HEAD_SALT),
            (to_its_end, self.options.core_weight, CORE_SALT),
        )
        for is_part, weight, salt in parts:
            if weight:
                ids = torch.where(is_part, spaced_ids, SPACE)
                keys, inside = ngram_keys(ids, lengths, self.sizes)
                counts = self._counted(keys, inside & within_words(ids, self.sizes), salt)
                features = features + weight * counts
        return F.normalize(features, dim=1)

    def _counted(self, keys: Tensor, inside: Tensor, salt: int) -> Tensor:
        """Hashed and signed counts of n-grams [B, P, G] as rows [B, F] of norm 1 or 0."""
        mixed = mix(keys + (salt << SALT_SHIFT)).flatten(1)  # [B, P x G]
        sign = 1 - 2 * ((mixed >> SIGN_BIT) & 1)
        counts = self.weight.new_zeros(len(mixed), self.options.num_features)
        signed = (sign * inside.flatten(1)).to(counts.dtype)
        return F.normalize(counts.scatter_add(1, mixed % self.options.num_features, signed), dim=1)


@torch.no_grad()
def solve(
    head: LinearHead, texts: Sequence[np.ndarray], has_code: np.ndarray, weights: np.ndarray
) -> None:
    """Set the head's weights to the minimum of the regularised squared hinge loss.

    One problem per code, on one CPU thread: the result does not depend on a seed, rank or device. A
    code without a text keeps its initial margin.

    Args: code points of N texts, has_code [N, C] bool, and weights [N] of the texts, above 0.
    """
    # Seconds of import that only a fit needs.
    import scipy.sparse
    from sklearn.svm import LinearSVC
    from threadpoolctl import threadpool_limits  # scikit-learn's own

    with torch.device("cpu"):
        reader = LinearHead(1, head.options).float()
        parts = [texts[i : i + TEXTS_AT_ONCE] for i in range(0, len(texts), TEXTS_AT_ONCE)]
        batches = [padded_texts(list(part)) for part in parts]
        rows = [scipy.sparse.csr_matrix(reader.features(**batch).numpy()) for batch in batches]
    features = scipy.sparse.vstack(rows).tocsr().astype(np.float64)
    weight, bias = np.zeros(head.weight.shape), np.full(len(head.bias), FIRST_MARGIN)
    for code in np.flatnonzero(has_code.any(0)).tolist():
        truth = has_code[:, code]
        if truth.all():
            bias[code] = -FIRST_MARGIN  # all texts have the code
            continue
        svm = LinearSVC(C=head.options.cost, dual=False, tol=TOLERANCE, max_iter=MOST_ITERATIONS)
        with threadpool_limits(1):  # sums of several threads differ in the last bits
            svm.fit(features, truth, weights)
        weight[code], bias[code] = svm.coef_[0], svm.intercept_[0]
    head.weight.copy_(torch.from_numpy(weight))
    head.bias.copy_(torch.from_numpy(bias))


@torch.no_grad()
def describe(head: LinearHead, recipe: Mapping[str, Any], has_text: np.ndarray) -> None:
    """Set weights of codes without a text (has_text [C] bool) to their descriptions' features."""
    clean = TextOptions.from_recipe(recipe)
    texts = [clean(text) for text in recipe["code_book"]["descriptions"]]
    codes = [code for code, text in enumerate(texts) if text and not has_text[code]]
    for start in range(0, len(codes), TEXTS_AT_ONCE):
        some = codes[start : start + TEXTS_AT_ONCE]
        batch = padded_texts([encode(texts[code], clean.max_length) for code in some])
        head.weight[some] = head.features(**batch)
        head.bias[some] = -UNLIKE
