"""A batch that is made at once is, bit for bit, that of its samples one by one."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules.keyed_draws import KeptWords, below, below_each, words_for
from datamodules.planned import PlannedDataset
from datamodules.relevance.judged_queries import JudgedQueries
from datamodules.relevance.negatives import HardNegatives
from datamodules.relevance.training_mix import TrainingMix
from datamodules.relevance.training_pairs import PairDataset
from datamodules.splitting import TRAIN
from datamodules.token_rows import ReadTokens
from tests.data.test_kept_tokens import collection, encoding_of, pairs  # noqa: F401
from tests.distributed.seo_family import scored_texts, text_scorer

SEED = 5


def flat(value: object, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, dict):
        return {k: v for key, own in value.items() for k, v in flat(own, f"{name}.{key}").items()}
    assert isinstance(value, torch.Tensor)
    return {name: value}


def check_equal(dataset: PlannedDataset, ids: np.ndarray, epoch: int) -> None:
    at_once = flat(dataset.batch(ids, epoch))
    one_by_one = flat(dataset.collate([dataset.example(int(i), epoch) for i in ids]))
    assert at_once.keys() == one_by_one.keys()
    for name, expected in one_by_one.items():
        assert at_once[name].dtype == expected.dtype, name
        assert at_once[name].is_contiguous(), name
        assert torch.equal(at_once[name], expected), name


@pytest.mark.parametrize("kind", ["bpe", "words", "over_blanks"])
@pytest.mark.parametrize(
    "mix",
    [
        TrainingMix(judged=3, titles=2, sentences=3, removal=0.8),
        TrainingMix(judged=0, titles=1, sentences=2, removal=0.0),
        TrainingMix(judged=2),
    ],
)
def test_pairs(collection, kind: str, mix: TrainingMix) -> None:  # noqa: F811
    dataset = pairs(collection, encoding_of(collection, kind), mix)
    assert dataset._batches is not None
    count, rng = len(dataset.lengths), np.random.default_rng(0)
    for epoch in (0, 3):
        check_equal(dataset, rng.permutation(count), epoch)
        for first in range(0, count - 3, 3):  # with one kind missing or another
            check_equal(dataset, np.arange(first, first + 3, dtype=np.int32), epoch)
    sent = pickle.loads(pickle.dumps(dataset))
    assert torch.equal(
        sent.batch(np.arange(9), 1)["document_ids"], dataset.batch(np.arange(9), 1)["document_ids"]
    )


def test_pairs_of_which_more_is_drawn_are_made_one_by_one(collection) -> None:  # noqa: F811
    judged, encoding = JudgedQueries(collection.judgements(TRAIN)), encoding_of(collection, "bytes")
    for mix, negatives in ((TrainingMix(token_dropout=0.5), 0), (TrainingMix(), 2)):
        dataset = PairDataset(collection, encoding, judged, mix, HardNegatives(negatives), SEED)
        assert dataset._batches is None
        check_equal(dataset, np.arange(7), 2)


def test_words_are_kept_for_an_epoch_and_are_those_of_each_sample(monkeypatch) -> None:
    ids = np.array([5, 9000, 4096, 5])
    kept = KeptWords(SEED, 10_000, 2)
    for epoch in (0, 1, 0):
        np.testing.assert_array_equal(kept.of(ids, epoch), words_for(SEED, epoch, ids, 2))
    monkeypatch.setattr("datamodules.keyed_draws.MOST_KEPT", 9_999)
    many = KeptWords(SEED, 10_000, 2)
    np.testing.assert_array_equal(many.of(ids, 1), words_for(SEED, 1, ids, 2))
    assert not len(many._kept)


def test_draws_of_many_are_those_of_each() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 64, 2000, np.uint64)
    words[:50] &= np.uint64(0xFFFFFFFF00000000)  # whose first half has to be drawn again
    counts = np.random.default_rng(1).integers(1, 40, 2000)
    counts[:30] = (1 << 31) + np.arange(30)
    each = zip(words.tolist(), counts.tolist(), strict=True)
    expected = [below(w, c) if c > 1 else 0 for w, c in each]
    assert below_each(words, counts).tolist() == expected


def test_scored_texts(tmp_path: Path) -> None:
    scored_texts(tmp_path / "scored.jsonl")
    _, data = text_scorer(tmp_path / "run", {})
    data.setup("fit")
    dataset = data.datasets["train"]
    count = len(dataset.lengths)
    check_equal(dataset, np.random.default_rng(0).permutation(count), 0)
    assert len(dataset.batch(np.arange(count), 0)["chunk_of"]) > count
    for sample_id in range(count):
        check_equal(dataset, np.array([sample_id]), 0)
    dataset.tokens = ReadTokens(dataset.encoding.ids, lambda n: "old bread")
    check_equal(dataset, np.arange(5), 0)
