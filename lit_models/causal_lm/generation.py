"""Texts from prompts: batched, with a cache, seeded per prompt.

Shapes: B prompts, S positions of the longest, N tokens at most, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.core.batches import ChoiceBatch, PromptBatch
from datamodules.core.plan import rng_for
from datamodules.text.prompts import FINISH_REASONS, NO_TOKEN, recent
from datamodules.tokenizers.text_tokenizer import TextTokenizer
from lit_models.causal_lm.cache import DecoderReader, PretrainedReader, Reader
from lit_models.causal_lm.isolation import as_written
from lit_models.causal_lm.network import Decoder
from lit_models.causal_lm.pretrained import Network, Recipe, recipe_of
from lit_models.causal_lm.sampling import draw
from lit_models.causal_lm.transformers_model import position_limit, trained_positions

Context = Literal["whole", "recent"]
END, STOP, LENGTH, POSITIONS = range(len(FINISH_REASONS))


@dataclass(frozen=True)
class GenerationOptions:
    """What `predict` does with prompts.

    Args:
        max_new_tokens: longest completion in tokens.
        temperature: divides the logits; 0 takes the most probable token each time.
        top_k: draw among so many tokens, the most probable ones; none draws among all.
        top_p: draw among the fewest tokens that have this share of the probability; 1 for all.
        stop: texts that end a completion and do not belong to it, besides the end-of-text token.
        seed: of the draws; each prompt has its own numbers, whatever stands beside it.
        mode: `generate` completes prompts, `score` rates the continuations that the file names.
        context: `whole` refuses a prompt that is longer than a network's learned positions, and
            ends a completion where they do; `recent` goes on from the most recent part of a text
            that is longer than the positions the network was made for, learned or not.

    Raises:
        ValueError: a value outside its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    stop: list[str] = field(default_factory=list)
    seed: int = 0
    mode: Literal["generate", "score"] = "generate"
    context: Context = "whole"

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}.")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 or more, got {self.temperature}; 0 takes the most probable "
                "token each time."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(
                f"top_k must be at least 1, got {self.top_k}; leave it out to draw among all."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                f"top_p must be above 0 and at most 1, got {self.top_p}; 1 draws among all tokens."
            )
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"stop must be a list of texts that are not empty, got {self.stop!r}.")
        for name, allowed in (("mode", ("generate", "score")), ("context", ("whole", "recent"))):
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f'{name} must be one of {", ".join(allowed)}, got "{getattr(self, name)}".'
                )


class Completions(NamedTuple):
    """What follows the prompts.

    Args:
        completion_ids: [B, N] int64, without the end-of-text token; -1 after the end.
        num_tokens: [B] int64, tokens of the completion.
        num_characters: [B] int64, characters of their text that belong to the completion: it ends
            before a stop text, which may begin within a token.
        finish_reason: [B] int64, index in `FINISH_REASONS`.
    """

    completion_ids: Tensor
    num_tokens: Tensor
    num_characters: Tensor
    finish_reason: Tensor


def complete(
    network: Network,
    tokenizer: TextTokenizer,
    batch: PromptBatch | ChoiceBatch,
    options: GenerationOptions,
) -> dict[str, Tensor]:
    """Return what `predict_step` returns: the completions of a batch, or the scores of its choices.

    Raises:
        ValueError: see `generate`.
    """
    if options.mode == "score":
        from lit_models.causal_lm.scoring import score

        return score(network, batch)._asdict()  # type: ignore[arg-type]
    ids, lengths = batch["input_ids"], batch["lengths"]  # type: ignore[typeddict-item]
    return generate(network, tokenizer, ids, lengths, batch["sample_id"], options)._asdict()


@torch.no_grad()
def generate(
    network: Network,
    tokenizer: TextTokenizer,
    input_ids: Tensor,
    lengths: Tensor,
    sample_ids: Tensor | Sequence[int],
    options: GenerationOptions,
) -> Completions:
    """Return completions of prompts.

    Args:
        network: in eval mode.
        tokenizer: of the network.
        input_ids: [B, S] int64, padded at the right.
        lengths: [B] int64, tokens of each prompt, from 1.
        sample_ids: [B], keys of the draws.
        options: how.

    Raises:
        ValueError: a prompt is empty, or longer than the network's positions and options.context
            is `whole`.
        RuntimeError: the network returns logits that are not finite.
    """
    limit = most_positions(recipe_of(network), options.context)
    stops = _Stops(tokenizer, options.stop)
    keys = [int(i) for i in sample_ids]
    prompts = [
        row[:length] for row, length in zip(input_ids.tolist(), lengths.tolist(), strict=True)
    ]
    check_lengths([len(prompt) for prompt in prompts], limit, options)
    rows = [_Row(p, k, options, limit, stops) for p, k in zip(prompts, keys, strict=True)]
    with as_written(network):
        _complete_rows(_Reading(network, input_ids.device), rows, tokenizer.vocab_size)
    return _completions(rows, tokenizer, options.max_new_tokens, input_ids.device)


def reader_of(network: Network) -> Reader:
    """Return what reads with a network and its cache."""
    if isinstance(network, Decoder):
        return DecoderReader(network)
    return PretrainedReader(network.model)


def most_positions(recipe: Recipe, context: Context) -> int | None:
    """Return the most positions that a text may have at once; none for no limit.

    A table of learned positions ends. Rotary ones go on, at distances that the network was not
    trained for: `recent` does not go there.

    Args:
        recipe: of the network, see `pretrained`.
        context: see `GenerationOptions`.
    """
    config, is_recent = recipe["config"], context == "recent"
    if recipe["kind"] == "own":
        ends = is_recent or config["positions"] == "learned"
        return config["max_positions"] if ends else None
    return trained_positions(config) if is_recent else position_limit(config)


