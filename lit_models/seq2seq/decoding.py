"""Batched generation of targets: greedy, sampled, or by beam search.

Shapes: B records, O hypotheses per record, N maximum number of tokens, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.core.plan import check_range, rng_for
from datamodules.text.prompts import NO_TOKEN
from lit_models.causal_lm.generation import AT_ONCE, AT_ONCE_ON_CPU, NOT_FINITE, DrawOptions, draw


@dataclass(frozen=True)
class Seq2SeqDecoding(DrawOptions):
    """Options for generating targets.

    Args:
        num_beams: hypotheses of beam search; 1 is greedy decoding, or sampling with `temperature`.
        length_penalty: beam search divides a target's log-probability by its number of tokens,
            including the end mark, to this power; 0 favours short targets.

    Raises:
        ValueError: a value is out of its range, or beam search is combined with a temperature.
    """

    num_beams: int = 1
    length_penalty: float = 1.0
    group: ClassVar[str] = "decoding"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self.group, 1, num_beams=self.num_beams)
        check_range(self.group, 0, length_penalty=self.length_penalty)
        if self.num_beams > 1 and self.temperature > 0:
            raise ValueError(
                "decoding.temperature must be 0 beside num_beams above 1: it draws none."
            )


class Written(NamedTuple):
    """Targets of B sources.

    Args:
        token_ids: [B, N] int64, without the end mark, padded with -1.
        log_probability: [B] float64, in nats, of the target with its end mark; without it if the
            target is cut at N tokens.
    """

    token_ids: Tensor
    log_probability: Tensor


@torch.no_grad()  # not inference mode, which sharded weights do not allow
def write(
    network: Any,
    input_ids: Tensor,
    attention_mask: Tensor,
    sample_ids: Tensor,
    options: Seq2SeqDecoding,
    end_id: int,
    vocab_size: int,
) -> Written:
    """Return the generated targets of sources.

    Args:
        network: in eval mode.
        input_ids: [B, S] int64.
        attention_mask: [B, S] bool.
        sample_ids: [B], keys of random draws.
        options: with `max_new_tokens` set.
        end_id: token that ends a target.
        vocab_size: of the tokenizer; the network's may be larger, but the rest spells no text.

    Raises:
        RuntimeError: the network returns logits that are not finite.
    """
    cache = network.start(input_ids, attention_mask, options.num_beams)
    search = _Beams if options.num_beams > 1 else _Lines
    state = search(network, cache, sample_ids, options, end_id, vocab_size)
    at_once = AT_ONCE_ON_CPU if input_ids.device.type == "cpu" else AT_ONCE
    for step in range(state.ids.shape[1] + 1):  # + 1 for the end mark
        state.go_on(step)
        if (step + 1) % at_once == 0 and not state.drop_finished():
            break
    if not bool(state.is_sound):
        raise RuntimeError(NOT_FINITE)
    return Written(state.ids, state.nats)


class _Writing:
    """State of the unfinished records [B'] of a batch; R = B' x O rows."""

    def __init__(
        self,
        network: Any,
        cache: Any,
        sample_ids: Tensor,
        options: Seq2SeqDecoding,
        end_id: int,
        vocab_size: int,
    ) -> None:
        self.network, self.cache, self.options = network, cache, options
        self.end_id, self.vocab_size = end_id, vocab_size
        number, device = len(sample_ids), sample_ids.device
        self.records = torch.arange(number, device=device)  # [B']
        self.is_done = torch.zeros(number, dtype=torch.bool, device=device)  # [B']
        assert options.max_new_tokens is not None
        self.ids = torch.full((number, options.max_new_tokens), NO_TOKEN, device=device)
        self.nats = torch.zeros(number, dtype=torch.float64, device=device)
        self.is_sound = torch.ones((), dtype=torch.bool, device=device)
        rows = number * options.num_beams
        self.tokens = torch.full((rows,), network.start_id, device=device)

    def logits(self) -> Tensor:
        """Return the logits of the next tokens [R, V], in float32 or wider."""
        hidden = self.network.step(self.tokens, self.cache)
        logits = F.linear(hidden, self.network.head.weight)[:, : self.vocab_size]
        self.is_sound &= logits.isfinite().all()
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def drop_finished(self) -> bool:
        """Return whether unfinished records are left. Finished records are dropped, which copies
        the cache, once they are an eighth of all."""
        going = (~self.is_done).nonzero()[:, 0]
        if len(going) and 8 * len(going) <= 7 * len(self.records):
            self.cache.keep_records(going, self.options.num_beams)
            self.keep(going)
        return len(going) > 0

    def keep(self, going: Tensor) -> None:
        """Keep the state of only these records, indices into [B']."""
        self.records, self.is_done = self.records[going], self.is_done[going]
        self.tokens = self.tokens.view(-1, self.options.num_beams)[going].flatten()


class _Lines(_Writing):
    """Greedy decoding or sampling, with one hypothesis per record."""

    def __init__(self, network: Any, cache: Any, sample_ids: Tensor, *options: Any) -> None:
        super().__init__(network, cache, sample_ids, *options)
        seed, most = self.options.seed, self.ids.shape[1] + 1
        numbers = [rng_for(seed, 0, key).random(most) for key in sample_ids.tolist()]
        self.uniforms = torch.from_numpy(np.stack(numbers)).to(sample_ids.device)  # [B, N + 1]

    def go_on(self, step: int) -> None:
        """Append the next token to each record."""
        logits, options = self.logits(), self.options
        how = (options.temperature, options.top_k, options.top_p)
        chosen = draw(logits, self.uniforms[self.records, step], *how).clamp(min=0)
        nats = logits.double().log_softmax(1).gather(1, chosen[:, None])[:, 0]
        is_end, is_last = chosen == self.end_id, step == self.ids.shape[1]
        counts = ~self.is_done & is_end if is_last else ~self.is_done
        self.nats[self.records] += nats.where(counts, 0)
        self.is_done |= is_end | is_last
        if not is_last:
            self.ids[self.records, step] = chosen.where(~self.is_done, NO_TOKEN)
        self.tokens = chosen


class _Beams(_Writing):
    """Beam search: the best hypotheses of each record, and its best finished target so far.

    A hypothesis may end if the end mark is among the O best continuations of its record. A record
    is finished when no hypothesis can still exceed its best target.
    """

    def __init__(self, network: Any, cache: Any, sample_ids: Tensor, *options: Any) -> None:
        super().__init__(network, cache, sample_ids, *options)
        number, beams, most = len(self.records), self.options.num_beams, self.ids.shape[1]
        self.sums = self.nats.new_full((number, beams), -torch.inf)  # [B', O]
        self.sums[:, 0] = 0
        self.hypotheses = self.ids[:, None].expand(-1, beams, most).contiguous()  # [B', O, N]
        self.best = self.nats.new_full((number,), -torch.inf)  # [B], after the penalty

    def go_on(self, step: int) -> None:
        """Extend the best hypotheses of each record by one token."""
        beams, most = self.options.num_beams, self.ids.shape[1]
        nats = self.logits().double().log_softmax(1).unflatten(0, (-1, beams))  # [B', O, V]
        # 2 O candidates, so that O hypotheses continue even if some end.
        number = min(2 * beams, nats.shape[1] * nats.shape[2])
        sums, flat_places = (self.sums[:, :, None] + nats).flatten(1).topk(number)
        beam, token = flat_places // nats.shape[2], flat_places % nats.shape[2]
        is_end = token == self.end_id
        may_end = is_end & (torch.arange(number, device=sums.device) < beams)
        self._finish(sums.masked_fill(~may_end, -torch.inf), step + 1, beam)
        if step == most:  # records without a finished target take their best hypothesis, cut
            has_end = self.best[self.records].isfinite()
            cut = self.sums.masked_fill(has_end[:, None], -torch.inf)
            self._finish(cut, step, torch.arange(beams, device=cut.device).expand_as(cut))
            self.is_done[:] = True
            return
        self.sums, places = sums.masked_fill(is_end, -torch.inf).topk(beams)
        beam, token = beam.gather(1, places), token.gather(1, places)
        rows = torch.arange(len(beam), device=beam.device)[:, None]
        self.hypotheses = self.hypotheses[rows, beam]
        self.hypotheses[:, :, step], self.tokens = token, token.flatten()
        self.cache.reorder((rows * beams + beam).flatten())
        # Upper bound of future scores: the longest target has the largest divisor.
        hope = self.sums[:, 0] / (most + 1) ** self.options.length_penalty
        self.is_done |= self.best[self.records] >= hope

    def _finish(self, sums: Tensor, length: int, beam: Tensor) -> None:
        """Update each record's best target. Args: log-probabilities [B', n] of finished targets of
        `length` tokens, and their hypotheses [B', n]."""
        values, places = (sums / length**self.options.length_penalty).max(1)
        rows = torch.arange(len(sums), device=sums.device)
        better = ~self.is_done & (values > self.best[self.records])
        records, ids = self.records[better], self.hypotheses[rows, beam[rows, places]]
        self.best[records], self.ids[records] = values[better], ids[better]
        self.nats[records] = sums[rows, places][better]

    def keep(self, going: Tensor) -> None:
        super().keep(going)
        self.sums, self.hypotheses = self.sums[going], self.hypotheses[going]
