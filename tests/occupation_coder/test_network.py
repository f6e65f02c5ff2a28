"""The encoder and the decoder: padding, batch order and symbols still to come change nothing."""

import pytest
import torch

from lit_models.occupation_coder.encoders import CharacterEncoder, NgramTable, frame
from lit_models.occupation_coder.network import (
    BEGIN,
    EMPTY,
    NONE,
    BlockDecoder,
    CodeTrie,
    Memory,
    OccupationNetwork,
)

TABLE = [[4, 4, 5], [4, 5, 2], [5, 4, 4], [5, 4, 5]]


def small_network() -> OccupationNetwork:
    torch.manual_seed(0)
    trie = CodeTrie.from_table(TABLE, vocab_size=6, max_codes=3)
    encoder = CharacterEncoder(3, width=16, num_layers=2, num_heads=2, num_buckets=128)
    decoder = BlockDecoder(16, trie, width=16, num_layers=2, num_heads=2, feed_forward=32)
    torch.nn.init.normal_(decoder.node_output.weight)
    torch.nn.init.normal_(decoder.node_summary.weight)
    network = OccupationNetwork(encoder, decoder).double().eval()
    torch.nn.init.normal_(network.flat.nodes.weight)
    return network


def padded(texts: list[str], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [[ord(c) for c in text] + [0] * (size - len(text)) for text in texts]
    ids = torch.tensor(rows)
    return ids, ids > 0


@torch.no_grad()
def test_padding_and_neighbours_never_change_an_output():
    network = small_network()
    texts = ["farm servant", "", "smed", "農夫"]
    language = torch.tensor([1, 0, 2, 0])
    memory, logits = network(*padded(texts, 40), language)
    for row, text in enumerate(texts):
        ids, mask = padded([text], max(len(text), 1))
        alone, alone_logits = network(ids, mask, language[row : row + 1])
        length = int(alone.mask.sum())
        torch.testing.assert_close(memory.hidden[row, :length], alone.hidden[0, :length])
        assert int(memory.mask[row].sum()) == length
        torch.testing.assert_close(logits[row], alone_logits[0], rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_garbage_under_the_mask_changes_nothing():
    network = small_network()
    ids, mask = padded(["farmer", "smith"], 9)
    dirty = torch.where(mask, ids, 77)
    language = torch.tensor([1, 1])
    torch.testing.assert_close(network(ids, mask, language)[1], network(dirty, mask, language)[1])


@torch.no_grad()
def test_the_language_and_every_letter_matter():
    network = small_network()
    ids, mask = padded(["smed", "smed", "smid"], 4)
    logits = network(ids, mask, torch.tensor([1, 2, 1]))[1]
    assert (logits[0] - logits[1]).abs().max() > 1e-4
    assert (logits[0] - logits[2]).abs().max() > 1e-4


@torch.no_grad()
def test_symbols_still_to_come_change_no_logits_before_them():
    network = small_network()
    memory, _ = network(*padded(["cooper"], 6), torch.tensor([1]))
    one = torch.tensor([[4, 4, 5, 5, 4, 4, EMPTY]])
    two = torch.tensor([[4, 4, 5, 5, 4, 5, NONE]])
    first, second = network.decoder(one, memory), network.decoder(two, memory)
    torch.testing.assert_close(first[:, :6], second[:, :6])
    assert (first[:, 6] - second[:, 6]).abs().max() > 1e-4


@torch.no_grad()
def test_a_cached_step_gives_the_logits_of_the_whole_prefix():
    network = small_network()
    decoder, trie = network.decoder, network.trie
    memory, _ = network(*padded(["cooper", "hatter and mercer"], 20), torch.tensor([1, 0]))
    targets = trie.targets(torch.tensor([[0, 2, 1], [3, 0, 2]]))
    whole = decoder(targets, memory)
    cache = decoder.start(memory)
    symbols, nodes = torch.full((2,), BEGIN), torch.zeros(2, dtype=torch.long)
    for position in range(targets.shape[1]):
        if position % trie.block_size == 0:
            nodes = torch.zeros_like(nodes)
        logits = decoder.step(symbols, nodes, cache)
        torch.testing.assert_close(logits, whole[:, position])
        symbols = targets[:, position]
        nodes = trie.next_node[nodes, symbols]


@torch.no_grad()
def test_hypotheses_of_one_record_share_its_memory():
    network = small_network()
    memory, _ = network(*padded(["cooper", "hatter"], 6), torch.tensor([1, 0]))
    codes = torch.tensor([[0, 2], [2, 0], [1, 3], [3, 1]])  # two hypotheses for each record
    targets = network.trie.targets(codes)
    together = network.decoder(targets, memory)
    repeated = Memory(memory.hidden.repeat_interleave(2, 0), memory.mask.repeat_interleave(2, 0))
    torch.testing.assert_close(together, network.decoder(targets, repeated))


def test_ngrams_are_those_that_lie_inside_the_text():
    table = NgramTable(8, sizes=(2, 3), num_buckets=1 << 20, num_hashes=1)
    framed, lengths = frame(*padded(["abab", "ab"], 6))
    rows, inside = table.hashes(framed, lengths)
    assert inside[0].sum(0).tolist() == [5, 4]  # <abab> has 5 pairs and 4 triples
    assert inside[1].sum(0).tolist() == [3, 2]
    assert rows[0, 1, 0] == rows[0, 3, 0]  # "ab" twice
    assert rows[0, 1, 0] == rows[1, 1, 0]  # and in the other text
    assert rows[0, 1, 0] != rows[0, 2, 0]
    seen = rows[0][inside[0]].tolist() + rows[1][inside[1]].tolist()
    # <a ab ba b> <ab aba bab ab>, and the second text adds none
    assert len(set(seen)) == 8


def test_every_parameter_gets_a_gradient_in_both_heads():
    network = small_network()
    memory, logits = network(*padded(["cooper", "hatter"], 6), torch.tensor([1, 0]))
    output = network.decoder(network.trie.targets(torch.tensor([[0, 2], [1, NONE]])), memory)
    (output.square().sum() + logits.square().sum()).backward()
    assert [n for n, p in network.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CharacterEncoder(1, width=10, num_heads=4), "multiple of 2 x num_heads"),
        (lambda: NgramTable(8, (), 16), "ngram_sizes must be one or more numbers"),
        (
            lambda: BlockDecoder(8, CodeTrie.from_table(TABLE, 6, 2), width=10, num_heads=4),
            "width 10 must be a multiple of num_heads",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_mixed_precision_trains_both_heads():
    network = small_network().float().train()
    with torch.autocast("cpu", torch.bfloat16):
        memory, logits = network(*padded(["cooper", "hatter"], 6), torch.tensor([1, 0]))
        output = network.decoder(network.trie.targets(torch.tensor([[0, 2], [1, NONE]])), memory)
    assert output.dtype == logits.dtype == torch.float32
    (output.square().sum() + logits.square().sum()).backward()
    assert all(p.grad.isfinite().all() for p in network.parameters())