def check_lengths(lengths: Sequence[int], limit: int | None, options: GenerationOptions) -> None:
    """Refuse prompts that cannot be completed.

    Args:
        lengths: tokens of each prompt.
        limit: as `most_positions` returns it.
        options: of the completions.

    Raises:
        ValueError: a prompt is empty, or too long and not to be cut.
    """
    if not min(lengths):
        raise ValueError("a prompt has no token; begin it with the begin-of-text token.")
    if limit is not None and max(lengths) > limit and options.context == "whole":
        raise ValueError(
            f"a prompt has {max(lengths)} tokens and the network {limit} positions; shorten it, "
            "or go on from its end with context=recent."
        )


class _Stops:
    """What ends a completion: tokens, and texts that are looked for in what is decoded."""

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.reason_of_token = {tokenizer.end_id: END}
        self.texts: list[str] = []
        for text in stop:
            ids = tokenizer.encode(text).tolist()
            if len(ids) == 1 and not tokenizer.decode(ids):  # a special token has no text
                self.reason_of_token.setdefault(ids[0], STOP)
            else:
                self.texts.append(text)

    def position_in(self, ids: list[int]) -> int | None:
        """Return the character at which the first stop text begins; none where there is none."""
        if not self.texts:
            return None
        text = self.tokenizer.decode_continuation(ids)
        found = [place for stop in self.texts if (place := text.find(stop)) >= 0]
        return min(found, default=None)


class _Row:
    """One prompt and what follows it so far."""

    def __init__(
        self,
        prompt: list[int],
        key: int,
        options: GenerationOptions,
        limit: int | None,
        stops: _Stops,
    ) -> None:
        self.options, self.limit, self.stops = options, limit, stops
        self.uniforms = rng_for(options.seed, 0, key).random(options.max_new_tokens)
        self.context = prompt  # what the next token follows
        self.ids: list[int] = []
        self.num_characters: int | None = None
        self.reason: int | None = None
        self.is_moved = False  # whether the context lost its beginning since it was read
        self._fit()

    @property
    def num_left(self) -> int:
        """Tokens that may still come."""
        return self.options.max_new_tokens - len(self.ids)

    def take(self, token: int) -> None:
        """Go on by one token, or end."""
        self.reason = self.stops.reason_of_token.get(token)
        if self.reason is not None:
            return
        self.ids.append(token)
        self.context.append(token)
        self.num_characters = self.stops.position_in(self.ids)
        if self.num_characters is not None:
            self.reason = STOP
        elif not self.num_left:
            self.reason = LENGTH
        elif self.limit is not None and len(self.context) > self.limit:
            if self.options.context == "whole":
                self.reason = POSITIONS
            self._fit()

    def _fit(self) -> None:
        if self.limit is not None and len(self.context) > self.limit:
            self.context = recent(self.context, self.limit, self.num_left)
            self.is_moved = True


class _Reading:
    """The rows that a network reads at the moment, and the logits of what follows them."""

    def __init__(self, network: Network, device: torch.device) -> None:
        self.reader = reader_of(network)
        self.device = device
        self.rows: list[_Row] = []

    def begin(self, rows: list[_Row]) -> Tensor:
        """Read the contexts of these rows, and return logits [rows, V]."""
        self.rows = rows
        longest = max(len(row.context) for row in rows)
        padded = [row.context + [0] * (longest - len(row.context)) for row in rows]
        lengths = torch.tensor([len(row.context) for row in rows], device=self.device)
        room = max(len(row.context) + row.num_left for row in rows)
        if rows[0].limit is not None:
            room = min(room, rows[0].limit)
        for row in rows:
            row.is_moved = False
        return self.reader.prompts(torch.tensor(padded, device=self.device), lengths, room)

    def go_on(self, tokens: Tensor) -> Tensor | None:
        """Read the tokens [rows] that the rows have taken; return logits, or none at the end."""
        going = [i for i, row in enumerate(self.rows) if row.reason is None]
        if not going:
            return None
        if any(self.rows[i].is_moved for i in going):
            return self.begin([self.rows[i] for i in going])
        # Dropping rows copies the cache: worth it where half of them are finished.
        if 2 * len(going) <= len(self.rows):
            index = torch.tensor(going, device=self.device)
            self.reader.keep(index)
            self.rows, tokens = [self.rows[i] for i in going], tokens[index]
        return self.reader.token(tokens)


def _complete_rows(reading: _Reading, rows: list[_Row], vocab_size: int) -> None:
    options = rows[0].options
    numbers = (options.temperature, options.top_k, options.top_p)
    logits: Tensor | None = reading.begin(rows)
    step = 0
    while logits is not None:
        uniforms = torch.from_numpy(np.array([row.uniforms[step] for row in reading.rows]))
        # A network may have more rows than the tokenizer has tokens: they are no text.
        tokens = draw(logits[:, :vocab_size], uniforms.to(reading.device), *numbers)
        for row, token in zip(reading.rows, tokens.tolist(), strict=True):
            if row.reason is None:
                row.take(token)
        logits, step = reading.go_on(tokens), step + 1


def _completions(
    rows: list[_Row], tokenizer: TextTokenizer, width: int, device: torch.device
) -> Completions:
    ids = torch.full((len(rows), width), NO_TOKEN)
    characters = []
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.int64)
        whole = row.num_characters is None
        length = len(tokenizer.decode_continuation(row.ids)) if whole else row.num_characters
        characters.append(length)
    counts = [len(row.ids) for row in rows]
    columns = (counts, characters, [row.reason for row in rows])
    return Completions(ids.to(device), *(torch.tensor(c, device=device) for c in columns))
