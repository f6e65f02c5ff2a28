"""Activations as planned samples: keys, partners, visible words, and the whole batch."""

from pathlib import Path

import numpy as np
import pytest

from datamodules.activations.datamodule import ActivationDataset, seen_words
from datamodules.activations.documents import (
    NONE,
    DocumentFacts,
    Pieces,
    PositionRule,
    drawn_positions,
)
from tests.text_corpora import TEXTS, request, text_rows

WIDTH = 4


@pytest.fixture
def dataset(tmp_path: Path) -> ActivationDataset:
    """All positions of twenty texts; each activation is filled with its own number."""
    store = request([Path(text_rows(tmp_path))]).open()
    pieces = Pieces(store, 0, 30)
    piece, position = drawn_positions(pieces.sizes, pieces.hashes, PositionRule(2, 5))
    np.save(
        store.folder / "train.activations.npy",
        np.repeat(np.arange(len(piece), dtype=np.float32)[:, None], WIDTH, 1),
    )
    attributes = np.full((len(TEXTS), 2), NONE)
    attributes[:, 0] = ord("o")
    facts = DocumentFacts(["a", "b"], attributes, np.arange(len(TEXTS)), [])
    return ActivationDataset(pieces, piece, position, facts, "x", 7, True)


def batch_of(dataset: ActivationDataset, numbers: list[int], epoch: int = 0) -> dict:
    return dataset.batch(np.array(numbers), epoch)


def test_a_batch_holds_what_each_sample_holds_alone(dataset: ActivationDataset) -> None:
    numbers = [3, 40, 17, 60]
    batch = batch_of(dataset, numbers)
    for row, number in enumerate(numbers):
        tokens = dataset.pieces.tokens(int(dataset.piece[number]))
        assert batch["lengths"][row] == len(tokens)
        assert batch["input_ids"][row].tolist()[: len(tokens)] == tokens.tolist()
        assert not batch["input_ids"][row, len(tokens) :].any()
        assert batch["position"][row] == dataset.position[number]
        assert batch["activation"][row].tolist() == [number] * WIDTH
        alone = batch_of(dataset, [number])
        for name in ("noise_key", "document", "group", "attributes"):
            assert batch[name][row].tolist() == alone[name][0].tolist()
        other = int(dataset.others[number])  # type: ignore[index]
        assert batch["other"]["activation"][row].tolist() == [other] * WIDTH


def test_keys_differ_by_sample_and_epoch_and_not_by_batch(dataset: ActivationDataset) -> None:
    everyone = list(range(len(dataset.lengths)))
    first, second = (batch_of(dataset, everyone, epoch)["noise_key"] for epoch in (0, 1))
    assert len({*first.tolist(), *second.tolist()}) == 2 * len(everyone)
    assert (first >= 0).all()
    assert batch_of(dataset, [9, 4])["noise_key"].tolist() == first[[9, 4]].tolist()


def test_seen_words_stand_before_the_position_and_are_not_the_current_token() -> None:
    rows = np.array([[5, 6, 7, 8, 6, 9], [5, 6, 7, 8, 6, 9], [5, 5, 5, 0, 0, 0]])
    words = np.array([[5, 8, 9], [6, 7, NONE], [5, 0, NONE]])
    found = seen_words(words, rows, np.array([3, 4, 2]))
    assert found.tolist() == [[5, NONE, NONE], [NONE, 7, NONE], [NONE, NONE, NONE]]


def test_describe_shows_the_text_on_both_sides(dataset: ActivationDataset) -> None:
    shown = dataset.describe(8, 0)
    text = dataset.pieces.store.tokenizer.decode(
        dataset.pieces.tokens(int(dataset.piece[8])), skip_special_tokens=False
    )
    assert shown["text"] + shown["goes on"] == text
    assert shown["position"] == str(dataset.position[8])
