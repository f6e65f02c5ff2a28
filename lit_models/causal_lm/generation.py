"""Text generation from prompts, seeded per prompt, and scores of given continuations.

Shapes: B prompts or samples, S positions of the longest prompt, N maximum of new tokens, V
vocabulary, R rows, T positions, C choices.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.core.batches import IGNORED, ChoiceBatch
from datamodules.core.plan import check_range, rng_for
from datamodules.text.prompts import FINISH_REASONS, NO_TOKEN
from datamodules.tokenizers.text import TextTokenizer
from lit_models.causal_lm.loss import most_probable, nats_at
from lit_models.causal_lm.network import as_written
from lit_models.causal_lm.pretrained import Network, most_positions

END, STOP, LENGTH, POSITIONS = range(len(FINISH_REASONS))
MOST_ROOM = 512  # cache positions to reserve at a time
NOT_FINITE = (
    "the network returns logits that are not finite; its weights are damaged, or the precision is "
    "too low for them: try trainer.precision=32-true."
)
AT_ONCE_ON_CPU, AT_ONCE = 1, 8  # tokens between checks by the host, which synchronize a GPU
UNITS = 2.0**50  # probabilities in integer units: their sums have the same bits in any order


@dataclass(frozen=True)
class DrawOptions:
    """Options for choosing the next token.

    Args:
        max_new_tokens: maximum length in tokens, without the end token; `None`: as in training.
        temperature: divides the logits; 0 always takes the most probable token.
        top_k: draw only among this many most probable tokens; `None` draws among all.
        top_p: draw only among the fewest tokens with this share of the probability; 1 for all.
        seed: of the draws; each sample's draws do not depend on the rest of its batch.

    Raises:
        ValueError: a value is out of its range.
    """

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    group: ClassVar[str] = "generation"

    def __post_init__(self) -> None:
        check_range(self.group, 1, max_new_tokens=self.max_new_tokens, top_k=self.top_k)
        check_range(self.group, 0, temperature=self.temperature)
        check_range(self.group, 1e-6, 1, top_p=self.top_p)


@dataclass(frozen=True)
class GenerationOptions(DrawOptions):
    """Options of `predict` on prompts.

    Args:
        max_new_tokens: longest completion in tokens.
        stop: texts that end a completion, as the end-of-text token does, and are cut off.
        mode: `generate` completes prompts; `score` scores the continuations given in the file.
    """

    max_new_tokens: int = 128
    stop: list[str] = field(default_factory=list)
    mode: Literal["generate", "score"] = "generate"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.stop, str) or not all(self.stop):
            raise ValueError(f"stop must be a list of texts that are not empty, got {self.stop!r}.")


class Completions(NamedTuple):
    """Completions of B prompts."""

    completion_ids: Tensor  # [B, N] int64, without the end-of-text token; -1 after the end
    num_tokens: Tensor  # [B] int64, tokens of the completion
    # [B] int64, length of the completion's text in characters: it ends before a stop text, which
    # may begin within a token.
    num_characters: Tensor
    finish_reason: Tensor  # [B] int64, index in `FINISH_REASONS`


@torch.no_grad()
def generate(
    network: Network,
    tokenizer: TextTokenizer,
    input_ids: Tensor,
    lengths: Tensor,
    sample_ids: Tensor | Sequence[int],
    options: GenerationOptions,
    hear: Callable[[list[list[int]]], bool] | None = None,
) -> Completions:
    """Return completions of prompts.

    Args:
        network: in eval mode.
        input_ids: [B, S] int64, padded on the right.
        lengths: [B] int64, tokens of each prompt, from 1 to the network's learned positions.
        sample_ids: [B], with the seed they determine each prompt's draws.
        hear: called with all completions' tokens so far; returning True stops the generation.

    Raises:
        RuntimeError: the network returns logits that are not finite.
    """
    stops = Stops(tokenizer, options.stop, most_positions(network.recipe))
    prompts = zip(input_ids.tolist(), lengths.tolist(), sample_ids, strict=True)
    rows = [_Row(ids[:n], int(key), options, stops) for ids, n, key in prompts]
    device = input_ids.device
    how = (options.temperature, options.top_k, options.top_p)
    longest, at_once = options.max_new_tokens, AT_ONCE_ON_CPU if device.type == "cpu" else AT_ONCE
    reading = _Reading(network, rows, device)
    with as_written(network):
        for start in range(0, longest, at_once):
            drawn = []
            for step in range(start, min(start + at_once, longest)):
                # The network's vocabulary may exceed the tokenizer's; the rest spells no text.
                logits = reading.logits()[:, : tokenizer.vocab_size]
                drawn.append(draw(logits, reading.uniforms[:, step], *how))
                reading.follow(drawn[-1])
            for row, tokens in zip(reading.rows, torch.stack(drawn, 1).tolist(), strict=True):
                for token in tokens:
                    if row.reason is None:  # tokens drawn after the end are dropped
                        row.take(token)
            is_enough = hear is not None and hear([row.ids for row in rows])
            if not reading.drop_finished() or is_enough:
                break
    ids = torch.full((len(rows), options.max_new_tokens), NO_TOKEN)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.int64)
        if row.num_characters is None:
            row.num_characters = len(tokenizer.decode_continuation(row.ids))
        row.reason = LENGTH if row.reason is None else row.reason
    columns = [(len(row.ids), row.num_characters, row.reason) for row in rows]
    return Completions(ids.to(device), *torch.tensor(columns, device=device).T)


class Stops:
    """Stop conditions of a completion: tokens, texts found in the decoded completion, and the
    number of learned positions."""

    def __init__(
        self, tokenizer: TextTokenizer, stop: Sequence[str], limit: int | None = None
    ) -> None:
        self.tokenizer, self.limit = tokenizer, limit
        self.reason_of_token = dict.fromkeys(tokenizer.end_ids, END)
        self.texts: list[str] = []
        for text in stop:
            ids = tokenizer.encode(text).tolist()
            if len(ids) == 1 and not tokenizer.decode(ids):  # a special token has no text
                self.reason_of_token.setdefault(ids[0], STOP)
            else:
                self.texts.append(text)

    def position_in(self, ids: list[int]) -> int | None:
        """Return the character at which the first stop text begins; `None` without a match."""
        if not self.texts:
            return None
        text = self.tokenizer.decode_continuation(ids)
        places = [place for stop in self.texts if (place := text.find(stop)) >= 0]
        return min(places, default=None)


class _Row:
    """One prompt and its completion so far."""

    def __init__(self, ids: list[int], key: int, options: GenerationOptions, stops: Stops) -> None:
        self.options, self.stops = options, stops
        self.uniforms = rng_for(options.seed, 0, key).random(options.max_new_tokens)
        self.context = ids  # prompt and completion so far
        self.ids: list[int] = []
        self.num_characters: int | None = None
        self.reason: int | None = None

    def take(self, token: int) -> None:
        """Append a token, or end the row; RuntimeError for `NO_TOKEN`."""
        if token == NO_TOKEN:
            raise RuntimeError(NOT_FINITE)
        self.reason = self.stops.reason_of_token.get(token)
        if self.reason is not None:
            return
        self.ids.append(token)
        self.context.append(token)
        self.num_characters = self.stops.position_in(self.ids)
        if self.num_characters is not None:
            self.reason = STOP
        elif len(self.ids) == self.options.max_new_tokens:
            self.reason = LENGTH
        elif self.stops.limit is not None and len(self.context) > self.stops.limit:
            self.reason = POSITIONS


class _Reading:
    """Batch of unfinished rows, and the network's logits of their next tokens.

    Rows are padded on the left, so that all end together; a cache makes the network read each
    position once.
    """

    def __init__(self, network: Network, rows: list[_Row], device: torch.device) -> None:
        self.network, self.rows, self.device = network, rows, device
        self.uniforms = torch.from_numpy(np.stack([row.uniforms for row in rows])).to(device)
        limit, most = rows[0].stops.limit, rows[0].options.max_new_tokens
        self.cache = network.new_cache(min(most, MOST_ROOM))
        sizes = [len(row.context) for row in rows]
        width = max(sizes)
        self.last = (width + most if limit is None else min(width + most, limit)) - 1
        ids = torch.tensor([[0] * (width - len(row.context)) + row.context for row in rows])
        self.lengths = torch.tensor(sizes, device=device)
        places = torch.arange(width, device=device) - (width - self.lengths)[:, None]
        self.mask = places >= 0 if min(sizes) < width else None
        self.ids, self.places = ids.to(device), places.clamp(min=0)

    def logits(self) -> Tensor:
        """Run the network on the next input; return the logits [rows, V] of the next tokens."""
        hidden = self.network(self.ids, self.places, None, True, self.cache, mask=self.mask)
        return self.network.head(hidden[:, -1])  # type: ignore[operator]

    def follow(self, tokens: Tensor) -> None:
        """Make these tokens [rows] the next input."""
        # Finished rows continue until they are dropped, at the last position if necessary.
        self.places = self.lengths.clamp(max=self.last)[:, None]
        self.ids, self.lengths = tokens.clamp(min=0)[:, None], self.lengths + 1
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.ids >= 0], dim=1)  # appends True

    def drop_finished(self) -> bool:
        """Return whether unfinished rows are left. Finished rows are dropped once they are half of
        all, as dropping copies the cache."""
        going = [i for i, row in enumerate(self.rows) if row.reason is None]
        if going and 2 * len(going) <= len(self.rows):
            index = torch.tensor(going, device=self.device)
            self.cache.batch_select_indices(index)
            self.rows, self.lengths = [self.rows[i] for i in going], self.lengths[index]
            self.ids, self.places = self.ids[index], self.places[index]
            self.mask = None if self.mask is None else self.mask[index]
            self.uniforms = self.uniforms[index]
        return bool(going)


def draw(
    logits: Tensor, uniforms: Tensor, temperature: float, top_k: int | None, top_p: float
) -> Tensor:
    """Return one token per row [R] int64: the most probable at temperature 0, else a random one;
    `NO_TOKEN` if logits are not finite.

    Probabilities are float64 and summed in integer `UNITS`; the row's uniform number is looked up
    in the sums, so that a draw depends only on its own row.

    Args:
        logits: [R, V].
        uniforms: [R] float64 in [0, 1), one per row.
        temperature, top_k, top_p: as in `GenerationOptions`.
    """
    is_sound = logits.amin(1).isfinite() & logits.amax(1).isfinite()
    if temperature == 0:
        return logits.argmax(1).where(is_sound, NO_TOKEN)
    probabilities, tokens = filtered(logits, temperature, top_k, top_p)
    sums = (probabilities * UNITS).long().cumsum(1)  # [R, V]
    places = torch.searchsorted(sums, (uniforms[:, None] * sums[:, -1:]).long(), right=True)
    places.clamp_(max=logits.shape[1] - 1)  # for logits of NaN
    return (places if tokens is None else tokens.gather(1, places))[:, 0].where(is_sound, NO_TOKEN)


def filtered(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float
) -> tuple[Tensor, Tensor | None]:
    """Return probabilities [R, V] float64, 0 for excluded tokens, and their tokens, the most
    probable first; `None` if all tokens stay in the order of their ids.

    `top_p` applies to the probabilities that `top_k` leaves. Ties are in the order of ids.

    Source: Fan et al. 2018 (top-k); Holtzman et al. 2020, section 3.1 (nucleus).
    """
    probabilities = (logits.double() / temperature).softmax(1)
    if top_k is None and top_p == 1:
        return probabilities, None
    probabilities, tokens = probabilities.sort(dim=1, descending=True, stable=True)
    if top_k is not None:
        probabilities[:, top_k:] = 0
    units = (probabilities * UNITS).long()
    before, total = units.cumsum(1) - units, units.sum(1, keepdim=True)  # of tokens before each
    return probabilities * (before < top_p * total), tokens


@torch.no_grad()
def score(hidden: Tensor, weight: Tensor, batch: ChoiceBatch) -> dict[str, Tensor]:
    """Return the scores of all choices of a batch.

    These are `scores` [B, C] float64, the log-probability in nats of each continuation after its
    prompt, NaN for missing choices; `num_tokens` [B, C] int64; and `is_greedy` [B, C] bool, whether
    all its tokens are the most probable ones. A continuation's tokens are the labels of its
    document, see `datamodules.text.prompts.joint_tokens`. Args: hidden [R, T, D]; head's weight
    [V, D]."""
    places = (batch["labels"] != IGNORED).flatten().nonzero()[:, 0]
    _, nats = nats_at(hidden, weight, batch["labels"], places)
    is_missed = most_probable(hidden, weight, places) != batch["labels"].flatten()[places]
    size, nats = (3, int(batch["document_ids"].max()) + 1), nats.double()
    values = torch.stack([nats, torch.ones_like(nats), is_missed.double()])
    documents = batch["document_ids"].flatten()[places]
    sums, counts, misses = values.new_zeros(size).index_add_(1, documents, values)
    choices = batch["choice_documents"]
    there, choices = choices >= 0, choices.clamp(min=0)
    scores = (-sums[choices]).masked_fill(~there, torch.nan)
    is_greedy = there & (misses[choices] == 0)
    return {
        "scores": scores,
        "num_tokens": (counts[choices] * there).long(),
        "is_greedy": is_greedy,
    }
