"""Decoding beside an exhaustive search over a tiny code book."""

import itertools
import math

import pytest
import torch

from lit_models.occupation_coder import decoding
from lit_models.occupation_coder.network import EMPTY, END, NONE, BlockDecoder, CodeTrie, Memory
from tests.occupation_coder.tiny import network_of, trie_of

TEMPERATURE = {"seq2seq": 1.0, "flat": 1.0}


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.fixture
def network():
    network = network_of().float()
    # An untrained network is nearly uniform, and ties would hide bugs.
    for parameter in network.decoder.parameters():
        parameter.mul_(2.0)
    network.decoder.node_output.weight.normal_()
    network.decoder.node_summary.weight.normal_()
    network.flat.nodes.weight.normal_(std=2.0)
    network.flat.bias.fill_(-1.0)
    return network


@pytest.fixture
def texts(network):
    ids = torch.tensor([[97, 98, 99, 0], [120, 121, 0, 0], [110, 111, 112, 113], [97, 0, 0, 0]])
    return network(ids, ids > 0, torch.tensor([0, 1, 0, 0]))


def padded(sets, size: int) -> torch.Tensor:
    return torch.tensor([[*codes, *[NONE] * (size - len(codes))] for codes in sets])


def chosen(num_codes: int, max_codes: int, choose=itertools.combinations) -> list[tuple[int, ...]]:
    """Every choice of 1 to max_codes codes; of `permutations` in every order."""
    return [c for size in range(1, max_codes + 1) for c in choose(range(num_codes), size)]


def scored(network, memory: Memory, record: int, temperature: float = 1.0):
    every = padded(chosen(4, 3, itertools.permutations), 3)
    one = memory.select(torch.tensor([record]))
    return every, decoding.step_log_probability(network.decoder, one, every, temperature).sum(1)


def test_probabilities_of_all_sets_sum_to_one_for_both_heads(network, texts):
    memory, logits = texts
    few = padded(chosen(4, 3), 3).expand(4, -1, -1)
    total = decoding.set_probability(network.decoder, memory, few).sum(1)
    torch.testing.assert_close(total, torch.ones(4), atol=1e-5, rtol=0)
    every = padded(chosen(4, 4), 4).expand(4, -1, -1)
    flat = decoding.flat_set_log_probability(logits, every).exp().sum(1)
    torch.testing.assert_close(flat, torch.ones(4), atol=1e-5, rtol=0)


def test_a_set_has_the_probability_of_all_its_orders(network, texts):
    every, log_probability = scored(network, texts[0], 1)
    expected = sum(
        log_probability[i].exp() for i, row in enumerate(every) if set(row.tolist()) == {0, 2, 3}
    )
    memory = texts[0].select(torch.tensor([1]))
    got = decoding.set_probability(network.decoder, memory, torch.tensor([[[3, 0, 2]]]))
    torch.testing.assert_close(got[0, 0], expected)


def test_a_wide_beam_finds_what_exhaustive_search_finds(network, texts):
    beams = decoding.beam_search(network.decoder, texts[0], beam_size=40, num_results=40)
    for record in range(4):
        every, log_probability = scored(network, texts[0], record)
        order = log_probability.argsort(descending=True)
        torch.testing.assert_close(beams.code_ids[record], every[order])
        torch.testing.assert_close(beams.log_probability[record], log_probability[order])


def test_a_beam_that_stops_early_has_the_same_best_as_one_that_does_not(network, texts):
    early = decoding.beam_search(network.decoder, texts[0], beam_size=5)
    late = decoding.beam_search(network.decoder, texts[0], beam_size=5, num_results=5)
    torch.testing.assert_close(early.code_ids[:, 0], late.code_ids[:, 0])
    torch.testing.assert_close(early.log_probability[:, 0], late.log_probability[:, 0])


def greedy_without_cache(network, memory: Memory) -> list[int]:
    """The codes of one record, each symbol predicted from the whole prefix."""
    trie, codes, written = network.trie, [], []
    for block in range(trie.max_codes):
        node = torch.tensor([0])
        for depth in range(trie.block_size):
            logits = network.decoder(torch.tensor([[*written, END]]), memory)[0, -1]
            legal = trie.legal(node, torch.tensor([[NONE, *codes]]), depth, block)[0]
            symbol = int(logits.masked_fill(~legal, -math.inf).argmax())
            if symbol == EMPTY:
                return codes
            written.append(symbol)
            node = trie.next_node[node, symbol]
        codes.append(int(trie.leaf_code[node]))
    return codes


