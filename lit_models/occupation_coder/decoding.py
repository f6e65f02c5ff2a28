"""Decoding of codes by the flat head, the decoder or both; temperatures; plausible sets.

Temperatures calibrate both heads' probabilities: validation sums the nats of the true codes at each
of a fixed set of temperatures, and a parabola refines the best. The sums are exact on any number of
devices, and no logits are stored.

In all functions `memory` holds B encoded texts, code ids are padded on the right with `NONE`, and
logits are divided by `temperature`.

Shapes: B batch, K blocks, L symbols of a block, T positions, V symbols, C codes, W beams,
N candidate sets, O orders.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torchmetrics import Metric

from datamodules.core.plan import check_range
from lit_models.occupation_coder.loss import all_orders, best_orders, flat_nats
from lit_models.occupation_coder.network import (
    BEGIN,
    EMPTY,
    NONE,
    PAD,
    BlockDecoder,
    Memory,
    OccupationNetwork,
)
from lit_models.training.metrics import in_float32

_ROWS_AT_ONCE = 4096  # hypotheses per pass, which bounds memory: five codes have 120 orders


def set_probability(
    decoder: BlockDecoder, memory: Memory, candidates: Tensor, temperature: float = 1.0
) -> Tensor:
    """Probability of each candidate set, summed over the orders of its codes [B, N]; 0 if empty.

    Args: candidates: sets of distinct codes [B, N, K].
    """
    num_sets = candidates.shape[1]
    code_ids = candidates.flatten(0, 1)
    num_codes = (code_ids >= 0).sum(1)
    probability = in_float32(memory.hidden).new_zeros(len(code_ids))
    for size in range(1, code_ids.shape[1] + 1):
        sets = (num_codes == size).nonzero().squeeze(1)
        for some in sets.split(max(1, _ROWS_AT_ONCE // math.factorial(size))):
            if len(some) == 0:
                continue
            orders = all_orders(code_ids[some, :size])  # [R, O, size]
            records = memory.select(some // num_sets)
            steps = step_log_probability(decoder, records, orders.flatten(0, 1), temperature)
            probability[some] = steps.sum(1).view(len(some), -1).exp().sum(1)
    return probability.view(-1, num_sets)


def code_probability(
    decoder: BlockDecoder, memory: Memory, code_ids: Tensor, temperature: float = 1.0
) -> Tensor:
    """Probability of each code given the previous ones [B, K], 0 for NONE."""
    trie = decoder.trie
    steps = step_log_probability(decoder, memory, code_ids, temperature)
    size = code_ids.shape[1] * trie.block_size
    steps = F.pad(steps, (0, max(0, size - steps.shape[1])))[:, :size]
    per_code = steps.view(len(code_ids), -1, trie.block_size).sum(-1)
    return per_code.exp() * (code_ids >= 0)


def step_log_probability(
    decoder: BlockDecoder, memory: Memory, code_ids: Tensor, temperature: float = 1.0
) -> Tensor:
    """Log-probability of each symbol of codes [B x O, K] among the legal symbols [B x O, T], 0
    after the last symbol."""
    most_codes = int((code_ids >= 0).sum(1).max()) if len(code_ids) else 0
    targets = decoder.trie.targets(code_ids[:, :most_codes])
    legal = decoder.trie.legal_targets(code_ids, targets.shape[1])
    return _of_targets(decoder(targets, memory), targets, legal, temperature)


def _of_targets(logits: Tensor, targets: Tensor, legal: Tensor, temperature: float) -> Tensor:
    steps = legal_log_softmax(logits, legal, temperature)
    chosen = steps.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(targets == NONE, 0.0, chosen)


def flat_set_log_probability(logits: Tensor, candidates: Tensor) -> Tensor:
    """Log-probability [B, N] of sets [B, N, K] under independent codes with logits [B, C], given
    that the set is not empty; -inf for the empty set."""
    nothing, something = _nothing_and_something(logits)
    is_code = candidates >= 0
    chosen = logits.double().gather(1, candidates.clamp(min=0).flatten(1)).view(candidates.shape)
    log_probability = nothing + (chosen * is_code).sum(-1) - something
    return log_probability.masked_fill(~is_code.any(-1), -math.inf).to(logits.dtype)


def flat_code_probability(logits: Tensor, code_ids: Tensor) -> Tensor:
    """Probability of each code [B, K], given that the set is not empty, so never below that of a
    set with this code; 0 for NONE."""
    chosen = F.logsigmoid(logits.double().gather(1, code_ids.clamp(min=0)))
    probability = (chosen - _nothing_and_something(logits)[1]).exp()
    return (probability * (code_ids >= 0)).to(logits.dtype)


def _nothing_and_something(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [B, 1] that a record has no code, and that it has one or more."""
    # A sum over the whole code book loses digits in float32.
    nothing = F.logsigmoid(-logits.double()).sum(1, keepdim=True)
    return nothing, torch.log(-torch.expm1(nothing.clamp(max=-1e-12)))


