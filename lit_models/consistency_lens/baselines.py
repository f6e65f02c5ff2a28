"""Baselines of a lens: activations from statistics, and words by the subject's own head.

Shapes: B activations, D features, t words, V vocabulary.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from datamodules.activations.store import ActivationStatistics, one_thread
from datamodules.core.batches import ActivationBatch
from lit_models.consistency_lens.lens import Lens
from lit_models.consistency_lens.subject import Subject, output_edited, outputs_of, read

NUM_DOCUMENTS = 1024  # of the training part; the map is fitted on all their tokens
RIDGE = 1e-4  # relative to each input's mean square


class Baselines(nn.Module):
    """Estimates of a layer's activation from statistics of the current data's training part."""

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
        self.register_buffer("tuned", None, persistent=False)  # `tuned_map`, set in a test
        for name in ("mean", "unit_mean", "token_means", "position_means", "components"):
            table = torch.from_numpy(getattr(statistics, name)).float()
            self.register_buffer(name, table, persistent=False)

    def of_token(self, token: Tensor, mean: Tensor) -> Tensor:
        """Return the mean activations [B, D] of tokens [B]; `mean` [D] or [B, D] if unseen."""
        return _known(self.token_means, self.token_row[token], mean)

    def of_position(self, position: Tensor, mean: Tensor) -> Tensor:
        """Return the mean activations [B, D] at positions [B]; `mean` as in `of_token`."""
        return _known(self.position_means, position, mean)

    def projected(self, activation: Tensor, number: int) -> Tensor:
        """Return activations [B, D] projected on the first `number` principal components."""
        components = self.components[:number]
        return self.mean + (activation - self.mean) @ components.T @ components


def _known(table: Tensor, row: Tensor, mean: Tensor) -> Tensor:
    """Return rows of a table [n, D] by index [B]; the mean for indices from n on."""
    found = table[row.clamp(max=len(table) - 1)]
    return found.where((row < len(table))[:, None], mean.to(table))


def unembedded_words(lens: Lens, activation: Tensor, tuned: Tensor | None = None) -> Tensor:
    """Return the most probable words by the subject's head [B, t] int64, likeliest first.

    Args:
        activation: [B, D], used as output of the last block.
        tuned: [D + 1, D] from `tuned_map`; `None` uses the activation unchanged.

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
    """Return weights and bias [D + 1, D] of the affine map from the output of the subject's layer
    `index` to that of the last block, with the least squared error over all tokens.

    A ridge regression towards the identity, in float64 on one thread; the source minimises the KL
    of the words by gradient descent instead.
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
