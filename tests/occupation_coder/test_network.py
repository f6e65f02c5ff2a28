"""Encoders, decoder and trie: padding, other rows and future symbols change nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lit_models.occupation_coder import encoders
from lit_models.occupation_coder.linear import LinearOptions
from lit_models.occupation_coder.network import EMPTY, END, NONE, CodeTrie
from tests.causal_lm.folders import saved_canine
from tests.occupation_coder.tiny import network_of, padded, trie_of

A, B = 4, 5


@pytest.mark.parametrize("linear", [None, LinearOptions(num_features=64)])
@torch.no_grad()
def test_padding_and_neighbours_never_change_an_output(linear):
    network = network_of(linear)
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
def test_the_language_and_every_letter_matter():
    network = network_of()
    ids, mask = padded(["smed", "smed", "smid"], 4)
    logits = network(ids, mask, torch.tensor([1, 2, 1]))[1]
    assert (logits[0] - logits[1]).abs().max() > 1e-4
    assert (logits[0] - logits[2]).abs().max() > 1e-4


def test_ngrams_are_those_that_lie_inside_the_text():
    table = encoders.NgramTable(8, sizes=(2, 3), num_buckets=1 << 20)
    framed, lengths = encoders.frame(*padded(["abab", "ab"], 6))
    rows, inside = table.hashes(framed, lengths)
    assert inside[0].sum(0).tolist() == [5, 5, 4, 4]  # two rows of 5 pairs and 4 triples in <abab>
    assert inside[1].sum(0).tolist() == [3, 3, 2, 2]
    assert rows[0, 1, 0] == rows[0, 3, 0]  # "ab" twice
    assert rows[0, 1, 0] == rows[1, 1, 0]  # and once in the other text
    assert rows[0, 1, 0] != rows[0, 2, 0]
    seen = rows[0][inside[0]].tolist() + rows[1][inside[1]].tolist()
    # <a ab ba b> <ab aba bab ab>, and the second text adds none
    assert len(set(seen)) == 2 * 8


def book(max_codes: int = 2) -> CodeTrie:
    return trie_of(max_codes, [[A, A], [A, B], [B, END]])


rows_of_symbols = st.lists(
    st.tuples(*[st.integers(4, 9)] * 3), min_size=1, max_size=30, unique=True
)


@given(rows_of_symbols)
def test_every_row_walks_to_its_own_leaf_and_leaves_add_up(rows):
    trie = CodeTrie(rows, 10, 1)
    for code_id, row in enumerate(rows):
        node = 0
        for symbol in row:
            node = trie.next_node[node, symbol]
            assert node > 0
        assert trie.leaf_code[node] == code_id
    inner, children = trie.leaf_code == -1, trie.next_node
    below = torch.where(children >= 0, trie.num_leaves[children], 0).sum(1)
    assert torch.equal(trie.num_leaves[inner], below[inner])
    assert (children >= 0).sum() == len(children) - 1


def symbols(legal: torch.Tensor) -> list[int]:
    return legal.nonzero().squeeze(1).tolist()


def test_a_record_ends_with_one_empty_symbol_unless_it_is_full():
    targets = book().targets(torch.tensor([[0, NONE], [2, 1]]))
    assert targets.tolist() == [[A, A, EMPTY, NONE], [B, END, A, B]]
    short = book().targets(torch.tensor([[0], [2]]))
    assert short.tolist() == [[A, A, EMPTY], [B, END, EMPTY]]


def test_symbols_follow_the_book_and_used_codes_are_closed():
    trie = book(3)
    root, none = torch.tensor([0]), torch.tensor([[NONE]])
    assert symbols(trie.legal(root, none, 0, 0)[0]) == [A, B]
    assert symbols(trie.legal(root, torch.tensor([[2]]), 0, 1)[0]) == [EMPTY, A]
    assert symbols(trie.legal(root, torch.tensor([[0]]), 0, 1)[0]) == [EMPTY, A, B]
    assert symbols(trie.legal(root, torch.tensor([[0, 1]]), 0, 2)[0]) == [EMPTY, B]
    below_a = trie.next_node[0, A][None]
    assert symbols(trie.legal(below_a, torch.tensor([[1]]), 1, 1)[0]) == [A]
    assert symbols(trie.legal(root, torch.tensor([[0, 1, 2]]), 0, 3)[0]) == [EMPTY]


@torch.no_grad()
def test_padding_never_changes_the_memory_of_canine(tmp_path):
    encoder = encoders.CanineEncoder(2, str(saved_canine(tmp_path))).eval()
    languages = torch.ones(2, dtype=torch.long)
    for length in range(1, 14):
        text = "wine and spirit merchant"[:length]
        alone, mask = encoder(*padded([text], length), languages[:1])
        count = int(mask.sum())
        assert count == length + 2
        for size in (length + 1, length + 3, 30, 45, 150):
            other, other_mask = encoder(*padded([text, "x" * size], size), languages)
            torch.testing.assert_close(other[0, :count], alone[0, :count], rtol=0, atol=2e-6)
            assert int(other_mask[0].sum()) == count


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing"):
        encoders.CanineEncoder(2, str(tmp_path / "nothing"))


def test_freezing_the_lowest_layers_takes_the_embeddings_along():
    encoder = encoders.CharacterEncoder(2, width=8, num_layers=3, num_heads=2, num_buckets=16)
    for nothing in ("none", 0):
        encoders.freeze_encoder(encoder, nothing)
        assert all(parameter.requires_grad for parameter in encoder.parameters())
    encoders.freeze_encoder(encoder, 2)
    learns = {name for name, p in encoder.named_parameters() if p.requires_grad}
    assert {name.partition(".")[0] for name in learns} == {"layers", "norm"}
    assert {name[:9] for name in learns if name.startswith("layers")} == {"layers.2."}
    encoders.freeze_encoder(encoder, "encoder")
    assert not any(parameter.requires_grad for parameter in encoder.parameters())
    with pytest.raises(ValueError, match="freeze must be none, encoder, or 0 to 3 layers"):
        encoders.freeze_encoder(encoder, 4)
