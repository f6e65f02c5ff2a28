"""Batches of job descriptions: made at once, with the noise that each sample would have alone."""

from pathlib import Path

import numpy as np
import pytest

from datamodules import Augmentation
from datamodules.core.plan import PlanOptions, rng_for, uniforms_for
from datamodules.occupations.batches import OccupationDataset, augment
from datamodules.tokenizers.characters import decode
from tests.occupation_tables import ROWS, many, module, table

SOME = Augmentation(delete=0.2, insert=0.2, swap_words=0.1, status_word=0.2, num_edits=2)
EPOCH = 3


def dataset_of(folder: Path, noise: Augmentation) -> OccupationDataset:
    rows, plan = [*ROWS, *many(60)], PlanOptions(seed=7)
    data = module(
        folder, rows, validation_files=table(folder / "v.csv", ROWS), augmentation=noise, plan=plan
    )
    data.setup("fit")
    return data.datasets["train"]


def batch_of(dataset: OccupationDataset, ids: range) -> dict:
    return dataset.batch(np.array(ids), EPOCH)


def alone(dataset: OccupationDataset, number: int, noise: Augmentation) -> tuple[str, str]:
    """Text and language of one sample, by its own draws."""
    store, row = dataset.store, int(dataset.row_ids[number])
    language = dataset.languages[store.arrays["language_id"][row]]
    text = decode(store.texts(np.array([row]))[0])
    (shares,) = uniforms_for(dataset.seed, EPOCH, np.array([number]), 8)
    rng = rng_for(dataset.seed, EPOCH, number)
    text, language = augment(text, language, shares, rng, noise)
    return text[: store.recipe["max_length"]], language


@pytest.mark.parametrize("noise", [SOME, Augmentation(drop_language=0.4)])
def test_a_batch_has_the_noise_of_each_sample_alone(tmp_path: Path, noise: Augmentation):
    dataset = dataset_of(tmp_path, noise)
    numbers = range(len(dataset.lengths))
    batch = batch_of(dataset, numbers)
    found = [
        (decode(points), dataset.languages[language])
        for points, language in zip(
            batch["input_ids"].numpy(), batch["language_id"].tolist(), strict=True
        )
    ]
    assert found == [alone(dataset, number, noise) for number in numbers]
    assert len({language for _, language in found}) > 1
    masks = batch["input_ids"] != 0
    assert (batch["attention_mask"] == masks).all()
