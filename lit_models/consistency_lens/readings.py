"""Readings of activations: a lens's explanations and their quality.

Shapes: B activations, D features, k explanations of each, t words.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_models.consistency_lens.layers import of_layer
from lit_models.consistency_lens.lens import Explanation, Lens
from lit_models.training.dropout import mixed
from lit_models.training.metrics import in_float32

DRAW = 4  # first key of random draws; `controls` uses the lower keys
AT_ONCE = 64  # activations per pass


def best_reading(
    lens: Lens, activation: Tensor, key: Tensor, number: int, layer: Tensor | None = None
) -> Explanation:
    """Return for each activation [B, D] of layers [B] the one of `number` explanations that
    rebuilds it best: the most probable words, which win ties, and random draws keyed by `key` [B].
    """
    draws = range(number - 1)
    keys = [None, *(mixed(key, DRAW + draw) for draw in draws)]
    drafts = [lens.verbalizer.explain(activation, one, layer=layer) for one in keys]
    if not draws:
        return drafts[0]
    rebuilt = [lens.reconstructor(one.embeddings, layer) for one in drafts]
    errors = torch.stack([(in_float32(r) - activation).square().sum(-1) for r in rebuilt])  # [k, B]
    best, rows = errors.argmin(0), torch.arange(len(activation), device=activation.device)
    return Explanation(*(torch.stack(each)[best, rows] for each in zip(*drafts, strict=True)))


def worth(
    lens: Lens, true: Tensor, explanation: Explanation, layer: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return confidence, cosine and fve [B] of explanations, as in `Reading`."""
    chosen = explanation.logits.log_softmax(-1).gather(2, explanation.token_ids[..., None])
    one, rebuilt = true.double(), lens.reconstructor(explanation.embeddings, layer).double()
    mean = of_layer(lens.mean, layer).double()
    error, spread = ((one - guess).square().sum(-1) for guess in (rebuilt, mean))
    return chosen.mean((1, 2)).exp(), F.cosine_similarity(rebuilt, one), 1 - error / spread


@dataclass(frozen=True)
class Reading:
    """Explanation of the activation at one token of a text.

    Args:
        position: of the token, from 0; a begin-of-text token counts.
        token: its text.
        explanation: the words.
        confidence: geometric mean of the words' probabilities, 0 to 1.
        cosine: similarity of the rebuilt and the true activation.
        fve: 1 - squared error / squared distance from the training mean, of this activation.
        layer: of the subject.
    """

    position: int
    token: str
    explanation: str
    confidence: float
    cosine: float
    fve: float
    layer: int
