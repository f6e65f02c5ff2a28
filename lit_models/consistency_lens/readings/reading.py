"""Readings of activations, and of the tokens of a text.

Shapes: B activations, D features, k readings of each, t words, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.text.prompts import prompt_tokens
from lit_models.consistency_lens.layers import index_of, of_layer, rows_of
from lit_models.consistency_lens.lens import Explanation, Lens
from lit_models.training.dropout import mixed
from lit_models.training.metrics import evaluating, in_float32

if TYPE_CHECKING:
    from lit_models.consistency_lens.module import LitConsistencyLens

DRAW = 4  # key of what is drawn; those before it are of `controls`
AT_ONCE = 64  # activations


def best_reading(
    lens: Lens, activation: Tensor, key: Tensor, number: int, layer: Tensor | None = None
) -> Explanation:
    """Return of each activation [B, D], of layers [B], the one of `number` explanations that
    rebuilds it best: of the surest words, which win where others are no better, and of draws keyed
    by `key` [B]."""
    draws = range(number - 1)
    keys = [None, *(mixed(key, DRAW + draw) for draw in draws)]
    said = [lens.verbalizer.explain(activation, one, layer=layer) for one in keys]
    if not draws:
        return said[0]
    rebuilt = [lens.reconstructor(one.embeddings, layer) for one in said]
    errors = torch.stack([(in_float32(r) - activation).square().sum(-1) for r in rebuilt])  # [k, B]
    best, rows = errors.argmin(0), torch.arange(len(activation), device=activation.device)
    return Explanation(*(torch.stack(each)[best, rows] for each in zip(*said, strict=True)))


def worth(
    lens: Lens, true: Tensor, said: Explanation, layer: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return confidence, cosine and fve [B] of what is said of activations, as in `Reading`."""
    chosen = said.logits.log_softmax(-1).gather(2, said.token_ids[..., None])
    one, rebuilt = true.double(), lens.reconstructor(said.embeddings, layer).double()
    mean = of_layer(lens.mean, layer).double()
    error, spread = ((one - guess).square().sum(-1) for guess in (rebuilt, mean))
    return chosen.mean((1, 2)).exp(), F.cosine_similarity(rebuilt, one), 1 - error / spread


@dataclass(frozen=True)
class Reading:
    """What a lens says of the activation at one token of a text.

    Args:
        position: of the token, from 0; one that begins every document is counted.
        token: its text.
        explanation: the words.
        confidence: geometric mean of the words' probabilities, 0 to 1.
        cosine: of the angle between the rebuilt activation and the true one.
        fve: 1 - squared error / squared distance from the training mean, for this one alone.
        layer: of the subject.
    """

    position: int
    token: str
    explanation: str
    confidence: float
    cosine: float
    fve: float
    layer: int


@torch.no_grad()
def readings_of(
    module: "LitConsistencyLens",
    texts: Sequence[str],
    position: int | None,
    best_of: int,
    layer: int | None,
) -> list[list[Reading]]:
    """As `LitConsistencyLens.readings`."""
    if best_of < 1:
        raise ValueError(f"best_of must be 1 or more, got {best_of}: 1 takes the surest words.")
    found, lens, tokenizer, layers = [], module.lens, module.tokenizer, module.layers
    asked = range(len(layers)) if layer is None else [index_of(layers, layer)]
    with evaluating(module):
        for text, ids in zip(texts, prompt_tokens(tokenizer, texts), strict=True):
            length = len(ids)
            if position is not None and not -length <= position < length:
                raise ValueError(
                    f"position {position} is none of the {length} tokens of {text[:40]!r}; give "
                    f"one from 0 to {length - 1} (or from the end, -1 to {-length}), or None for "
                    "all of them."
                )
            places = range(length) if position is None else [position % length]
            hidden = lens.subject.of_layers(torch.tensor([ids], device=module.device))
            of_text: list[Reading] = []
            chunks = torch.tensor(places, device=module.device).split(AT_ONCE)
            for place, index in product(chunks, asked):
                true = hidden[index][0, place].to(lens.mean.dtype)  # [B, D]
                rows_layer = rows_of(index, len(place), len(layers), module.device)
                said = best_reading(lens, true, place, best_of, rows_layer)
                columns = (place, said.token_ids, *worth(lens, true, said, rows_layer))
                rows = zip(*map(Tensor.tolist, columns), strict=True)
                of_text += [
                    Reading(
                        at,
                        tokenizer.decode_continuation([ids[at]], skip_special_tokens=False),
                        tokenizer.decode(words),
                        *(confidence, cosine, fve, layers[index]),
                    )
                    for at, words, confidence, cosine, fve in rows
                ]
            found.append(sorted(of_text, key=lambda one: one.position))  # layers ascend
    return found
