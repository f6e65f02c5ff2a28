"""The reconstructor: what it begins as, and what it reads."""

import pytest
import torch

from tests.consistency_lens.tiny import NETWORKS, lens_of

WORDS = torch.tensor([[3, 7, 1, 9], [2, 2, 5, 8]])


@torch.no_grad()
@pytest.mark.parametrize("kind", list(NETWORKS))
def test_it_begins_as_the_subject_that_reads_the_words_backwards(kind: str) -> None:
    for layer in (0, 2):
        lens = lens_of(kind, layer)
        rebuilt = lens.reconstructor(lens.words(WORDS))
        text = torch.cat([torch.full((2, 1), lens.begin_id), WORDS.flip(1)], dim=1)
        expected = lens.subject.activations(text)[:, -1]
        torch.testing.assert_close(rebuilt, expected, rtol=1e-9, atol=1e-9)


def test_every_trainable_parameter_gets_a_gradient_and_the_blocks_above_are_cut() -> None:
    for kind in NETWORKS:
        lens = lens_of(kind)
        assert len(lens.reconstructor.network.blocks()) == 2
        lens.reconstructor(lens.words(WORDS)).sum().backward()
        missing = [n for n, p in lens.reconstructor.named_parameters() if p.requires_grad]
        assert all(lens.reconstructor.get_parameter(n).grad is not None for n in missing), kind
