"""The reconstructor: words in, the activation that they tell of out.

Shapes: B texts, t words, D features.
"""

import torch
from torch import Tensor, nn

from lit_models.causal_lm.pretrained import Network
from lit_models.consistency_lens.copies import copy_of, freeze_unused
from lit_models.consistency_lens.hooks import output_edited
from lit_models.consistency_lens.reading import read


class Reconstructor(nn.Module):
    """The subject cut at its layer, read at the last word, and a linear map that begins as the
    identity.

    Args:
        network: of the subject.
        layer: index of the last block that is kept.
        begin_id: token whose embedding the start begins from.
        reads_backwards: read the words from the last to the first.
    """

    def __init__(self, network: Network, layer: int, begin_id: int, reads_backwards: bool) -> None:
        super().__init__()
        self.network, self.reads_backwards = copy_of(network, layer + 1), reads_backwards
        table = self.network.embedding.weight.detach()
        self.start = nn.Parameter(table[[begin_id]].clone())  # [1, D]
        self.map = nn.Linear(table.shape[1], table.shape[1])
        nn.init.eye_(self.map.weight)
        nn.init.zeros_(self.map.bias)
        freeze_unused(self, lambda: self(table.new_zeros(1, 2, table.shape[1])))

    def forward(self, words: Tensor) -> Tensor:
        """Return the rebuilt activations [B, D].

        Args:
            words: [B, t, D], embeddings of the subject.
        """
        if self.reads_backwards:
            words = words.flip(1)
        found: list[Tensor] = []

        def keep(output: Tensor) -> Tensor:
            found.append(output[:, -1])
            return output

        with output_edited(self.network.blocks()[-1], keep):
            read(self.network, None, torch.cat([self.start.expand(len(words), -1, -1), words], 1))
        return self.map(found[0])
