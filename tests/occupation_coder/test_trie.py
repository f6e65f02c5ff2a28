"""Targets and legal symbols, worked by hand on a book of three codes."""

import torch

from datamodules.tokenizers.codes import CodeBook, named_code_system
from lit_models.occupation_coder.network import EMPTY, END, NONE, CodeTrie

A, B = 4, 5


def book(max_codes: int = 2) -> CodeTrie:
    return CodeTrie.from_table([[A, A], [A, B], [B, END]], vocab_size=6, max_codes=max_codes)


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
    every = torch.tensor([[0, 1, 2]])
    assert symbols(trie.legal(root, every, 0, 3)[0]) == [EMPTY]


def test_legal_targets_agree_with_one_step_at_a_time():
    trie = book(3)
    codes = torch.tensor([[1, 0, NONE], [2, NONE, NONE], [0, 2, 1]])
    targets = trie.targets(codes)
    legal = trie.legal_targets(codes, targets.shape[1])
    for record in range(3):
        node = torch.tensor([0])
        for position in range(targets.shape[1]):
            if targets[record, position] == NONE:
                break
            block, depth = divmod(position, 2)
            node = torch.tensor([0]) if depth == 0 else node
            used = codes[record, :block][None]
            expected = trie.legal(node, used, depth, block)[0]
            assert symbols(legal[record, position]) == symbols(expected)
            assert expected[targets[record, position]]
            node = trie.next_node[node, targets[record, position]]


def test_the_trie_of_a_code_book_is_the_trie_of_its_table():
    codes = ["01110", "01120", "58340", "-1"]
    real = CodeBook(named_code_system("hisco"), codes, [""] * 4)
    one = CodeTrie.from_code_book(real)
    two = CodeTrie.from_table(real.table.tolist(), len(real.symbols), real.max_codes)
    assert one.num_codes == 4
    for code in range(4):
        assert one.leaf_code[one.path[code, -1]] == code
    assert one.num_leaves[0] == two.num_leaves[0] == 4
    assert one.num_nodes == two.num_nodes
