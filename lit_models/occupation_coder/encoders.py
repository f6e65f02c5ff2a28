"""Text encoders of the coder, their character n-grams, and freezing for fine-tuning.

Shapes: B batch, S characters of the longest text, P = S + 2 positions, D hidden, H heads, G sizes
of n-grams.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_models.blocks import EncoderLayer, layer_depths, positions_up_to, rotary_table
from lit_models.training.metrics import in_float32

TEXT_BEGIN, TEXT_END = 2, 3  # control characters that no cleaned text holds
SPACE = ord(" ")
SALT_SHIFT = 41  # salts occupy the bits above every key
_HASH_PRIME, _HASH_MASK = 1_000_003, (1 << 40) - 1


def frame(
    input_ids: Tensor,
    attention_mask: Tensor,
    begin: int = TEXT_BEGIN,
    end: int = TEXT_END,
    num_pads: int = 0,
) -> tuple[Tensor, Tensor]:
    """Texts between a begin and an end mark, right-padded [B, S + 2 + num_pads], and their lengths
    including the marks [B]."""
    lengths = attention_mask.sum(1) + 2
    framed = F.pad(input_ids * attention_mask, (1, 1 + num_pads))
    framed[:, 0] = begin
    return framed.scatter(1, (lengths - 1)[:, None], end), lengths


def ngram_keys(framed_ids: Tensor, lengths: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Keys of the n-grams that begin at each position [B, P, G] int64, and whether each n-gram lies
    inside its text [B, P, G] bool; G sizes in ascending order. Equal n-grams have equal keys, below
    2 ** 40. Args: texts and lengths as `frame` returns them.
    """
    positions = framed_ids.shape[1]
    padded = F.pad(framed_ids, (0, max(sizes)))
    rolling = torch.zeros_like(framed_ids)
    start = torch.arange(positions, device=framed_ids.device)
    keys, inside = [], []
    for size in range(1, max(sizes) + 1):
        rolling = rolling * _HASH_PRIME + padded[:, size - 1 : size - 1 + positions] + size
        rolling = rolling & _HASH_MASK
        if size in sizes:
            keys.append(rolling)
            inside.append(start[None, :] + size <= lengths[:, None])
    return torch.stack(keys, -1), torch.stack(inside, -1)


def spaced(framed_ids: Tensor, lengths: Tensor) -> Tensor:
    """Texts [B, P] with spaces instead of marks and padding. Args: as in `ngram_keys`."""
    place = torch.arange(framed_ids.shape[1], device=framed_ids.device)
    is_outside = (place == 0) | (place >= lengths[:, None] - 1)
    return framed_ids.masked_fill(is_outside, SPACE)


def within_words(ids: Tensor, sizes: Sequence[int]) -> Tensor:
    """Mask of the n-grams within one word and the spaces on its two sides [B, P, G] bool. Args:
    code points [B, P] with `SPACE` before, after and between words; G sizes."""
    positions = ids.shape[1]
    is_space = F.pad(ids == SPACE, (0, max(sizes)), value=True)
    spaces = F.pad(is_space.cumsum(1), (1, 0))  # before each position
    first = is_space[:, :positions]
    inside = []
    for size in sorted(set(sizes)):
        last = is_space[:, size - 1 : size - 1 + positions]
        between = spaces[:, size - 1 : size - 1 + positions] - spaces[:, 1 : positions + 1]
        is_blank = first & last if size < 3 else torch.zeros_like(first)
        inside.append((between <= 0) & ~is_blank)
    return torch.stack(inside, -1)


def mix(keys: Tensor) -> Tensor:
    """Non-negative int64 hash of each key (multiply and shift, as in splitmix)."""
    keys = (keys ^ (keys >> 30)) * -4658895280553007687
    keys = (keys ^ (keys >> 27)) * -7723592293110705685
    return (keys ^ (keys >> 31)) & 0x7FFFFFFFFFFFFFFF


CHARACTER_BUCKETS = 2048  # one each for code points below 1024; all others share the rest
NUM_HASHES = 2
CANINE_MULTIPLE, CANINE_PADS = 4, 8
BAG_SCALE = 0.2  # large against the heads' first steps, so that the bag stays nearly linear
WEIGHT_RATE = 3.0  # an n-gram's weight must change faster than its vector


