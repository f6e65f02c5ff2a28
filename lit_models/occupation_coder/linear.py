"""A linear support vector machine as flat head: one margin per code from hashed n-grams.

On a few thousand strings it codes better than a head that learns its features. Its loss is convex,
so that the seed hardly matters.

Shapes: B batch, S characters, P positions, G n-grams, C codes, F features.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_models.occupation_coder.ngrams import SALT_SHIFT, frame, mix, ngram_keys

SALT = 1 << 20  # other hashes than the rows of the encoder's tables
SIGN_BIT = 50  # of a mixed key; the column is made of all its bits
LOGIT_PER_MARGIN = 8.0  # margins lie around -1 and 1, far too near for a sigmoid
RATE = 3.0  # the weights must travel further than those of a network, in as many steps
FIRST_MARGIN = -1.0  # of every code: few codes fit a text


@dataclass
class LinearOptions:
    """The linear head's features and how strongly it is regularised.

    Args:
        ngram_sizes: lengths of its character n-grams.
        num_features: columns that the n-grams are hashed to.
        penalty: weight of half the squared norm of the weights beside a record's loss; 1 / (C x N)
            for N weighted records is what C is to an SVM.
    """

    ngram_sizes: Sequence[int] = (2, 3, 4, 5)
    num_features: int = 4096
    penalty: float = 3e-4

    def __post_init__(self) -> None:
        if not self.ngram_sizes or min(self.ngram_sizes) < 1:
            raise ValueError(
                "linear.ngram_sizes must be one or more numbers from 1, got "
                f"{list(self.ngram_sizes)}."
            )
        if self.num_features < 1:
            raise ValueError(f"linear.num_features must be at least 1, got {self.num_features}.")
        if self.penalty < 0:
            raise ValueError(f"linear.penalty must be 0 or more, got {self.penalty}.")


class LinearHead(nn.Module):
    """One logit per code, linear in the text's n-grams; it needs no encoder.

    N-grams are hashed to signed columns: texts keep their similarities but for noise of the order
    of 1 / sqrt(F), and the table of weights is dense.
    """

    def __init__(self, num_codes: int, options: LinearOptions) -> None:
        super().__init__()
        self.options = options
        self.sizes = tuple(options.ngram_sizes)
        self.weight = nn.Parameter(torch.zeros(num_codes, options.num_features))
        self.bias = nn.Parameter(torch.full((num_codes,), FIRST_MARGIN / RATE))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits [B, C]. Args: as in `Encoder.forward`."""
        features = self.features(input_ids, attention_mask)
        return LOGIT_PER_MARGIN * RATE * F.linear(features, self.weight, self.bias)

    @torch.no_grad()
    def features(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Texts as signed counts of n-grams, of length 1 [B, F]."""
        framed_ids, lengths = frame(input_ids, attention_mask)
        keys, inside = ngram_keys(framed_ids, lengths, self.sizes)
        mixed = mix(keys + (SALT << SALT_SHIFT)).flatten(1)  # [B, P x G]
        sign = 1 - 2 * ((mixed >> SIGN_BIT) & 1)
        counts = self.weight.new_zeros(len(mixed), self.options.num_features)
        signed = (sign * inside.flatten(1)).to(counts.dtype)
        counts = counts.scatter_add(1, mixed % self.options.num_features, signed)
        return F.normalize(counts, dim=1)

    def penalty(self) -> Tensor:
        """What the weights add to the loss of every record []."""
        return 0.5 * self.options.penalty * (RATE * self.weight).square().sum()


def hinge(logits: Tensor, has_code: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Squared hinge loss of the margins, summed over the code book [B].

    Args:
        logits: of a LinearHead [B, C].
        has_code: [B, C] bool.
        class_weights: weight of each code's positive term [C].
    """
    margins = logits / LOGIT_PER_MARGIN
    losses = torch.where(has_code, 1 - margins, 1 + margins).relu().square()
    if class_weights is not None:
        losses = torch.where(has_code, class_weights * losses, losses)
    return losses.sum(1)
