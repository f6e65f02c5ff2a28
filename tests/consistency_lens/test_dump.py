"""A dump of activations, and a lens on it beside a lens that computes them in the step."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datamodules import ActivationDataModule
from datamodules.activations.documents import Pieces
from datamodules.files.splitting import PART_NAMES
from lit_models import LitConsistencyLens
from lit_models.consistency_lens.lens import LensOptions
from lit_models.consistency_lens.loss import LensLosses, LossWeight
from lit_models.consistency_lens.subject import SubjectOptions
from tests.activation_dumps import documents, dumped, plain_activations, stories, subject, trainer
from tests.causal_lm.folders import saved_with_bytes

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


STEPS = 6


class Recorded(LitConsistencyLens):
    """Notes the samples and the value of each loss term in each step."""

    def training_terms(self, batch: Any) -> Any:
        found = super().training_terms(batch)
        values = {name: float(term[0].detach()) for name, term in found.items()}
        self.__dict__.setdefault("notes", []).append((batch["sample_id"].tolist(), values))
        return found


def notes_of(folder: Path, data: ActivationDataModule) -> tuple[list[Any], Any]:
    """Train; return the notes and the plan."""
    torch.manual_seed(0)
    losses = LensLosses(
        teacher_text=LossWeight(1.0, end=3),
        teacher_reconstruction=LossWeight(1.0, end=3),
        reconstruction=LossWeight(1.0, begin=3),
        reference=LossWeight(0.1, begin=3),
        effect=LossWeight(0.1, begin=3),
    )
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    module = Recorded(adamw, subject(), losses, lens=LensOptions(num_words=2))
    trainer(folder, precision="64-true", max_steps=STEPS, limit_val_batches=0).fit(module, data)
    return module.notes, data.plan("train", 0)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("same")
    dumped(folder / "kept", stories(folder, 60), precision="64-true")
    return folder


def on(folder: Path, way: str) -> ActivationDataModule:
    if way == "documents":
        return ActivationDataModule(**documents(str(folder / "mine.jsonl")))
    return ActivationDataModule(str(folder / way), global_batch_size=8)


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
def test_plan_samples_and_losses_are_those_of_the_store(folder: Path) -> None:
    kept, kept_plan = notes_of(folder, on(folder, "kept"))
    found, plan = notes_of(folder, on(folder, "documents"))
    np.testing.assert_array_equal(plan.order, kept_plan.order)
    assert plan.step_size == kept_plan.step_size
    assert len(found) == len(kept) == STEPS
    for (samples, values), (kept_samples, kept_values) in zip(found, kept, strict=True):
        assert samples == kept_samples
        assert values == pytest.approx(kept_values, rel=1e-10, abs=1e-10)
    assert {"teacher_text", "reconstruction", "effect"} <= found[0][1].keys() | found[-1][1].keys()


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
