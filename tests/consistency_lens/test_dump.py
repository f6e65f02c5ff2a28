"""A dump of activations, and a lens on it beside a lens that computes them in the step."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules import ActivationDataModule
from datamodules.activations.documents import Pieces
from datamodules.files.splitting import PART_NAMES
from lit_models.consistency_lens.loss import LossWeight
from lit_models.consistency_lens.subject import SubjectOptions
from tests.activation_dumps import documents, dumped, plain_activations, stories, subject
from tests.causal_lm.folders import saved_with_bytes
from tests.consistency_lens.small_lens import BOTH, fitted, lens_module
from tests.toy import assert_same_samples, ledger_lines

PARTS = range(len(PART_NAMES))


def test_batch_size_and_order_of_files_change_rounding_at_most(tmp_path: Path) -> None:
    one, other = stories(tmp_path, 30), stories(tmp_path, 30, "other.jsonl", seed=1)
    # Both files together, so that the words have the same tokens.
    first = dumped(tmp_path / "a", [one, other])
    again = dumped(tmp_path / "b", [one, other], global_batch_size=3)
    for part in PARTS:
        np.testing.assert_array_equal(first.array(part, "position"), again.array(part, "position"))
        np.testing.assert_allclose(
            first.array(part, "activations"), again.array(part, "activations"), atol=1e-7
        )


@pytest.mark.parametrize("kind", ["GPT2", "Qwen2"])
@pytest.mark.parametrize("layer", [0, 2])
def test_activations_are_those_that_transformers_has(tmp_path: Path, kind: str, layer: int) -> None:
    """Also for the last block: before the final norm, which transformers' hidden states include."""
    from transformers import AutoModel

    shape = {"n_positions": 64, "n_layer": 3} if kind == "GPT2" else {"num_hidden_layers": 3}
    path = str(saved_with_bytes(tmp_path / "model", kind, **shape))
    options = {"tokenizer": None, "context_length": 40, "precision": "64-true"}
    subject = SubjectOptions(path=path, layer=layer)
    store = dumped(tmp_path / "acts", stories(tmp_path, 30), subject, **options)
    pieces, piece = Pieces(store, 0, 40), store.array(0, "piece")
    batches = []
    for number in np.unique(piece).tolist():
        ids = pieces.tokens(number)[None, :-1]
        at = np.array(store.array(0, "position")[piece == number])
        batches.append((ids, np.ones_like(ids), [at]))
    expected = plain_activations(AutoModel.from_pretrained(path).double().eval(), layer, batches)
    np.testing.assert_allclose(store.array(0, "activations"), expected, rtol=1e-9, atol=1e-9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("same")
    store = dumped(folder / "kept", stories(folder, 60), precision="64-true")
    assert store.schema["dtype"] == str(store.array(0, "activations").dtype) == "float64"
    return folder


def on(folder: Path, way: str) -> ActivationDataModule:
    if way == "documents":
        return ActivationDataModule(**documents(str(folder / "mine.jsonl")))
    return ActivationDataModule(str(folder / way), global_batch_size=8)


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
def test_plan_samples_and_losses_are_those_of_the_store(folder: Path) -> None:
    losses, ledgers = replace(BOTH, effect=LossWeight(0.1, begin=2)), []
    for way in ("kept", "documents"):
        run = folder / f"on {way}"
        options = {"max_steps": 4, "limit_val_batches": 0}
        fitted(run, lens_module(subject(), losses), on(folder, way), **options)
        ledgers.append(ledger_lines(run))
    assert_same_samples(*ledgers)
    for kept, found in zip(*ledgers, strict=True):
        assert found["terms"] == pytest.approx(kept["terms"], rel=1e-10, abs=1e-10)
    assert {"reconstruction", "effect"} <= found["terms"].keys()


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_batches_are_equal_but_for_the_activation(folder: Path, stage: str) -> None:
    part = "train" if stage == "fit" else "test"
    sets = []
    for way in ("kept", "documents"):
        data = on(folder, way)
        data.setup(stage)
        sets.append(data.datasets[part])  # type: ignore[index]
    batches = [dataset.batch(np.arange(9), 0) for dataset in sets]
    assert "activation" in batches[0]
    for other in batches[1:]:
        assert other.keys() == batches[0].keys() - {"activation"}
        for name in other.keys() - {"other"}:
            assert torch.equal(other[name], batches[0][name]), name
