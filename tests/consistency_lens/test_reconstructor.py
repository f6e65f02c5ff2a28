"""The reconstructor: what it begins as, what it reads, and what it is told."""

import pytest
import torch

from tests.consistency_lens.tiny import NETWORKS, lens_of, moved

WORDS = torch.tensor([[3, 7, 1, 9], [2, 2, 5, 8]])
CURRENT = torch.tensor([4, 6])


@torch.no_grad()
@pytest.mark.parametrize("kind", list(NETWORKS))
def test_it_begins_as_the_subject_that_reads_the_words_backwards(kind: str) -> None:
    for layer in (0, 2):
        lens = lens_of(kind, layer)
        rebuilt = lens.reconstructor(lens.words(WORDS), CURRENT)
        text = torch.cat([torch.full((2, 1), lens.begin_id), WORDS.flip(1)], dim=1)
        expected = lens.subject.activations(text)[:, -1]
        torch.testing.assert_close(rebuilt, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_forwards_it_reads_them_as_they_come() -> None:
    lens = lens_of(reads_backwards=False)
    text = torch.cat([torch.full((2, 1), lens.begin_id), WORDS], dim=1)
    expected = lens.subject.activations(text)[:, -1]
    torch.testing.assert_close(lens.reconstructor(lens.words(WORDS), CURRENT), expected)


@torch.no_grad()
def test_the_current_token_is_a_word_before_the_others_only_where_it_is_told() -> None:
    told = moved(lens_of(gives_current_token=True))
    plain = moved(lens_of())
    words = told.words(WORDS)
    one, other = (told.reconstructor(words, current) for current in (CURRENT, CURRENT + 1))
    assert not torch.allclose(one, other)
    assert torch.equal(*(plain.reconstructor(words, c) for c in (CURRENT, CURRENT + 1)))
    untouched = lens_of(gives_current_token=True)
    begin = torch.full((2, 1), untouched.begin_id)
    text = torch.cat([begin, CURRENT[:, None], WORDS.flip(1)], dim=1)
    expected = untouched.subject.activations(text)[:, -1]
    torch.testing.assert_close(untouched.reconstructor(words, CURRENT), expected)


def test_every_trainable_parameter_gets_a_gradient_and_the_blocks_above_are_cut() -> None:
    for kind in NETWORKS:
        lens = lens_of(kind)
        assert len(lens.reconstructor.network.blocks()) == 2
        lens.reconstructor(lens.words(WORDS), CURRENT).sum().backward()
        missing = [n for n, p in lens.reconstructor.named_parameters() if p.requires_grad]
        assert all(lens.reconstructor.get_parameter(n).grad is not None for n in missing), kind