def test_a_beam_of_one_equals_greedy_search_without_a_cache(network, texts):
    best = decoding.beam_search(network.decoder, texts[0], beam_size=1)
    for record in range(4):
        slow = greedy_without_cache(network, texts[0].select(torch.tensor([record])))
        assert [code for code in best.code_ids[record, 0].tolist() if code >= 0] == slow
        every, log_probability = scored(network, texts[0], record)
        row = (every == best.code_ids[record, 0]).all(1).nonzero()[0, 0]
        torch.testing.assert_close(best.log_probability[record, 0], log_probability[row])


def test_codes_of_a_record_are_distinct_and_the_first_block_is_never_empty(network, texts):
    network.decoder.output.bias[3] = -20.0  # the empty answer is unlikely
    never = decoding.beam_search(network.decoder, texts[0], 1).code_ids[:, 0]
    network.decoder.output.bias[3] = 20.0
    always = decoding.beam_search(network.decoder, texts[0], 1).code_ids[:, 0]
    assert (never >= 0).all()
    assert all(len(set(row.tolist())) == 3 for row in never)
    assert (always[:, 0] >= 0).all()
    assert (always[:, 1:] == NONE).all()


def test_a_record_may_have_all_codes_of_a_book_smaller_than_the_number_of_blocks():
    torch.manual_seed(0)
    trie = trie_of(3, [[4], [5]])
    decoder = BlockDecoder(8, trie, width=8, num_layers=1, num_heads=2, feed_forward=8).eval()
    memory = Memory(torch.randn(2, 3, 8), torch.ones(2, 3, dtype=torch.bool))
    decoder.output.bias[3] = -20.0
    best = decoding.beam_search(decoder, memory, 1)
    beams = decoding.beam_search(decoder, memory, 3)
    assert (best.code_ids[:, 0, :2] >= 0).all()
    assert (best.code_ids[:, 0, 2] == NONE).all()
    torch.testing.assert_close(beams.code_ids[:, 0], best.code_ids[:, 0])


@pytest.mark.parametrize("method", ["flat", "greedy", "beam", "mixed"])
def test_batch_order_changes_nothing(network, texts, method):
    memory, logits = texts
    options = decoding.DecodingOptions(method=method, beam_size=3)
    order = torch.tensor([2, 0, 3, 1])
    one = decoding.decode(network, memory, logits, options, TEMPERATURE)
    two = decoding.decode(network, memory.select(order), logits[order], options, TEMPERATURE)
    torch.testing.assert_close(one.code_ids[order], two.code_ids)
    torch.testing.assert_close(one.set_confidence[order], two.set_confidence)
    torch.testing.assert_close(one.code_confidence[order], two.code_confidence)


@pytest.mark.parametrize("method", ["greedy", "beam"])
def test_confidences_are_the_probabilities_of_codes_and_set(network, texts, method):
    memory, logits = texts
    out = decoding.decode(
        network, memory, logits, decoding.DecodingOptions(method, 5), {"seq2seq": 2.0, "flat": 1.0}
    )
    codes = decoding.code_probability(network.decoder, memory, out.code_ids, 2.0)
    sets = decoding.set_probability(network.decoder, memory, out.code_ids[:, None], 2.0)[:, 0]
    torch.testing.assert_close(out.code_confidence, codes)
    torch.testing.assert_close(out.set_confidence, sets)


