"""The reconstructor: words in, the activation that they tell of out.

Shapes: B texts, t words, D features.
"""

import torch
from torch import Tensor, nn

from lit_models.causal_lm.pretrained import Network
from lit_models.consistency_lens.hooks import output_edited
from lit_models.consistency_lens.reading import read


class Reconstructor(nn.Module):
    """The subject cut at its layer, read at the last word, and a linear map that begins as the
    identity.

    Args:
        network: the lowest blocks of a copy of the subject; the last one is read.
        begin_id: token whose embedding the start begins from.
        reads_backwards: read the words from the last to the first.
        gives_current_token: read the document's word at the activation's position, too, before
            the others.
    """

    def __init__(
        self, network: Network, begin_id: int, reads_backwards: bool, gives_current_token: bool
    ) -> None:
        super().__init__()
        self.network, self.reads_backwards = network, reads_backwards
        self.gives_current_token = gives_current_token
        with torch.no_grad():
            start = network.embedding(torch.tensor([begin_id]))
        self.start = nn.Parameter(start.clone())  # [1, D]
        self.map = nn.Linear(start.shape[1], start.shape[1])
        nn.init.eye_(self.map.weight)
        nn.init.zeros_(self.map.bias)

    def forward(self, words: Tensor, current: Tensor) -> Tensor:
        """Return the rebuilt activations [B, D].

        Args:
            words: [B, t, D], embeddings of the subject.
            current: [B] int64, the word at the position; read only with `gives_current_token`.
        """
        before = [self.start.expand(len(words), -1, -1)]
        if self.gives_current_token:
            before.append(self.network.embedding(current[:, None]))
        found: list[Tensor] = []

        def keep(output: Tensor) -> Tensor:
            found.append(output[:, -1])
            return output

        ordered = words.flip(1) if self.reads_backwards else words
        with output_edited(self.network.blocks()[-1], keep):
            read(self.network, None, torch.cat([*before, ordered], dim=1))
        return self.map(found[0])