class Encoder(nn.Module):
    """Base class of text encoders with memory of width D."""

    width: int

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, language_id: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Memory [B, P, D] and memory mask [B, P] bool of texts; position 0 summarizes the text.

        Args:
            input_ids: Unicode code points [B, S] int64, 0 where padded on the right.
            attention_mask: [B, S] bool, True at characters.
            language_id: [B] int64, 0 is the unknown language.
        """
        raise NotImplementedError

    def name_languages(self, names: Sequence[str]) -> None:
        """Set the languages' names, in the order of their ids, for encoders that read them."""

    def blocks(self) -> list[nn.Module]:
        """The layers from lowest to highest, for freezing and layer-wise learning rates."""
        raise NotImplementedError


class NgramTable(nn.Module):
    """Hashed embeddings of the character n-grams that begin at each position.

    Each n-gram has `NUM_HASHES` rows of one table: n-grams that share one row rarely share all.
    """

    def __init__(self, width: int, sizes: Sequence[int], num_buckets: int) -> None:
        super().__init__()
        if not sizes or min(sizes) < 1:
            raise ValueError(f"ngram_sizes must be one or more numbers from 1, got {list(sizes)}.")
        self.sizes, self.num_buckets = tuple(sizes), num_buckets
        self.rows = nn.EmbeddingBag(num_buckets, width, mode="sum")
        nn.init.normal_(self.rows.weight, std=0.1 / NUM_HASHES**0.5)

    def forward(self, row_ids: Tensor, inside: Tensor) -> Tensor:
        """Sums of n-gram vectors [B, P, D]. Args: [B, P, G], as `hashes` returns them."""
        batch, positions, _ = row_ids.shape
        weights = inside.to(self.rows.weight.dtype)
        sums = self.rows(row_ids.flatten(0, 1), per_sample_weights=weights.flatten(0, 1))
        return sums.view(batch, positions, -1)

    def hashes(self, framed_ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Table rows [B, P, G] int64, and whether each n-gram lies inside its text, bool."""
        keys, inside = ngram_keys(framed_ids, lengths, self.sizes)
        salts = torch.arange(NUM_HASHES, device=keys.device) << SALT_SHIFT
        row_ids = mix(keys[..., None] + salts) % self.num_buckets
        return row_ids.flatten(-2), inside.repeat_interleave(NUM_HASHES, -1)


class WeightedBag(nn.Module):
    """Weighted sum of a text's n-gram vectors; the learned weights are scaled to norm 1.

    They play the role of inverse document frequency in a linear model: "(deceased)" has many
    n-grams, which would drown out the word beside it if they did not weigh little.
    """

    def __init__(self, width: int, num_buckets: int) -> None:
        super().__init__()
        self.rows = nn.EmbeddingBag(num_buckets, width, mode="sum")
        self.log_weights = nn.Embedding(num_buckets, 1)
        nn.init.normal_(self.rows.weight, std=BAG_SCALE)
        nn.init.zeros_(self.log_weights.weight)

    def forward(self, row_ids: Tensor, inside: Tensor) -> Tensor:
        """Vectors [B, D]. Args: table rows [B, G], and mask of those that count [B, G] bool."""
        weights = (WEIGHT_RATE * self.log_weights(row_ids).squeeze(-1)).exp() * inside
        weights = weights / weights.square().sum(1, keepdim=True).sqrt().clamp(min=1e-6)
        table, options = self.rows.weight, {"per_sample_weights": in_float32(weights)}
        # On a GPU, PyTorch has no half-precision gradient of per_sample_weights.
        return F.embedding_bag(row_ids, in_float32(table), mode="sum", **options).to(table)


class CharacterEncoder(Encoder):
    """Transformer over characters with hashed n-gram embeddings, trained from scratch.

    Position 0 of the memory is the language's embedding plus a weighted bag of n-grams, as in a
    linear model. It bypasses the transformer, since only their spelling identifies rare words. The
    other positions are the transformer's output: for position 0, the begin mark, the characters and
    the end mark.

    Args:
        num_languages: rows of the language embedding, the unknown language included.
        width: D of the memory.
        num_layers: transformer layers; 0 leaves only embeddings.
        num_heads: attention heads per layer.
        feed_forward: inner width of the feed-forward blocks.
        dropout: probability after embeddings and blocks; never on attention weights.
        ngram_sizes: lengths of the hashed character n-grams.
        num_buckets: rows of the n-gram table.
    """

    def __init__(
        self,
        num_languages: int,
        width: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        feed_forward: int = 512,
        dropout: float = 0.0,
        ngram_sizes: Sequence[int] = (2, 3, 4, 5),
        num_buckets: int = 32768,
    ) -> None:
        super().__init__()
        self.width = width
        self.head_size = width // num_heads
        self.characters = nn.Embedding(CHARACTER_BUCKETS, width)
        self.languages = nn.Embedding(num_languages, width)
        self.ngrams = NgramTable(width, ngram_sizes, num_buckets)
        self.bag = WeightedBag(width, num_buckets)
        self.layers = nn.ModuleList(
            EncoderLayer(width, num_heads, feed_forward, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.characters.weight, std=0.1)
        nn.init.normal_(self.languages.weight, std=0.1)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, language_id: Tensor
    ) -> tuple[Tensor, Tensor]:
        framed_ids, lengths = frame(input_ids, attention_mask)
        mask = positions_up_to(lengths, framed_ids.shape[1])
        character_ids = torch.where(
            framed_ids < 1024, framed_ids, 1024 + mix(framed_ids) % (CHARACTER_BUCKETS - 1024)
        )
        rows, inside = self.ngrams.hashes(framed_ids, lengths)
        hidden = self.characters(character_ids) + self.ngrams(rows, inside)  # [B, S + 2, D]
        bag = self.bag(rows.flatten(1), inside.flatten(1))
        prefix = self.languages(language_id) + bag
        hidden = self.dropout(torch.cat([prefix[:, None], hidden], dim=1))  # [B, S + 3, D]
        mask = F.pad(mask, (1, 0), value=True)
        rotary = rotary_table(hidden.shape[1], self.head_size, hidden)
        for layer in self.layers:
            hidden = layer(hidden, mask, rotary)
        memory = torch.cat([prefix[:, None], self.norm(hidden)], dim=1)  # [B, S + 4, D]
        return memory, F.pad(mask, (1, 0), value=True)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)


class CanineEncoder(Encoder):
    """CANINE from a local folder, without dropout; adds the language's embedding to all positions.

    Args:
        num_languages: rows of the language embedding, which starts at zero.
        folder: folder in the Hugging Face layout, with `config.json` and the weights.
    """

    def __init__(self, num_languages: int, folder: str) -> None:
        super().__init__()
        if not (Path(folder) / "config.json").is_file():
            raise FileNotFoundError(
                f"No CANINE checkpoint in {folder}: config.json is missing. Name a local "
                "folder that holds config.json and the weights, or use CharacterEncoder, which "
                "needs no files."
            )
        from transformers import CanineModel  # seconds of import that only this encoder needs

        no_dropout: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.canine = CanineModel.from_pretrained(
            folder, add_pooling_layer=False, dtype=torch.float32, **no_dropout
        ).train()
        self.width = self.canine.config.hidden_size
        self.languages = nn.Embedding(num_languages, self.width)
        nn.init.zeros_(self.languages.weight)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, language_id: Tensor
    ) -> tuple[Tensor, Tensor]:
        keep, marks = input_ids.shape[1] + 2, self.canine.config  # + 2: begin and end mark
        # CANINE pools four characters into one; below six pads, their number changes its output.
        num_pads = CANINE_PADS + -(keep + CANINE_PADS) % CANINE_MULTIPLE
        ids = (input_ids, attention_mask, marks.bos_token_id, marks.eos_token_id, num_pads)
        padded_ids, lengths = frame(*ids)
        mask = positions_up_to(lengths, keep + num_pads)
        output = self.canine(input_ids=padded_ids, attention_mask=mask.long())
        memory = output.last_hidden_state + self.languages(language_id)[:, None]
        return memory[:, :keep], mask[:, :keep]

    def blocks(self) -> list[nn.Module]:
        canine = self.canine
        stages = (canine.initial_char_encoder, canine.encoder, canine.final_char_encoder)
        return [layer for stage in stages for layer in stage.layer]


def freeze_encoder(encoder: Encoder, freeze: Literal["none", "encoder"] | int) -> None:
    """Freeze the whole encoder, or its embeddings and a number of its lowest layers.

    Raises:
        ValueError: `freeze` is neither `none`, `encoder` nor 0 to the number of layers.
    """
    num_layers = len(encoder.blocks())
    lowest = {"none": 0, "encoder": num_layers + 1}.get(str(freeze), freeze)
    if not isinstance(lowest, int) or not 0 <= lowest <= num_layers + (freeze == "encoder"):
        raise ValueError(
            f"freeze must be none, encoder, or 0 to {num_layers} layers of this encoder, got "
            f"{freeze!r}: choose one of them."
        )
    depths = layer_depths(encoder, encoder)
    for name, parameter in encoder.named_parameters():
        if lowest and depths[name] > num_layers - lowest:
            parameter.requires_grad_(False)