@pytest.mark.parametrize(("num_codes", "max_codes"), [(4, 3), (40, 1), (12, 2)])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.75, 1.0])
def test_the_vote_finds_the_sets_that_an_exhaustive_search_finds(num_codes, max_codes, share):
    torch.manual_seed(num_codes)
    table = [[4 + i // 10, 4 + i % 10, 4 + i % 3] for i in range(num_codes)]
    trie = CodeTrie(table, 14, max_codes)
    decoder = BlockDecoder(16, trie, width=16, num_layers=1, num_heads=2, feed_forward=32).eval()
    memory = Memory(torch.randn(12, 3, 16), torch.ones(12, 3, dtype=torch.bool))
    logits = 2 * torch.randn(12, num_codes) - 2
    for parameter in decoder.parameters():
        parameter.mul_(2.0)
    decoder.node_summary.weight.normal_()
    every = chosen(num_codes, max_codes)
    sets = padded(every, max_codes).expand(12, -1, -1)
    flat = decoding.flat_set_log_probability(logits, sets)
    sequence = decoding.set_probability(decoder, memory, sets).log()
    votes = share * flat + (1 - share) * sequence
    best = votes.topk(3, dim=1)
    options = decoding.DecodingOptions("mixed", beam_size=1, flat_share=share)
    likeliest = decoding.likeliest_sets(decoder, memory, logits, options, 1.0, num_sets=3)
    place = {frozenset(c): i for i, c in enumerate(every)}
    for record in range(12):
        found = [frozenset(row) - {NONE} for row in likeliest[record].tolist()]
        of_found = torch.stack([votes[record, place[one]] for one in found])
        torch.testing.assert_close(of_found, best.values[record], atol=1e-4, rtol=0)


def test_only_sets_that_can_win_are_scored_in_all_orders(network, texts, monkeypatch):
    counts, plain = [], decoding.set_probability

    def counted(decoder, memory, sets, temperature):
        counts.append((sets >= 0).any(-1).sum(1).tolist())
        return plain(decoder, memory, sets, temperature)

    monkeypatch.setattr(decoding, "set_probability", counted)
    options = decoding.DecodingOptions("mixed", beam_size=40)  # beams hold all 14 sets
    decoding.likeliest_sets(network.decoder, *texts, options, 1.0, num_sets=3)
    assert counts == [[3, 3, 3, 3]]


@pytest.mark.parametrize("method", ["flat", "greedy", "beam", "mixed"])
def test_the_next_sets_follow_by_their_probability(network, texts, method):
    memory, logits = texts
    options = decoding.DecodingOptions(method, 64, k_best=4)
    fields = decoding.answers(network, memory, logits, options, TEMPERATURE)
    sets = torch.cat([fields["code_ids"][:, None], fields["next_ids"]], 1)
    share = {"flat": 1.0, "mixed": 0.5}.get(method, 0.0)
    expected = (1 - share) * decoding.set_probability(network.decoder, memory, sets)
    expected += share * decoding.flat_set_log_probability(logits, sets).exp()
    torch.testing.assert_close(fields["set_confidence"], expected[:, 0])
    torch.testing.assert_close(fields["next_confidence"], expected[:, 1:])
    assert (fields["next_confidence"].diff(dim=1) <= 0).all()
    for record in range(4):
        named = [frozenset(row) - {NONE} for row in sets[record].tolist()]
        assert len(set(named)) == 4
        if method == "beam":  # wide enough for all sets, so none left out is likelier
            rest = padded(set(map(frozenset, chosen(4, 3))) - set(named), 3)[None]
            one = memory.select(torch.tensor([record]))
            left_out = decoding.set_probability(network.decoder, one, rest).max()
            assert left_out <= expected[record].min() + 1e-6


def test_flat_takes_the_best_code_and_those_of_one_half_and_above():
    logits = torch.tensor([[-3.0, 2.0, 1.0, -1.0], [-5.0, -4.0, -6.0, -7.0]])
    out = decoding.decode_flat(logits, max_codes=3)
    assert out.code_ids.tolist() == [[1, 2, NONE], [1, NONE, NONE]]
    p = logits.double().sigmoid()
    some = 1 - (1 - p).prod(1)  # every answer has a code
    expected = (1 - p[0, 0]) * p[0, 1] * p[0, 2] * (1 - p[0, 3]) / some[0]
    assert out.set_confidence[0].item() == pytest.approx(expected.item())
    codes = torch.stack([p[0, 1], p[0, 2], p[1, 1]]) / some[[0, 0, 1]]
    torch.testing.assert_close(out.code_confidence[[0, 0, 1], [0, 1, 0]].double(), codes)
    assert out.code_confidence[1, 0] > out.set_confidence[1] > 0.5 > p[1, 1]
