"""Words by the subject's final norm and head, of an activation as it is or after an affine map.

Shapes: B activations, R documents, T tokens, D features, t words.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, arange

from datamodules.activations.store import one_thread
from datamodules.core.batches import ActivationBatch
from lit_models.consistency_lens.lens import Lens
from lit_models.consistency_lens.subject import Subject, output_edited, output_of, read

NUM_DOCUMENTS = 1024  # of the training part, at all of whose tokens the map is fitted
RIDGE = 1e-4  # of each input's mean square


def unembedded_words(lens: Lens, activation: Tensor, tuned: Tensor | None = None) -> Tensor:
    """Return [B, t] int64: the words that the subject's head finds likeliest, the first one first.

    Args:
        activation: [B, D], taken for the output of the last block.
        tuned: [D + 1, D] of `tuned_map`; without it the activation is read as it is.

    Source: the logit lens (nostalgebraist 2020); Belrose et al. 2023, "Eliciting latent predictions
    from transformers with the tuned lens", sections 2 and 3.
    """
    network = lens.subject.network
    hidden = activation if tuned is None else activation @ tuned[:-1] + tuned[-1]
    ids = torch.full((len(hidden), 1), lens.begin_id, device=hidden.device)
    with output_edited(network.blocks()[-1], lambda output: hidden[:, None].to(output.dtype)):
        logits = network.head(read(network, ids))[:, 0].float()
    logits = logits.masked_fill(~lens.verbalizer.is_word, -torch.inf)
    return logits.topk(lens.verbalizer.num_words).indices


def tuned_map(subject: Subject, batches: Iterable[ActivationBatch], index: int = -1) -> Tensor:
    """Return [D + 1, D]: weights and constant of the affine map from the output of the layer of an
    index to that of the last block with the least squared error, over all tokens of the documents.

    A ridge regression towards the identity, in float64 by one thread; the source descends the KL of
    the words instead.
    """
    blocks, width = subject.network.blocks(), subject.network.embedding.weight.shape[1]
    own = subject.layer_blocks[index]
    squares = torch.zeros(width + 1, width + 1, dtype=torch.float64, device="cpu")
    products = torch.zeros(width + 1, width, dtype=torch.float64, device="cpu")
    device = subject.network.embedding.weight.device
    with one_thread(), torch.no_grad():
        for batch in batches:
            ids, found = batch["input_ids"].to(device), list[Tensor]()

            def both(ids: Tensor = ids, found: list[Tensor] = found) -> Tensor:
                found.append(output_of(own, lambda: read(subject.network, ids)))
                return found[0]

            last = output_of(blocks[-1], both)  # [R, T, D]
            is_token = arange(ids.shape[1], device=device) < batch["lengths"].to(device)[:, None]
            inputs, outputs = (x[is_token].cpu().double() for x in (found[0], last))
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
            squares += inputs.T @ inputs
            products += inputs.T @ outputs
        ridge = RIDGE * squares.diag().diag()
        weights = torch.linalg.solve(squares + ridge, products + ridge[:, :-1])
    return weights.to(subject.network.embedding.weight)