def legal_log_softmax(logits: Tensor, legal: Tensor, temperature: float) -> Tensor:
    """Log-probabilities over the legal symbols, -inf elsewhere [..., V]."""
    return (logits / temperature).masked_fill(~legal, -math.inf).log_softmax(-1)


Method = Literal["flat", "greedy", "beam", "mixed"]
MOST_BEAMS, WIDENING = 320, 4  # of `likeliest_sets`; each round multiplies its beams by WIDENING
MOST_ORDERS = 1920  # orders scored over all beams: five codes have 120
HYPOTHESES_AT_ONCE = 8192
ROUNDING = 1e-5  # of probabilities and their logarithms in float32
LEAST_LOG = -1e4  # replaces log(0) = -inf, which a share of 0 would make NaN


@dataclass
class DecodingOptions:
    """Options for decoding codes.

    Args:
        method: `flat` uses the flat head, `greedy` and `beam` the decoder, `mixed` both: it takes
            the set with the greatest weighted geometric mean of their probabilities.
        beam_size: hypotheses per record of `beam`; number that `mixed` starts with.
        flat_share: weight of the flat head in `mixed`, 0 to 1.
        k_best: sets per record in prediction: the answer and the next likeliest sets.
        review_below: predicted sets of lower confidence are marked `needs_review`.
        review_for_precision: validation prints the lowest `review_below` at which this share of
            the sets that need no review is exactly right, above 0 and at most 1.
        coverage: prediction also gives sets that hold all true codes in this share of records,
            above 0 and below 1; validation during training finds the limit that they need.
        embeddings: prediction also writes each text's vector, position 0 of the memory.
    """

    method: Method = "mixed"
    beam_size: int = 5
    flat_share: float = 0.5
    k_best: int = 1
    review_below: float = 0.5
    review_for_precision: float | None = None
    coverage: float | None = None
    embeddings: bool = False

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ValueError(
                f"method must be flat, greedy, beam or mixed, got {self.method!r}: choose one."
            )
        check_range("decoding", 1, beam_size=self.beam_size, k_best=self.k_best)
        names = ("flat_share", "review_below", "review_for_precision", "coverage")
        check_range("decoding", 0, 1, **{name: getattr(self, name) for name in names})

    @property
    def share(self) -> float:
        """Weight of the flat head in this method, 0 to 1."""
        return {"flat": 1.0, "greedy": 0.0, "beam": 0.0}.get(self.method, self.flat_share)


class Decoded(NamedTuple):
    """Code sets: code_ids [B, K] padded with NONE, code_confidence [B, K] (0 for NONE) and
    set_confidence [B], both probabilities."""

    code_ids: Tensor
    code_confidence: Tensor
    set_confidence: Tensor


class Beams(NamedTuple):
    """Hypotheses, best first: code_ids [B, W, K], code_nats [B, W, K], log_probability of the
    sequence [B, W], -inf for missing hypotheses, and lost [B], an upper bound of all other
    sequences' log-probability, -inf if there is no other."""

    code_ids: Tensor
    code_nats: Tensor
    log_probability: Tensor
    lost: Tensor


