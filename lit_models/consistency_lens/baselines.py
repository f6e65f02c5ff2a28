"""Baselines of a lens: activations guessed from statistics, and words by the subject's own head.

Shapes: B activations, R documents, T tokens, D features, t words, V vocabulary.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from datamodules.activations.store import ActivationStatistics, one_thread
from datamodules.core.batches import ActivationBatch
from lit_models.consistency_lens.lens import Lens
from lit_models.consistency_lens.subject import Subject, output_edited, outputs_of, read

NUM_DOCUMENTS = 1024  # of the training part, at all of whose tokens the map is fitted
RIDGE = 1e-4  # of each input's mean square


class Baselines(nn.Module):
    """Guesses of a layer's activation from the statistics of the training part of the data at
    hand."""

    mean: Tensor
    unit_mean: Tensor
    token_means: Tensor
    token_row: Tensor
    position_means: Tensor
    components: Tensor
    tuned: Tensor

    def __init__(self, statistics: ActivationStatistics, vocab_size: int) -> None:
        super().__init__()
        row = torch.full((vocab_size,), len(statistics.token_ids))
        row[torch.from_numpy(statistics.token_ids)] = torch.arange(len(statistics.token_ids))
        self.register_buffer("token_row", row, persistent=False)
        self.register_buffer("tuned", None, persistent=False)  # of `tuned_map`, for a test
        for name in ("mean", "unit_mean", "token_means", "position_means", "components"):
            table = torch.from_numpy(getattr(statistics, name)).float()
            self.register_buffer(name, table, persistent=False)

    def of_token(self, token: Tensor, mean: Tensor) -> Tensor:
        """Return [B, D], the mean activation at tokens [B]; `mean` [D] or [B, D] where unseen."""
        return _known(self.token_means, self.token_row[token], mean)

    def of_position(self, position: Tensor, mean: Tensor) -> Tensor:
        """Return [B, D], the mean activation at positions [B]; `mean` as `of_token`."""
        return _known(self.position_means, position, mean)

    def projected(self, activation: Tensor, number: int) -> Tensor:
        """Return activations [B, D] projected on the first principal components."""
        components = self.components[:number]
        return self.mean + (activation - self.mean) @ components.T @ components


def _known(table: Tensor, row: Tensor, mean: Tensor) -> Tensor:
    """Return the rows [B] of a table [n, D]; the mean for those behind its end."""
    found = table[row.clamp(max=len(table) - 1)]
    return found.where((row < len(table))[:, None], mean.to(table))


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
            ids = batch["input_ids"].to(device)
            found = outputs_of([own, blocks[-1]], partial(read, subject.network, ids))
            places = torch.arange(ids.shape[1], device=device)
            is_token = places < batch["lengths"].to(device)[:, None]
            inputs, outputs = (x[is_token].cpu().double() for x in found)
            inputs = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
            squares += inputs.T @ inputs
            products += inputs.T @ outputs
        ridge = RIDGE * squares.diag().diag()
        weights = torch.linalg.solve(squares + ridge, products + ridge[:, :-1])
    return weights.to(subject.network.embedding.weight)
