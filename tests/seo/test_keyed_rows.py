"""Keyed dropout over ragged rows: a sample's masks do not depend on the rest of its batch."""

from functools import partial

import pytest
import torch

from lit_models.seo.encoders import TransformerEncoder
from lit_models.seo.networks import CrossEncoder, Head, TextScorer
from lit_models.seo.ranker import LitRanker
from lit_models.training.dropout import SampleKeys, key_dropout

SIZES = (3, 1, 2)  # rows of each sample
IDS = torch.tensor([11, 5, 70])
ENCODER = partial(TransformerEncoder, 30, 16, 2, 2, 32, 0.5)


def keyed(network):
    keys = SampleKeys()
    key_dropout(network.double().train(), keys)
    return network, keys


def rows_of(samples):
    """Return the rows of samples [R, T]; all are equal, so that only masks differ."""
    ids = torch.arange(1, 8).repeat(sum(SIZES[s] for s in samples), 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids).bool()}


def scorer_batch(samples):
    sizes = torch.tensor([SIZES[s] for s in samples])
    chunk_of = torch.arange(len(samples)).repeat_interleave(sizes)
    return {**rows_of(samples), "chunk_of": chunk_of, "weight": torch.ones(len(samples))}


def ranking_batch(samples, width=4):
    index, row = torch.full((len(samples), width), -1), 0
    for place, sample in enumerate(samples):
        index[place, : SIZES[sample]] = torch.arange(row, row + SIZES[sample])
        row += SIZES[sample]
    rows = rows_of(samples)
    segments = torch.zeros_like(rows["input_ids"])
    parts = {"pair_lengths": rows["attention_mask"].sum(1).numpy(), "num_parts": 2}
    return {**rows, **parts, "segment_ids": segments, "pair_index": index, "prior": index.double()}


def scorer():
    torch.manual_seed(0)
    head = Head({"kind": "regression", "classes": None}, "mse", 16)
    return keyed(TextScorer(ENCODER(), {"a": head}, False))


@pytest.mark.parametrize("others", [(0, 1, 2), (2, 0), (1, 0, 1)])
def test_masks_of_a_text_in_chunks_are_its_own(others) -> None:
    network, keys = scorer()
    keys.begin(7, IDS[list(others)])
    together = network(scorer_batch(others))["a"]
    for place, sample in enumerate(others):
        keys.begin(7, IDS[[sample]])
        torch.testing.assert_close(together[place], network(scorer_batch([sample]))["a"][0])


@pytest.mark.parametrize("others", [(0, 1, 2), (2, 0), (1, 0)])
def test_masks_of_a_group_are_its_own(others) -> None:
    torch.manual_seed(0)
    module = LitRanker(optimizer=torch.optim.SGD, encoder=ENCODER)
    module.network, keys = keyed(CrossEncoder(ENCODER()))
    keys.begin(7, IDS[list(others)])
    together = module(ranking_batch(others))
    for place, sample in enumerate(others):
        keys.begin(7, IDS[[sample]])
        alone = module(ranking_batch([sample], width=3))[0, : SIZES[sample]]
        torch.testing.assert_close(together[place, : SIZES[sample]], alone)
        assert len(alone.unique()) == len(alone)  # each candidate has a mask of its own
