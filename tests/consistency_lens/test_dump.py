"""A dump of activations: what is read, and that it is whole or not there."""

from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules.activations.documents import Pieces, PositionRule
from datamodules.files.splitting import PART_NAMES
from lit_models.consistency_lens.subject import (
    Subject,
    SubjectOptions,
    load_subject,
    subject_recipe,
)
from tests.activation_dumps import (
    contents,
    dumped,
    model_folder,
    plain_activations,
    stories,
    subject,
)

PARTS = range(len(PART_NAMES))


@pytest.mark.parametrize("layer", [0, 2])
def test_each_activation_is_that_of_the_whole_document_read_alone(
    tmp_path: Path, layer: int
) -> None:
    store = dumped(tmp_path / "acts", stories(tmp_path, 60), subject(layer))
    size = store.tokenizer.vocab_size
    options = subject(layer)
    network = load_subject(options, subject_recipe(options, size), 16, size)
    whole, count = Subject(network, layer), 0
    for part in PARTS:
        pieces = Pieces(store, part, 16)
        found = store.array(part, "activations")
        for number, (piece, position) in enumerate(
            zip(store.array(part, "piece"), store.array(part, "position"), strict=True)
        ):
            ids = torch.from_numpy(pieces.tokens(int(piece)))[None, :-1]
            with torch.no_grad():
                expected = whole.activations(ids)[0, int(position)].numpy()
            np.testing.assert_allclose(found[number], expected, atol=1e-7)
            count += 1
    assert count == sum(store.schema["num_activations"].values()) > 120


def test_batch_size_and_order_of_files_change_rounding_at_most(tmp_path: Path) -> None:
    one, other = stories(tmp_path, 30), stories(tmp_path, 30, "other.jsonl", seed=1)
    # Both files together, so that the words' tokens are the same.
    first = dumped(tmp_path / "a", [one, other])
    again = dumped(tmp_path / "b", [one, other], global_batch_size=3)
    for part in PARTS:
        np.testing.assert_array_equal(first.array(part, "position"), again.array(part, "position"))
        np.testing.assert_allclose(
            first.array(part, "activations"), again.array(part, "activations"), atol=1e-7
        )


def test_two_dumps_are_equal_byte_for_byte(tmp_path: Path) -> None:
    files = stories(tmp_path, 40)
    first, again = (dumped(tmp_path / name, files).folder for name in "ab")
    assert contents(first) == contents(again)


def test_documents_without_a_position_are_not_read(tmp_path: Path) -> None:
    rule = PositionRule(min_position=12, per_document=2)
    store = dumped(tmp_path / "acts", stories(tmp_path, 60), positions=rule, context_length=16)
    pieces = Pieces(store, 0, 16)
    assert (pieces.sizes <= 12).sum() > 10
    assert (pieces.sizes[store.array(0, "piece")] > 12).all()
    assert store.array(0, "position").min() >= 12


@pytest.mark.parametrize("kind", ["GPT2", "Qwen2"])
@pytest.mark.parametrize("layer", [0, 2])
def test_activations_are_those_that_transformers_has(tmp_path: Path, kind: str, layer: int) -> None:
    """The last block, too: before the final norm, which the reported hidden states have passed."""
    from transformers import AutoModel

    path = model_folder(tmp_path / "model", kind)
    options = {"tokenizer": None, "context_length": 40}
    store = dumped(
        tmp_path / "acts", stories(tmp_path, 30), SubjectOptions(path=path, layer=layer), **options
    )
    pieces, piece = Pieces(store, 0, 40), store.array(0, "piece")
    batches = []
    for number in np.unique(piece).tolist():
        ids = pieces.tokens(number)[None, :-1]
        at = np.array(store.array(0, "position")[piece == number])
        batches.append((ids, np.ones_like(ids), [at]))
    expected = plain_activations(AutoModel.from_pretrained(path).eval(), layer, batches)
    np.testing.assert_allclose(store.array(0, "activations"), expected, atol=1e-7)