@torch.no_grad()
def decode(
    network: OccupationNetwork,
    memory: Memory,
    flat_logits: Tensor,
    options: DecodingOptions,
    temperature: dict[str, float],
) -> Decoded:
    """Decode codes from the memory and the flat logits [B, C] by `options.method`.

    Args: network: in eval mode; temperature: of "seq2seq" and "flat".
    """
    decoder, sharpness = network.decoder, temperature["seq2seq"]
    flat_logits = flat_logits / temperature["flat"]
    if options.method == "flat":
        return decode_flat(flat_logits, decoder.trie.max_codes)
    if options.method == "mixed":  # confidences are weighted means over both heads
        share = options.share
        chosen = likeliest_sets(decoder, memory, flat_logits, options, sharpness)[:, :1]
        of_set = share * flat_set_log_probability(flat_logits, chosen).exp()
        of_set = of_set + (1 - share) * set_probability(decoder, memory, chosen, sharpness)
        code_ids = chosen[:, 0]
        flat = flat_code_probability(flat_logits, code_ids)
        sequence = code_probability(decoder, memory, code_ids, sharpness)
        return Decoded(code_ids, share * flat + (1 - share) * sequence, of_set[:, 0])
    width = 1 if options.method == "greedy" else options.beam_size
    beams = beam_search(decoder, memory, width, sharpness)
    code_ids, code_nats, log_probability = (part[:, 0] for part in beams[:3])
    several = (code_ids[:, 1:] >= 0).any(1).nonzero().squeeze(1)
    set_confidence = log_probability.exp()  # one code has one order: nothing to sum
    set_confidence[several] = set_probability(
        decoder, memory.select(several), code_ids[several, None], sharpness
    )[:, 0]
    return Decoded(code_ids, (-code_nats).exp() * (code_ids >= 0), set_confidence)


@torch.no_grad()
def answers(
    network: OccupationNetwork,
    memory: Memory,
    flat_logits: Tensor,
    options: DecodingOptions,
    temperature: Mapping[str, float],
) -> dict[str, Tensor]:
    """The fields of `Decoded` and, with k_best > 1, the next likeliest sets.

    These are `next_ids` [B, k_best - 1, K], padded with NONE, and `next_confidence`
    [B, k_best - 1]: chosen by the method's measure, sorted by confidence. Args: as in `decode`.
    """
    decoded = decode(network, memory, flat_logits, options, temperature)
    fields, flat_logits = decoded._asdict(), flat_logits / temperature["flat"]
    if options.k_best == 1:
        return fields
    decoder, sharpness = network.decoder, temperature["seq2seq"]
    sets = likeliest_sets(decoder, memory, flat_logits, options, sharpness, options.k_best)
    answer = decoded.code_ids.sort(-1).values[:, None]
    is_answer = (sets.sort(-1).values == answer).all(-1)
    place = is_answer.int().argsort(dim=1, stable=True)[:, : options.k_best - 1]  # the others
    sets = sets.gather(1, place[..., None].expand(-1, -1, sets.shape[2]))
    probability = (1 - options.share) * set_probability(decoder, memory, sets, sharpness)
    probability = probability + options.share * flat_set_log_probability(flat_logits, sets).exp()
    probability, place = probability.sort(dim=1, descending=True, stable=True)
    sets = sets.gather(1, place[..., None].expand_as(sets))
    return {**fields, "next_ids": sets, "next_confidence": probability}


def decode_flat(logits: Tensor, max_codes: int) -> Decoded:
    """The likeliest code and up to max_codes - 1 more with probability 0.5 or higher; codes count
    as independent."""
    top, code_ids = logits.topk(min(max_codes, logits.shape[1]), dim=1)
    code_ids[:, 1:][top[:, 1:].sigmoid() < 0.5] = NONE
    of_set = flat_set_log_probability(logits, code_ids[:, None])[:, 0].exp()
    code_ids = F.pad(code_ids, (0, max_codes - code_ids.shape[1]), value=NONE)
    return Decoded(code_ids, flat_code_probability(logits, code_ids), of_set)


