"""A lens on a store, and on activations that are computed in the step: the same run."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datamodules import ActivationDataModule
from lit_models import LitConsistencyLens
from lit_models.consistency_lens.lens import LensOptions
from lit_models.consistency_lens.loss import LensLosses, LossWeight
from tests.activation_dumps import documents, dumped, stories, subject, trainer

STEPS = 6


class Noting(LitConsistencyLens):
    """Notes the samples and the value of each term in each step."""

    def training_terms(self, batch: Any) -> Any:
        found = super().training_terms(batch)
        values = {name: float(term[0].detach()) for name, term in found.items()}
        self.__dict__.setdefault("notes", []).append((batch["sample_id"].tolist(), values))
        return found


def notes_of(folder: Path, data: ActivationDataModule) -> tuple[list[Any], Any]:
    """Train and return what was noted, and the plan."""
    torch.manual_seed(0)
    losses = LensLosses(
        teacher_text=LossWeight(1.0, end=3),
        teacher_reconstruction=LossWeight(1.0, end=3),
        reconstruction=LossWeight(1.0, begin=3),
        reference=LossWeight(0.1, begin=3),
        effect=LossWeight(0.1, begin=3),
    )
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    module = Noting(adamw, subject(), losses, lens=LensOptions(num_words=2))
    runs = trainer(folder, precision="64-true", max_steps=STEPS, limit_val_batches=0)
    runs.fit(module, data)
    return module.notes, data.plan("train", 0)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("same")
    files = stories(folder, 60)
    dumped(folder / "kept", files, precision="64-true")
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
    np.testing.assert_array_equal(plan.offsets, kept_plan.offsets)
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
    batches = [dataset.collate([dataset.example(i, 0) for i in range(9)]) for dataset in sets]
    assert "activation" in batches[0]
    for other in batches[1:]:
        assert other.keys() == batches[0].keys() - {"activation"}
        for name in other.keys() - {"other"}:
            assert torch.equal(other[name], batches[0][name]), name
