"""How probable a model finds given continuations: sums of log-probabilities.

Shapes: R rows, T positions, D hidden, V vocabulary, N labels of all rows, B samples, C choices.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from datamodules.core.batches import IGNORED, ChoiceBatch
from lit_models.causal_lm.pretrained import Network

POSITIONS_AT_ONCE = 1024


class Scores(NamedTuple):
    """What a model says of each choice.

    Args:
        scores: [B, C] float64, natural logarithm of the probability of the continuation after its
            prompt; NaN where the sample has fewer choices.
        num_tokens: [B, C] int64, tokens of the continuation; 0 where there is none.
        is_greedy: [B, C] bool, whether each of its tokens is the most probable one.
    """

    scores: Tensor
    num_tokens: Tensor
    is_greedy: Tensor


@torch.no_grad()
def score(network: Network, batch: ChoiceBatch) -> Scores:
    """Return the scores of all choices of a batch.

    A continuation's tokens are the labels of its document; the datamodule decides which they are,
    see `datamodules.text.prompts.joint_tokens`.

    Args:
        network: in eval mode.
        batch: documents of prompt and continuation.
    """
    inputs = [batch[name] for name in ("input_ids", "position_ids", "document_ids")]
    hidden = network(*inputs, batch["has_single_documents"])
    is_label = batch["labels"] != IGNORED  # [R, T]
    labels, documents = batch["labels"][is_label], batch["document_ids"][is_label]
    nats, best = _log_probabilities(network, hidden[is_label], labels)
    num_documents = int(batch["document_ids"].max()) + 1
    sums, counts, hits = (
        torch.zeros(num_documents, dtype=torch.float64, device=nats.device) for _ in range(3)
    )
    sums.index_add_(0, documents, nats)
    counts.index_add_(0, documents, torch.ones_like(nats))
    hits.index_add_(0, documents, best.double())
    choices = batch["choice_documents"]
    there, places = choices >= 0, choices.clamp(min=0)
    return Scores(
        sums[places].masked_fill(~there, torch.nan),
        (counts[places] * there).long(),
        (hits == counts)[places] & there,
    )


def _log_probabilities(network: Network, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each label [N] float64, and whether it is the greatest."""
    nats, best = [], []
    pairs = zip(hidden.split(POSITIONS_AT_ONCE), labels.split(POSITIONS_AT_ONCE), strict=True)
    for some, wanted in pairs:
        logits: Tensor = network.head(some)  # type: ignore[operator]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        own = logits.gather(1, wanted[:, None])[:, 0]
        nats.append(own.double() - logits.logsumexp(1).double())
        best.append(logits.argmax(1) == wanted)
    return torch.cat(nats), torch.cat(best)