def beam_search(
    decoder: BlockDecoder,
    memory: Memory,
    beam_size: int,
    temperature: float = 1.0,
    num_results: int = 1,
) -> Beams:
    """Beam search that keeps the likeliest `beam_size` prefixes at every position.

    A record stops when its best `num_results` hypotheses are finished: as longer sequences are
    never likelier, no other hypothesis can overtake them.
    """
    trie, device = decoder.trie, memory.hidden.device
    shape = (len(memory.hidden), beam_size, trie.max_codes)
    final_ids = torch.full(shape, NONE, device=device)
    final_nats = in_float32(memory.hidden).new_zeros(shape)
    final_scores = final_nats.new_full(shape[:2], -math.inf)
    final_lost = final_scores[:, 0].clone()

    rows = torch.arange(shape[0], device=device)  # unfinished records
    code_ids, code_nats, scores = final_ids.clone(), final_nats.clone(), final_scores.clone()
    scores[:, 0] = 0.0  # all beams start from one empty prefix
    lost = final_lost.clone()  # log-probability of the likeliest dropped prefix
    nodes = torch.zeros(shape[:2], dtype=torch.long, device=device)
    symbols, is_done = torch.full_like(nodes, BEGIN), torch.zeros_like(nodes, dtype=torch.bool)
    cache = decoder.start(memory)

    def keep(which: Tensor, scores: Tensor, lost: Tensor) -> None:
        final_ids[rows[which]], final_nats[rows[which]] = code_ids[which], code_nats[which]
        final_scores[rows[which]], final_lost[rows[which]] = scores[which], lost[which]

    for position in range(trie.max_codes * trie.block_size):
        block, depth = divmod(position, trie.block_size)
        if depth == 0:
            nodes = torch.zeros_like(nodes)
        logits = decoder.step(symbols.flatten(), nodes.flatten(), cache)
        legal = trie.legal(nodes, code_ids[..., :block], depth, block)
        legal[..., EMPTY] |= is_done  # any symbol will do: `stay` replaces finished beams' steps
        step = legal_log_softmax(logits.view(legal.shape), legal, temperature)
        stay = torch.full_like(step[0, 0], -math.inf)
        stay[PAD] = 0.0
        step = torch.where(is_done[..., None], stay, step)
        grown = (scores[..., None] + step).flatten(1)  # [B, W x V]
        scores, choice = grown.topk(beam_size + 1, dim=1)
        lost = torch.maximum(lost, scores[:, beam_size])
        scores, choice = scores[:, :beam_size], choice[:, :beam_size]
        beam, symbols = choice // step.shape[-1], choice % step.shape[-1]
        added = step.flatten(1).gather(1, choice)

        offset = torch.arange(len(beam), device=device)[:, None] * beam_size
        cache.reorder((beam + offset).flatten())
        wide = beam[..., None].expand_as(code_ids)
        code_ids, code_nats = code_ids.gather(1, wide), code_nats.gather(1, wide)
        nodes, is_done = nodes.gather(1, beam), is_done.gather(1, beam)
        may_end = depth == 0 and block > 0
        if may_end:
            is_done = is_done | (symbols == EMPTY)
        writes = ~is_done & scores.isfinite()
        code_nats[..., block] -= torch.where(writes, added, 0.0)
        nodes = torch.where(writes, trie.next_node[nodes, symbols], 0)
        if depth == trie.block_size - 1:
            code_ids[..., block] = torch.where(writes, trie.leaf_code[nodes], NONE)

        if not may_end:
            continue
        is_over = (is_done | ~scores.isfinite())[:, :num_results].all(dim=1)
        if bool(is_over.any()):
            unfinished = torch.maximum(lost, scores.masked_fill(is_done, -math.inf).amax(1))
            keep(is_over, scores.masked_fill(~is_done, -math.inf), unfinished)
            open_rows = (~is_over).nonzero().squeeze(1)
            cache.keep_records(open_rows, beam_size)
            rows, code_ids, code_nats, scores = (
                x[open_rows] for x in (rows, code_ids, code_nats, scores)
            )
            nodes, symbols, is_done, lost = (x[open_rows] for x in (nodes, symbols, is_done, lost))
            if len(open_rows) == 0:
                break
    # All blocks are written: beams that no empty block closed are complete, too.
    keep(torch.ones_like(rows, dtype=torch.bool), scores, lost)
    return Beams(final_ids, final_nats, final_scores, final_lost)


