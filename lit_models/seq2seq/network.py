"""Encoder-decoder networks with one vocabulary, from scratch or of transformers.

Shapes: B batch, S source positions, T target positions, D hidden, H heads, V vocabulary, O
hypotheses of a record, R = B x O rows.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.core.plan import check_range
from lit_models.blocks import DecoderCache, DecoderLayer, EncoderLayer, rotary_table
from lit_models.causal_lm.pretrained import (
    Recipe,
    model_of,
    read_config,
    recipe_of,
    refusals_of,
    weight_files,
)
from lit_models.training.metrics import evaluating

INITIAL_STD = 0.02
PRETRAINED_TYPES = ("t5", "mt5", "umt5", "bart", "mbart", "marian", "pegasus")  # ByT5 is t5
AUTO_CLASS = "AutoModelForSeq2SeqLM"
TOLERANCE = 1e-4  # relative to the largest logit


@dataclass(frozen=True)
class Seq2SeqConfig:
    """Shape of a network from scratch.

    Args:
        vocab_size: rows of the embedding; `None` takes the tokenizer's size.
        width: D.
        num_encoder_layers: layers that read the source.
        num_decoder_layers: layers that write the target.
        num_heads: H; 2 H must divide D, as positions are rotary.
        feed_forward: inner width; `None` is 4 D.
        dropout: after embeddings and blocks, 0 to below 1.

    Raises:
        ValueError: a size or the rate is out of its range.
    """

    vocab_size: int | None = None
    width: int = 256
    num_encoder_layers: int = 4
    num_decoder_layers: int = 4
    num_heads: int = 4
    feed_forward: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_range("network", 1, **{n: v for n, v in vars(self).items() if type(v) is int})
        check_range("network", 0, 0.99, dropout=self.dropout)

    @property
    def recipe(self) -> Recipe:
        """The recipe of this network, see `network_of`."""
        return {"kind": "own", "config": asdict(self)}


class Seq2SeqNetwork(nn.Module):
    """Pre-norm transformer whose embedding, encoder, decoder and head share one vocabulary.

    Args:
        config: with `vocab_size` set.
        start_id: token before the first token of a target.
    """

    def __init__(self, config: Seq2SeqConfig, start_id: int) -> None:
        super().__init__()
        assert config.vocab_size is not None
        width = config.width
        self.config, self.start_id = config, start_id
        self.embedding = nn.Embedding(config.vocab_size, width)
        sizes = (config.num_heads, config.feed_forward or 4 * width, config.dropout)
        self.encoder = nn.ModuleList(
            EncoderLayer(width, *sizes) for _ in range(config.num_encoder_layers)
        )
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(
            DecoderLayer(width, width, *sizes) for _ in range(config.num_decoder_layers)
        )
        self.decoder_norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        nn.init.normal_(self.embedding.weight, std=INITIAL_STD)
        self.head.weight = self.embedding.weight

    def blocks(self) -> list[nn.Module]:
        """The layers from the lowest to the highest."""
        return [*self.encoder, *self.decoder]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, before: Tensor) -> Tensor:
        """Return the hidden states [B, T, D]; their product with the head's weight [V, D] gives the
        logits of the target.

        Args:
            input_ids: [B, S] int64.
            attention_mask: [B, S] bool.
            before: [B, T] int64, the previous token of each target token.
        """
        memory = self.encode(input_ids, attention_mask)
        hidden, mask = self.dropout(self.embedding(before)), attention_mask[:, None, None, :]
        rotary = self._rotary(before.shape[1], hidden)
        for layer in self.decoder:
            hidden, _ = layer(hidden, layer.project(memory), mask, rotary=rotary)
        return self.decoder_norm(hidden)

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the memory [B, S, D] of sources."""
        hidden = self.dropout(self.embedding(input_ids))
        rotary = self._rotary(input_ids.shape[1], hidden)
        for layer in self.encoder:
            hidden = layer(hidden, attention_mask, rotary)
        return self.encoder_norm(hidden)

    def start(self, input_ids: Tensor, attention_mask: Tensor, hypotheses: int) -> DecoderCache:
        """Return the cache from which targets of these sources are generated."""
        memory = self.encode(input_ids, attention_mask)
        memory_kv = [layer.project(memory) for layer in self.decoder]
        return DecoderCache(memory_kv, attention_mask[:, None, None, :])

    def step(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """Return the hidden states [B x O, D] of the next tokens [B x O]; appends to the cache."""
        hidden = self.dropout(self.embedding(tokens[:, None]))
        rotary = self._rotary(cache.position + 1, hidden)[:, -1:]
        return self.decoder_norm(cache.through(self.decoder, hidden, rotary))[:, 0]

    def _rotary(self, positions: int, like: Tensor) -> Tensor:
        return rotary_table(positions, self.config.width // self.config.num_heads, like)


class PretrainedCache:
    """Encoded sources, and the cache of transformers' decoder.

    Args:
        memory: [B, S, D], of the encoder.
        mask: [B, S] bool.
        hypotheses: O.
    """

    def __init__(self, memory: Tensor, mask: Tensor, hypotheses: int) -> None:
        from transformers import DynamicCache, EncoderDecoderCache

        sources = (memory, mask.long())
        self.memory, self.mask = (x.repeat_interleave(hypotheses, 0) for x in sources)
        self.past = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def reorder(self, rows: Tensor) -> None:
        """Let each hypothesis continue from another of its record [B x O]."""
        self.past.reorder_cache(rows)

    def keep_records(self, rows: Tensor, hypotheses: int = 1) -> None:
        """Keep only these records. Args: rows [B'] int64."""
        ids = (rows[:, None] * hypotheses + torch.arange(hypotheses, device=rows.device)).flatten()
        self.memory, self.mask = self.memory[ids], self.mask[ids]
        self.past.batch_select_indices(ids)


class PretrainedSeq2Seq(nn.Module):
    """Sequence-to-sequence model of transformers with the interface of `Seq2SeqNetwork`.

    Args:
        model: of a ...ForConditionalGeneration class.
        content: of its config.json; exported unchanged.
    """

    def __init__(self, model: Any, content: dict[str, Any]) -> None:
        super().__init__()
        self.model, self.content = model, content
        config = model.config
        self.start_id: int = config.decoder_start_token_id
        # T5 with a tied head scales the hidden states before it.
        is_scaled = getattr(config, "scale_decoder_outputs", False) and config.tie_word_embeddings
        self.scale = config.d_model**-0.5 if is_scaled else 1.0

    @property
    def head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def blocks(self) -> list[nn.Module]:
        """The layers from the lowest to the highest."""
        encoder, decoder = self.model.get_encoder(), self.model.get_decoder()
        layers = [getattr(part, "block", None) or part.layers for part in (encoder, decoder)]
        return [*layers[0], *layers[1]]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, before: Tensor) -> Tensor:
        """See `Seq2SeqNetwork.forward`."""
        memory = self.encode(input_ids, attention_mask)
        decoder = self.model.get_decoder()
        options = {"encoder_hidden_states": memory, "encoder_attention_mask": attention_mask.long()}
        return decoder(before, use_cache=False, **options).last_hidden_state * self.scale

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """See `Seq2SeqNetwork.encode`."""
        return self.model.get_encoder()(input_ids, attention_mask.long()).last_hidden_state

    def start(self, input_ids: Tensor, attention_mask: Tensor, hypotheses: int) -> PretrainedCache:
        """See `Seq2SeqNetwork.start`."""
        memory = self.encode(input_ids, attention_mask)
        return PretrainedCache(memory, attention_mask, hypotheses)

    def step(self, tokens: Tensor, cache: PretrainedCache) -> Tensor:
        """See `Seq2SeqNetwork.step`."""
        sources = {"encoder_hidden_states": cache.memory, "encoder_attention_mask": cache.mask}
        decoder = self.model.get_decoder()
        done = decoder(tokens[:, None], use_cache=True, cache=cache.past, **sources)
        return done.last_hidden_state[:, 0] * self.scale


Network = Seq2SeqNetwork | PretrainedSeq2Seq


def network_of(recipe: Recipe, folder: str | Path | None = None) -> Network:
    """Return the network of a recipe, with random weights or those of a model's folder.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: a file is damaged or does not fit the others, or the model is not supported.
    """
    config = recipe["config"]
    if recipe["kind"] == "own":
        return Seq2SeqNetwork(Seq2SeqConfig(**config), recipe["start_id"])
    if folder is not None:
        weight_files(folder)  # raises if there are only pickles
    model = model_of(config, folder, auto_class=AUTO_CLASS)
    network = PretrainedSeq2Seq(model, config).train()
    if not network.head.weight.is_meta:  # else there are no values to check
        check_head(network, folder)
    return network


def read_recipe(folder: str | Path) -> Recipe:
    """Return the recipe of a model's folder; reads only its config.json.

    Raises:
        FileNotFoundError: the folder or its config.json does not exist.
        ValueError: config.json is damaged or does not fit transformers, or the model's type is not
            supported.
    """
    content = read_config(folder)
    if content["model_type"] not in PRETRAINED_TYPES:
        raise ValueError(
            f'{folder} has model_type "{content["model_type"]}"; an encoder with a decoder is one '
            f"of {', '.join(PRETRAINED_TYPES)} (ByT5 is t5)."
        )
    return recipe_of(folder, content, AUTO_CLASS)


@torch.no_grad()
def check_head(network: PretrainedSeq2Seq, folder: str | Path | None) -> None:
    """Raise ValueError if a model's logits are not the product of its head and hidden states."""
    source, before = (torch.arange(n, device=network.head.weight.device)[None] for n in (4, 3))
    mask = torch.ones_like(source, dtype=torch.bool)
    with refusals_of(folder or "the checkpoint"), evaluating(network):
        logits = network.model(source, mask, decoder_input_ids=before).logits
        hidden = network(source, mask, before)
    difference = (hidden @ network.head.weight.T - logits).abs().max()
    if not difference <= TOLERANCE * logits.abs().max():
        raise ValueError(
            f"the logits of {type(network.model).__name__} are not the product of its head and "
            "its hidden states (they are scaled or shifted): its loss would be wrong here. Take a "
            "T5 or BART model."
        )
