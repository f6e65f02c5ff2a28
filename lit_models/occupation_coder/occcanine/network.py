"""Encoder, decoder and flat head in the layout of OccCANINE.

Source: Dahl, Johansen and Vedel 2024, "Breaking the HISCO Barrier".
Shapes: B batch, S characters, P positions, D hidden, H heads, T target positions, V symbols, C
codes, O hypotheses per record.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_models.blocks import DecoderLayer
from lit_models.occupation_coder.encoders import CanineEncoder, frame
from lit_models.occupation_coder.network import END, PAD, BlockDecoder, CodeTrie, Memory
from lit_models.training.metrics import in_float32

CANINE_HEADS = 12  # of canine-s; not visible in the shapes of its weights
SEPARATOR = "[SEP]"  # five characters between language and text
OTHER_NAMES = {"de": "ge", "sv": "se", "el": "gr"}  # our names -> OccCANINE's names
LANGUAGE_SIZE = 8  # maximum length of a language's name
FLAT, NEW_LOGIT = "network.flat", -6.0


class OccCanineEncoder(CanineEncoder):
    """CANINE over "en[SEP]wine merchant", padded to a fixed length, without dropout.

    Position 0 of the memory is the pooled output, which only the flat head reads: CANINE pools it
    from its deep stack, so that no other position contains it. The decoder reads all other
    positions, padding included. Texts are cut to leave room for language, separator and two marks.

    Args:
        num_languages: number of languages, named by `name_languages`.
        positions: P of every text, a multiple of 4.
        canine: sizes of CANINE, see `transformers.CanineConfig`.
    """

    prefixes: Tensor  # [languages, LANGUAGE_SIZE + 5] code points, right-padded with 0

    def __init__(self, num_languages: int, canine: dict[str, int], positions: int = 128) -> None:
        nn.Module.__init__(self)  # there is no folder to read
        from transformers import CanineConfig, CanineModel  # seconds of import

        no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        sizes: dict[str, Any] = {"num_attention_heads": CANINE_HEADS, **canine, **no_dropout}
        config = CanineConfig(**sizes)
        self.canine = CanineModel(config)
        self.width, self.positions = config.hidden_size, positions
        self.register_buffer("prefixes", torch.zeros(num_languages, 0).long(), persistent=False)

    def name_languages(self, names: Sequence[str]) -> None:
        size = LANGUAGE_SIZE + len(SEPARATOR)
        texts = [f"{OTHER_NAMES.get(name, name)}{SEPARATOR}".ljust(size, "\0") for name in names]
        self.prefixes = torch.tensor([list(map(ord, text)) for text in texts])

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, language_id: Tensor
    ) -> tuple[Tensor, Tensor]:
        joined = torch.cat([self.prefixes[language_id], input_ids * attention_mask], dim=1)
        order = (joined == 0).int().argsort(dim=1, stable=True)  # moves padding to the end
        joined = joined.gather(1, order)[:, : self.positions - 2]
        marks, num_pads = self.canine.config, self.positions - 2 - joined.shape[1]
        ids: Any = (joined, joined > 0, marks.bos_token_id, marks.eos_token_id, num_pads)
        padded_ids, lengths = frame(*ids)
        place = torch.arange(self.positions, device=lengths.device)
        mask = (place < lengths[:, None]).long()
        output = self.canine(input_ids=padded_ids, attention_mask=mask)
        memory = torch.cat([output.pooler_output[:, None], output.last_hidden_state], dim=1)
        is_memory = torch.arange(self.positions + 1, device=mask.device) > 0
        return memory, is_memory.expand(len(memory), -1)


class PostNormLayer(DecoderLayer):
    """Layer of `torch.nn.TransformerDecoder` with default options, and a cache of keys and values.

    Each sublayer is followed by a norm, projections have biases, the activation is ReLU. Dropout
    applies to each sublayer's output, never to attention weights.
    """

    def __init__(self, width: int, num_heads: int, feed_forward: int, dropout: float) -> None:
        nn.Module.__init__(self)  # the parent's projections have no biases
        self.num_heads = num_heads
        self.self_qkv, self.self_output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.cross_query, self.cross_kv = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.cross_output = nn.Linear(width, width)
        self.expand = nn.Linear(width, feed_forward)
        self.contract = nn.Linear(feed_forward, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        hidden: Tensor,
        memory_kv: tuple[Tensor, Tensor],
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
        rotary: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """See `lit_models.blocks.DecoderLayer.forward`."""
        mixed, kv = self.self_attention(hidden, past)
        hidden = self.norms[0](hidden + self.dropout(mixed))
        read = self.cross_attention(hidden, memory_kv, mask)
        hidden = self.norms[1](hidden + self.dropout(read))
        inner = self.contract(self.dropout(F.relu(self.expand(hidden))))
        return self.norms[2](hidden + self.dropout(inner)), kv


class OccCanineDecoder(BlockDecoder):
    """OccCANINE's decoder over the code book's trie; its flat head reads only position 0.

    Args:
        memory_width: D of the encoder and of the decoder.
        trie: the code book.
        num_layers: 0 in a flat model, whose decoder is not trained.
        num_heads: attention heads per layer.
        feed_forward: inner width of the feed-forward blocks.
        dropout: probability after embeddings and sublayers; never on attention weights.
        repeats: a code of one symbol, such as -1 of HISCO, fills its block by repeating the symbol
            instead of with end symbols.
    """

    waves: Tensor  # [T, D] sines and cosines

    def __init__(
        self,
        memory_width: int,
        trie: CodeTrie,
        num_layers: int = 3,
        num_heads: int = 8,
        feed_forward: int = 768,
        dropout: float = 0.0,
        repeats: bool = False,
    ) -> None:
        nn.Module.__init__(self)  # shares no layer with its parent
        table = trie.table
        if repeats:
            is_single = (table[:, 1:] == END).all(1, keepdim=True)
            table = torch.where(is_single, table[:, :1], table)
        self.trie = CodeTrie(table.numpy(), trie.vocab_size, trie.max_codes)
        self.symbols = nn.Embedding(trie.vocab_size, memory_width)
        self.layers = nn.ModuleList(
            PostNormLayer(memory_width, num_heads, feed_forward, dropout) for _ in range(num_layers)
        )
        self.output = nn.Linear(memory_width, trie.vocab_size)
        self.dropout = nn.Dropout(dropout)
        rates = torch.exp(torch.arange(0, memory_width, 2) * (-math.log(10000) / memory_width))
        angles = torch.arange(trie.max_codes * trie.block_size + 1)[:, None] * rates
        waves = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)
        self.register_buffer("waves", waves, persistent=False)

    def flat_head(self, memory_width: int, dropout: float) -> nn.Module:
        return PooledHead(memory_width, self.trie.num_codes, dropout)

    def _embed(self, before: Tensor, nodes: Tensor, position: Tensor) -> Tensor:
        scaled = self.symbols(before) * self.symbols.embedding_dim**0.5
        return self.dropout(scaled + self.waves[position])

    def _logits(self, hidden: Tensor, nodes: Tensor, summary: Tensor) -> Tensor:
        return in_float32(self.output(hidden))


class PooledHead(nn.Module):
    """One logit per code from position 0 of the memory."""

    def __init__(self, width: int, num_codes: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.codes, self.dropout = nn.Linear(width, num_codes), nn.Dropout(dropout)

    def forward(self, memory: Memory) -> Tensor:
        """Logits [B, C], in float32 or wider."""
        return in_float32(self.codes(self.dropout(memory.hidden[:, 0])))


def renumbered(
    weights: dict[str, Tensor], trained: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Weights with the rows for codes and symbols in the order of the code book `own`.

    Both code books are as in a recipe. A code that the trained book lacks starts with the logit
    `NEW_LOGIT`, a new symbol with the row of `PAD`.
    """

    def rows(what: str, names: tuple[str, ...], missing: int) -> None:
        place = {value: row for row, value in enumerate(trained[what])}
        chosen = [place.get(value, missing) for value in own[what]]
        for name in names:
            value, fill = weights[name], NEW_LOGIT if name.endswith("bias") else 0.0
            own_weights[name] = torch.cat([value, torch.full_like(value[:1], fill)])[chosen]

    own_weights = dict(weights)
    decoder = ("symbols.weight", "output.weight", "output.bias")
    rows("codes", tuple(f"{FLAT}.codes.{part}" for part in ("weight", "bias")), -1)
    rows("symbols", tuple(f"network.decoder.{name}" for name in decoder), PAD)
    return own_weights