def likeliest_sets(
    decoder: BlockDecoder,
    memory: Memory,
    flat_logits: Tensor,
    options: DecodingOptions,
    temperature: float,
    num_sets: int = 1,
) -> Tensor:
    """The N sets of the highest score, best first [B, N, K], padded with NONE.

    The score is the weighted geometric mean of both heads' probabilities of the set. Beams are
    widened until no other set can score higher. An upper bound of another set's score follows from
    two limits: by the decoder, the probability of the best dropped prefix for each order of its
    codes, and the probability that all candidates leave over; by the flat head, the best set of its
    size. If `MOST_BEAMS` hypotheses or `MOST_ORDERS` orders do not prove it, as can happen with
    several codes per record, the best candidates are returned.
    """
    rows, width = torch.arange(len(flat_logits), device=flat_logits.device), options.beam_size
    width = max(width, num_sets)
    most_beams = min(MOST_BEAMS, MOST_ORDERS // math.factorial(decoder.trie.max_codes))
    sets = torch.full((len(rows), num_sets, decoder.trie.max_codes), NONE, device=rows.device)
    while len(rows):
        uncertain = []
        for some in rows.split(max(1, HYPOTHESES_AT_ONCE // width)):
            records = (memory.select(some), flat_logits[some])
            sets[some], is_certain = _best_candidates(
                decoder, *records, options, temperature, width, num_sets
            )
            uncertain.append(some[~is_certain])
        width *= WIDENING
        rows = torch.cat(uncertain) if width <= most_beams else rows[:0]
    return sets


def _best_candidates(
    decoder: BlockDecoder,
    memory: Memory,
    flat_logits: Tensor,
    options: DecodingOptions,
    temperature: float,
    width: int,
    num_sets: int,
) -> tuple[Tensor, Tensor]:
    """Return the best sets [B, N, K] among the beams and the flat head's likeliest codes, and
    whether no other set can score higher [B] bool."""
    trie, share = decoder.trie, options.share
    # Widened beams run to the end, so that `lost` is -inf once they hold every sequence.
    num_results = width if width > options.beam_size else num_sets
    beams = beam_search(decoder, memory, width, temperature, num_results)
    flat_set = decode_flat(flat_logits, trie.max_codes).code_ids
    top = flat_logits.topk(min(max(width + 1, trie.max_codes), trie.num_codes), dim=1).indices
    singles = F.pad(top[:, :width, None], (0, trie.max_codes - 1), value=NONE)
    candidates = torch.cat([beams.code_ids, flat_set[:, None], singles], dim=1)  # [B, W, K]
    ordered = candidates.sort(dim=-1).values
    is_same = (ordered[:, :, None] == ordered[:, None]).all(-1)  # [B, W, W]
    # Equal sets differ in their probabilities by rounding: only the first of them is kept.
    is_new = (candidates >= 0).any(-1) & ~is_same.tril(-1).any(-1)
    candidates = candidates.masked_fill(~is_new[..., None], NONE)
    flat_log = flat_set_log_probability(flat_logits, candidates).clamp(min=LEAST_LOG)

    def vote(probability: Tensor) -> Tensor:
        votes = share * flat_log + (1 - share) * probability.log().clamp(min=LEAST_LOG)
        return votes.masked_fill(~is_new, -math.inf)

    # The beams hold some orders of each set, and no other order exceeds `lost`. These two bounds
    # tell which sets can be among the best: only those are scored in all orders.
    of_beams, lost = beams.log_probability.exp(), beams.lost.exp()[:, None]
    is_order = is_same[:, :, :width] & (of_beams > 0)[:, None] & is_new[..., None]
    least = (is_order * of_beams[:, None]).sum(-1)
    num_orders = ((candidates >= 0).sum(-1) + 1.0).lgamma().exp().round()
    most = least + (num_orders - is_order.sum(-1)) * lost
    num_best = min(num_sets, candidates.shape[1])
    floor = vote(least).topk(num_best, dim=1).values[:, -1:] - ROUNDING
    is_close = is_new & (vote(most) >= floor)
    close = candidates.masked_fill(~is_close[..., None], NONE)
    exact = set_probability(decoder, memory, close, temperature)
    decoder_probability = torch.where(is_close, exact, least)
    best, place = vote(decoder_probability).topk(num_best, dim=1)
    sets = candidates.gather(1, place[..., None].expand(-1, -1, trie.max_codes))

    rest = (1 - decoder_probability.sum(1)).clamp(min=ROUNDING).log()
    bound = torch.full_like(rest, -math.inf)
    for size in range(1, min(trie.max_codes, trie.num_codes) + 1):
        first = top[:, width:] if size == 1 else top
        if first.shape[1] >= size:
            of_flat = flat_set_log_probability(flat_logits, first[:, None, :size])[:, 0]
            of_decoder = torch.minimum(beams.lost + math.lgamma(size + 1), rest)
            of_both = share * of_flat + (1 - share) * of_decoder.clamp(min=LEAST_LOG)
            bound = torch.maximum(bound, of_both)
    is_certain = (best[:, -1] >= bound - ROUNDING) | beams.lost.isinf()
    return F.pad(sets, (0, 0, 0, num_sets - sets.shape[1]), value=NONE), is_certain


TERMS = ("seq2seq", "flat")  # each has a temperature
# Temperatures to try, evenly spaced in their logarithm.
_LOGS = torch.linspace(math.log(0.35), math.log(5.0), 13, dtype=torch.float64, device="cpu")
TEMPERATURES = _LOGS.exp()


class TemperatureSearch(Metric):
    """Weighted nats at each temperature; `compute` returns the best temperature."""

    nats: Tensor

    def __init__(self) -> None:
        super().__init__()
        zeros = torch.zeros(len(TEMPERATURES), dtype=torch.float64)
        self.add_state("nats", zeros, dist_reduce_fx="sum")

    def update(self, nats: Tensor, weight: Tensor) -> None:
        """Adds records. Args: nats [B, temperatures], weight [B]."""
        nats = nats.double().masked_fill((weight == 0)[:, None], 0.0)
        self.nats = self.nats + (nats * weight.double()[:, None]).sum(0)

    def compute(self) -> Tensor:
        """Temperature with the fewest nats, [] float64; 1 before any record."""
        if not self.nats.any():
            return torch.ones((), dtype=torch.float64)
        steps = TEMPERATURES.log()
        best = int(self.nats.argmin().clamp(1, len(steps) - 2))
        below, at, above = self.nats[best - 1 : best + 2].unbind()
        bend = below - 2 * at + above
        shift = (0.5 * (below - above) / bend).clamp(-1, 1) if bend > 0 else torch.zeros_like(at)
        return (steps[best] + shift.cpu() * (steps[1] - steps[0])).exp()


@torch.no_grad()
def nats_by_temperature(
    network: OccupationNetwork, memory: Memory, flat_logits: Tensor, batch: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Nats of a batch's true codes [B, temperatures]: "seq2seq", in the likeliest order, and
    "flat". Args: network: in eval mode."""
    trie = network.trie
    code_ids = batch["code_ids"]
    ordered = best_orders(network.decoder, memory, code_ids, batch["num_with_codes"])
    targets = trie.targets(ordered)
    logits = network.decoder(targets, memory)
    legal = trie.legal_targets(ordered, targets.shape[1])
    temperatures = TEMPERATURES.tolist()
    seq2seq = [-_of_targets(logits, targets, legal, value).sum(1) for value in temperatures]
    flat = [flat_nats(flat_logits / value, code_ids) for value in temperatures]
    return {"seq2seq": torch.stack(seq2seq, 1), "flat": torch.stack(flat, 1)}


SHIFT = 12  # low bits of a float32 to drop; sign, exponent and 11 bits of the fraction stay
NUM_BINS = (0x3F800000 >> SHIFT) + 1  # up to 1.0
LEAST_BEAMS = 20


@torch.no_grad()
def code_marginals(
    network: OccupationNetwork, memory: Memory, flat_logits: Tensor, options: DecodingOptions
) -> Tensor:
    """Probability that each code belongs to a text [B, C] float32, by the method's heads.

    The decoder's probability is the sum over the beams that hold the code. Logits are not divided
    by temperatures, as the validation that finds a limit finds those only at the same time.
    """
    share = options.share
    marginals = share * flat_logits.float().sigmoid()
    if share < 1:
        width = max(options.beam_size, LEAST_BEAMS)
        beams = beam_search(network.decoder, memory, width, num_results=width)
        num_codes = network.trie.num_codes
        column = torch.where(beams.code_ids < 0, num_codes, beams.code_ids).flatten(1)
        weight = beams.log_probability.exp()[..., None].expand_as(beams.code_ids).flatten(1)
        found = weight.new_zeros(len(weight), num_codes + 1).scatter_add(1, column, weight)
        marginals = marginals + (1 - share) * found[:, :num_codes].float()
    return marginals.clamp(0, 1)


class PlausibleSets(Metric):
    """Search for the limit of sets of codes that hold all true codes in a given share of records,
    the coverage.

    Split conformal prediction: a set holds every code whose probability reaches a limit. For each
    of n held-out records, take the probability of its least likely true code; the limit is the k-th
    smallest of these, k = floor((1 - coverage) (n + 1)). For records from the same distribution,
    the sets then hold all true codes in a share of at least `coverage`, for any model. The limit
    holds for marginals from `code_marginals` with the options that `name` tells apart.

    A bin counts the probabilities that agree in the first 20 bits, less than 0.05 % apart. Counts
    are exact on any number of devices; the limit is a bin's lowest value, so never too high.

    Source: Vovk, Gammerman and Shafer 2005, "Algorithmic Learning in a Random World"; Angelopoulos
    and Bates 2023, "Conformal Prediction: A Gentle Introduction".
    """

    counts: Tensor

    def __init__(self, options: DecodingOptions) -> None:
        super().__init__()
        self.coverage, share = options.coverage or 0.0, options.share
        self.name = f"{self.coverage:g}" + f" at flat_share {share:g}" * (share != 0.5)
        zeros = torch.zeros(NUM_BINS, dtype=torch.float64)
        self.add_state("counts", zeros, dist_reduce_fx="sum")

    def update(self, probability: Tensor, weight: Tensor) -> None:
        """Adds records. Args: probabilities of their least likely true code [B] float32, and
        weights [B], 0 or 1."""
        bins = (probability.contiguous().view(torch.int32) >> SHIFT).long()
        self.counts = self.counts.double().index_add_(0, bins, weight.double())

    def compute(self) -> Tensor:
        """The limit [] float32; 0, which every code reaches, if there are too few records."""
        number = round(float(self.counts.sum()))
        place = math.floor(round((1 - self.coverage) * (number + 1), 6))
        if place < 1:
            return torch.zeros(())
        found = int((self.counts.cumsum(0) < place).sum())
        return torch.tensor([found << SHIFT], dtype=torch.int32).view(torch.float32)[0]

    def limit(self, recipe: Mapping[str, Any]) -> float:
        """The limit in a checkpoint's recipe; ValueError if it has none for this coverage."""
        limits = recipe.get("set_limits", {})
        if self.name not in limits:
            raise ValueError(
                f"decoding.coverage is {self.name}, and the checkpoint has "
                f"{'a limit for ' + ', '.join(limits) if limits else 'no limit for sets'}: train "
                "with that coverage, or validate once (fit with --model.init_from=CKPT "
                "--model.optimizer.lr=0 --trainer.max_steps=1 --trainer.val_check_interval=1)."
            )
        return limits[self.name]


def packed(is_in: Tensor) -> Tensor:
    """Return sets of codes [B, C] bool as [B, ceil(C / 8)] uint8, one bit per code, lowest bit
    first."""
    bits = F.pad(is_in, (0, -is_in.shape[1] % 8)).view(len(is_in), -1, 8)
    values = bits * (1 << torch.arange(8, device=bits.device))
    return values.sum(-1).to(torch.uint8)


def least_likely(marginals: Tensor, code_ids: Tensor) -> Tensor:
    """Probability of each record's least likely true code [B]. Args: code_ids [B, K], padded with
    NONE."""
    found = marginals.gather(1, code_ids.clamp(min=0))
    return found.masked_fill(code_ids < 0, 1.0).amin(1)
