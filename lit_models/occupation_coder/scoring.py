"""Probabilities of given codes and of sets of codes, by the rules of decoding.

Shapes: B batch, N candidate sets per record, K blocks, T positions, V symbols, O orders, C codes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_models.occupation_coder.loss import all_orders
from lit_models.occupation_coder.network import BlockDecoder, Memory, widened
from lit_models.occupation_coder.trie import NONE

_ROWS_AT_ONCE = 4096  # hypotheses scored in one pass: bounds the memory of 120 orders per record


def set_probability(
    decoder: BlockDecoder, memory: Memory, candidates: Tensor, temperature: float = 1.0
) -> Tensor:
    """Probability of each set, summed over the orders of its codes [B, N]; 0 for the empty set.

    Args:
        decoder: writes the codes.
        memory: of B records.
        candidates: distinct codes [B, N, K], NONE on the right.
        temperature: divides the logits.
    """
    num_sets = candidates.shape[1]
    code_ids = candidates.flatten(0, 1)
    num_codes = (code_ids >= 0).sum(1)
    probability = widened(memory.hidden).new_zeros(len(code_ids))
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
    """Probability of each code given the ones before it [B, K], 0 where there is none.

    Args:
        decoder: writes the codes.
        memory: of B records.
        code_ids: [B, K], NONE on the right.
        temperature: divides the logits.
    """
    trie = decoder.trie
    steps = step_log_probability(decoder, memory, code_ids, temperature)
    size = code_ids.shape[1] * trie.block_size
    steps = F.pad(steps, (0, max(0, size - steps.shape[1])))[:, :size]
    per_code = steps.view(len(code_ids), -1, trie.block_size).sum(-1)
    return per_code.exp() * (code_ids >= 0)


def step_log_probability(
    decoder: BlockDecoder, memory: Memory, code_ids: Tensor, temperature: float = 1.0
) -> Tensor:
    """Log-probability of each symbol among the legal ones [B x O, T], 0 beyond the last.

    Args:
        decoder: writes the codes.
        memory: of B records.
        code_ids: codes in order [B x O, K], NONE on the right.
        temperature: divides the logits.
    """
    most_codes = int((code_ids >= 0).sum(1).max()) if len(code_ids) else 0
    targets = decoder.trie.targets(code_ids[:, :most_codes])
    legal = decoder.trie.legal_targets(code_ids, targets.shape[1])
    steps = legal_log_softmax(decoder(targets, memory), legal, temperature)
    chosen = steps.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(targets == NONE, 0.0, chosen)


def flat_set_log_probability(logits: Tensor, candidates: Tensor) -> Tensor:
    """Log-probability of sets under independent codes, given that there is a code [B, N].

    Args:
        logits: [B, C].
        candidates: [B, N, K], NONE where there is no code; -inf for the empty set.
    """
    dtype, logits = (
        logits.dtype,
        logits.double(),
    )  # a sum over the whole code book loses digits in float32
    nothing = F.logsigmoid(-logits).sum(1, keepdim=True)
    is_code = candidates >= 0
    chosen = logits.gather(1, candidates.clamp(min=0).flatten(1)).view(candidates.shape)
    log_probability = nothing + (chosen * is_code).sum(-1)
    something = torch.log(-torch.expm1(nothing.clamp(max=-1e-12)))
    return (log_probability - something).masked_fill(~is_code.any(-1), -math.inf).to(dtype)


def legal_log_softmax(logits: Tensor, legal: Tensor, temperature: float) -> Tensor:
    """Log-probabilities over the legal symbols, -inf elsewhere [..., V]."""
    return (logits / temperature).masked_fill(~legal, -math.inf).log_softmax(-1)
