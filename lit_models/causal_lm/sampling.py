"""The next token of each row, from its logits and a number that belongs to its prompt.

Shapes: R rows, V vocabulary.
"""

import torch
from torch import Tensor


def draw(
    logits: Tensor, uniforms: Tensor, temperature: float, top_k: int | None, top_p: float
) -> Tensor:
    """Return one token per row [R] int64: the most probable at temperature 0, else a drawn one.

    The distribution and its sums are float64, and a token is the place of its row's number in
    them: a draw depends on nothing but its own row.

    Args:
        logits: [R, V].
        uniforms: [R] float64 in [0, 1), of each row.
        temperature: divides the logits.
        top_k: draw among the most probable tokens only; none for all.
        top_p: draw among the fewest tokens with this share of the probability.

    Raises:
        RuntimeError: a logit is not finite.
    """
    if not torch.isfinite(logits).all():
        raise RuntimeError(
            "the network returns logits that are not finite; its weights are damaged, or the "
            "precision is too low for them: try trainer.precision=32-true."
        )
    if temperature == 0:
        return logits.argmax(1)
    probabilities, tokens = filtered(logits, temperature, top_k, top_p)
    sums = probabilities.cumsum(1)  # [R, V]
    total = sums[:, -1:]
    places = torch.searchsorted(sums, uniforms[:, None] * total, right=True)
    # Rounding may put a number at the very end, where tokens of probability 0 may stand.
    order = torch.arange(logits.shape[1], device=logits.device)
    last = (order * (probabilities > 0)).amax(1, keepdim=True)
    places = torch.minimum(places, last)
    return (places if tokens is None else tokens.gather(1, places))[:, 0]


def filtered(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float
) -> tuple[Tensor, Tensor | None]:
    """Return what is drawn from: probabilities [R, V] float64, 0 for what is left out, and the
    tokens that they belong to, the most probable first; none where they stand in their order.

    `top_p` counts shares of what `top_k` leaves. Equal tokens are taken in their order.

    Source: Fan et al. 2018 (top-k); Holtzman et al. 2020, section 3.1 (nucleus).
    """
    probabilities = (logits.double() / temperature).softmax(1)
    if top_k is None and top_p == 1:
        return probabilities, None
    probabilities, tokens = probabilities.sort(dim=1, descending=True, stable=True)
    if top_k is not None:
        probabilities[:, top_k:] = 0
    before = probabilities.cumsum(1) - probabilities  # share of the tokens before each
    total = probabilities.sum(1, keepdim=True)
    return probabilities * (before < top_p * total), tokens
