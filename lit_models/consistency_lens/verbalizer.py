"""The verbalizer: one activation in, a few words out.

Shapes: B activations, D features, L blocks, P positions of the prompt, M maps, t words,
V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from lit_models.causal_lm.pretrained import Network
from lit_models.consistency_lens.copies import embedded
from lit_models.consistency_lens.hooks import inputs_edited
from lit_models.consistency_lens.loss import precise
from lit_models.consistency_lens.reading import Continuation, read
from lit_models.consistency_lens.sampling import gumbel_noise, straight_through

NEVER = -1e4  # logit of what is no word: finite, so that products with probability 0 are 0

Injection = Literal["per_block", "embedding", "added"]


class Explanation(NamedTuple):
    """Words for activations.

    token_ids [B, t] int64; embeddings [B, t, D], through which gradients pass; logits [B, t, V]
    float32, from which the words were chosen.
    """

    token_ids: Tensor
    embeddings: Tensor
    logits: Tensor


class Verbalizer(nn.Module):
    """A copy of the subject that reads a prompt with the activation in it, and goes on in words.

    The prompt is some learned positions and an empty one, the marker. The activation enters
    through linear maps that begin as the identity.

    Args:
        network: a copy of the subject, or the subject itself.
        is_word: [V] bool, tokens that an explanation may hold.
        begin_id: token whose embedding the prompt starts from.
        num_words: t.
        num_prompt: learned positions before the marker.
        injection: per_block replaces what is at the marker at the input of every block, through a
            map for each; embedding is the marker's embedding; added is added to the embedding of
            every position of the prompt, through a map for each.
    """

    def __init__(
        self,
        network: Network,
        is_word: Tensor,
        begin_id: int,
        num_words: int,
        num_prompt: int,
        injection: Injection = "per_block",
    ) -> None:
        super().__init__()
        self.network, self.num_words, self.injection = network, num_words, injection
        with torch.no_grad():
            start = network.embedding(torch.tensor([begin_id] * num_prompt))
        self.prompt = nn.Parameter(start.clone())  # [P - 1, D]
        width, num_layers = start.shape[1], len(network.blocks())
        number = {"per_block": num_layers, "embedding": 1, "added": num_prompt + 1}[injection]
        self.map_weight = nn.Parameter(torch.eye(width).repeat(number, 1, 1))  # [M, D, D]
        self.map_bias = nn.Parameter(torch.zeros(number, width))
        self.register_buffer("is_word", is_word, persistent=False)

    def forward(self, activation: Tensor, token_ids: Tensor) -> Tensor:
        """Return the logits [B, t, V] of each word of a given text, after the words before it.

        Args:
            activation: [B, D].
            token_ids: [B, t] int64.
        """
        given = self.network.embedding(token_ids[:, :-1])
        start = self._prompt(activation, len(activation))
        with self._injected(activation):
            hidden = read(self.network, None, torch.cat([start, given], dim=1))
        return self._logits(hidden[:, start.shape[1] - 1 :])

    def explain(
        self,
        activation: Tensor | None,
        noise_key: Tensor | None = None,
        temperature: float = 1.0,
        rows: int = 1,
    ) -> Explanation:
        """Return an explanation of each activation.

        Args:
            activation: [B, D]; none leaves its place in the prompt empty, as a control.
            noise_key: [B] int64, of what is drawn; none takes the most probable word each time.
            temperature: of the gradient, see `straight_through`.
            rows: B where there is no activation.
        """
        reader = Continuation(self.network)
        rows = rows if activation is None else len(activation)
        with self._injected(activation):
            hidden = reader.read(self._prompt(activation, rows))
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        while True:
            logits = self._logits(hidden[:, -1])  # [B, V]
            noise = None
            if noise_key is not None:
                noise = gumbel_noise(noise_key, len(found), logits.shape[-1])
            word = straight_through(logits, noise, temperature)
            token_ids = word.argmax(-1)
            if word.requires_grad:
                embedding = embedded(self.network, word)
            else:  # exact, in any precision
                embedding = self.network.embedding(token_ids)
            found.append((token_ids, embedding, logits))
            if len(found) == self.num_words:
                return Explanation(*(torch.stack(each, 1) for each in zip(*found, strict=True)))
            hidden = reader.read(embedding[:, None])

    def _prompt(self, activation: Tensor | None, rows: int) -> Tensor:
        """[B, P, D]; the marker stays empty where the activation enters the blocks, or never."""
        marker = self.prompt.new_zeros(1, self.prompt.shape[1])
        prompt = torch.cat([self.prompt, marker]).expand(rows, -1, -1)
        if activation is None or self.injection == "per_block":
            return prompt
        mapped = self._mapped(activation).transpose(0, 1).to(prompt.dtype)  # [B, M, D]
        if self.injection == "added":
            return prompt + mapped
        return torch.cat([prompt[:, :-1], mapped], dim=1)

    def _mapped(self, activation: Tensor) -> Tensor:
        """[M, B, D]."""
        mapped = torch.einsum("bd,med->mbe", activation, self.map_weight)
        return mapped + self.map_bias[:, None]

    def _logits(self, hidden: Tensor) -> Tensor:
        return only_words(self.network.head(hidden), self.is_word)

    @contextmanager
    def _injected(self, activation: Tensor | None) -> Iterator[None]:
        if activation is None or self.injection != "per_block":
            yield
            return
        mapped = self._mapped(activation)
        place = len(self.prompt)

        def edit_of(layer: int):  # type: ignore[no-untyped-def]
            def edit(hidden: Tensor) -> Tensor:
                entered = mapped[layer, :, None].to(hidden.dtype)
                return torch.cat([hidden[:, :place], entered, hidden[:, place + 1 :]], dim=1)

            return edit

        with inputs_edited(self.network.blocks(), [edit_of(i) for i in range(len(mapped))]):
            yield


def only_words(logits: Tensor, is_word: Tensor) -> Tensor:
    """Return logits [..., V] in float32 (or better) with which only words [V] are ever chosen."""
    return precise(logits).masked_fill(~is_word, NEVER)
