"""Losses: by hand-worked numbers, against all orders, and independent of other records."""

import itertools
import math

import pytest
import torch

from lit_models.occupation_coder import loss
from lit_models.occupation_coder.network import NONE, BlockDecoder, CodeTrie, Memory
from tests.occupation_coder.tiny import batch_of, trie_of

TABLE = [[4, 4], [4, 5], [5, 4], [5, 5]]


class UniformDecoder(torch.nn.Module):
    """All symbols are equally likely: 6 symbols, log 6 nats each."""

    def __init__(self, trie: CodeTrie) -> None:
        super().__init__()
        self.trie = trie

    def forward(self, targets, memory):
        return torch.zeros(*targets.shape, 6)


def occupation_losses(memory, logits, decoder, batch, importance=1.0):
    """Return both terms as sums and counts."""
    losses = loss.record_losses(memory, logits, decoder, batch)
    return loss.summed(losses, batch["weight"], importance)


def memory_of(rows: int) -> Memory:
    torch.manual_seed(1)
    return Memory(torch.randn(rows, 4, 8).double(), torch.ones(rows, 4, dtype=torch.bool))


def orders_of(decoder: BlockDecoder, memory: Memory, codes: torch.Tensor) -> torch.Tensor:
    return loss.best_orders(decoder, memory, codes, batch_of(codes)["num_with_codes"])


def decoder_of(max_codes: int, dropout: float = 0.0) -> BlockDecoder:
    torch.manual_seed(0)
    trie = trie_of(max_codes, TABLE)
    decoder = BlockDecoder(8, trie, 8, num_layers=1, num_heads=2, feed_forward=16, dropout=dropout)
    torch.nn.init.normal_(decoder.node_output.weight)
    torch.nn.init.normal_(decoder.node_summary.weight)
    return decoder.double()


def test_nats_are_summed_over_the_symbols_of_a_record():
    trie = trie_of(2, TABLE)
    codes = torch.tensor([[0, NONE], [1, 2]])
    nats = loss.sequence_nats(UniformDecoder(trie), memory_of(2), codes)
    # two symbols and one <empty>; two full blocks and no <empty>
    assert nats.tolist() == pytest.approx([3 * math.log(6), 4 * math.log(6)])


def test_flat_nats_are_the_sum_over_the_code_book():
    logits = torch.tensor([[0.0, math.log(3.0), 0.0]])
    nats = loss.flat_nats(logits, torch.tensor([[1, NONE]]))
    assert nats.item() == pytest.approx(2 * math.log(2) - math.log(0.75))


def test_gaps_between_the_codes_of_a_record_close():
    codes = torch.tensor([[NONE, 2, NONE], [NONE, NONE, 1]])
    assert orders_of(decoder_of(3), memory_of(2), codes)[:, 0].tolist() == [2, 1]
    assert (orders_of(decoder_of(3), memory_of(2), codes)[:, 1:] == NONE).all()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_best_order_is_the_best_of_all_orders(size):
    decoder, memory = decoder_of(4), memory_of(3)
    codes = torch.tensor([[1, 0, 3, 2][:size], [3, *[NONE] * (size - 1)], [2, 3, 1, 0][:size]])
    ordered = orders_of(decoder, memory, codes)
    nats = loss.sequence_nats(decoder, memory, ordered)
    for row in (0, 2):
        one = memory.select(torch.tensor([row]))
        every = [
            loss.sequence_nats(decoder, one, torch.tensor([order])).item()
            for order in itertools.permutations(codes[row].tolist())
        ]
        assert nats[row].item() == pytest.approx(min(every), rel=1e-6)
        assert sorted(ordered[row].tolist()) == sorted(codes[row].tolist())
    assert ordered[1].tolist() == codes[1].tolist()


def test_the_search_over_orders_draws_no_random_numbers():
    decoder, memory = decoder_of(3, dropout=0.3), memory_of(3)
    state = torch.random.get_rng_state()
    orders_of(decoder, memory, torch.tensor([[0, 2], [1, NONE], [3, NONE]]))
    assert torch.equal(state, torch.random.get_rng_state())
    assert decoder.training


def test_a_record_of_two_codes_leaves_the_gradient_of_the_others_alone():
    gradients = []
    for first in ([0, 2], [0, NONE]):
        decoder, memory = decoder_of(3), memory_of(3)
        hidden = memory.hidden.requires_grad_()
        batch = batch_of(torch.tensor([first, [1, NONE], [3, NONE]]))
        torch.manual_seed(5)
        losses = occupation_losses(memory, torch.randn(3, 4), decoder, batch)
        losses["seq2seq"].total.backward()
        gradients.append(hidden.grad[1:].clone())
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_filler_counts_nowhere_even_if_it_is_infinite():
    decoder, memory = decoder_of(3), memory_of(2)
    logits = torch.tensor([[0.0] * 4, [float("inf")] * 4])
    codes = torch.tensor([[1, NONE], [2, 3]])
    with_filler = occupation_losses(
        memory, logits, decoder, batch_of(codes, torch.tensor([1.0, 0.0]))
    )
    alone = occupation_losses(
        memory.select(torch.tensor([0])), logits[:1], decoder, batch_of(codes[:1])
    )
    for term in ("seq2seq", "flat"):
        torch.testing.assert_close(with_filler[term].total, alone[term].total)
        assert with_filler[term].count == 1
