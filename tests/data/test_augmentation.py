"""Noise in training texts: letter by letter, and independent of the other samples of a batch."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules import Augmentation
from datamodules.core.plan import PlanOptions, rng_for, uniforms_for
from datamodules.occupations.datamodule import letter_noise
from datamodules.tokenizers.codes import decode
from tests.occupation_tables import ROWS, many, module, table

DELETE, INSERT, SUBSTITUTE = np.eye(3, dtype=bool)
EPOCH = 3


def variants(text: str, fires: np.ndarray, count: int = 500, num_edits: int = 1) -> set[str]:
    rngs = (np.random.default_rng(i) for i in range(count))
    return {letter_noise(text, fires, rng, num_edits) for rng in rngs}


def test_letters_are_deleted_inserted_and_substituted() -> None:
    assert variants("abcd", DELETE) == {"bcd", "acd", "abd", "abc"}
    latin = set("abcdefghijklmnopqrstuvwxyz")
    found = variants("AB", INSERT)
    assert {len(text) for text in found} == {3}
    assert {text.index(text.strip("AB") or "?") for text in found} == {0, 1, 2}
    assert {text.replace("A", "").replace("B", "") for text in found} <= latin
    assert variants("ø", SUBSTITUTE) == latin
    assert variants("ж", SUBSTITUTE) <= set("абвгдежзийклмнопрстуфхцчшщъыьэюя")
    assert variants("大工", SUBSTITUTE) <= {"大工", "大大", "工工"}
    assert {len(text) for text in variants("abcdefgh", DELETE, num_edits=3)} == {5, 6, 7}


@settings(deadline=None)
@given(
    st.text(min_size=1, max_size=12).filter(lambda text: text.strip()),
    st.integers(0, 2**32),
    st.integers(1, 4),
)
def test_no_text_becomes_empty(text: str, seed: int, num_edits: int) -> None:
    every = np.ones(3, dtype=bool)
    assert letter_noise(text, every, np.random.default_rng(seed), num_edits).strip()


@pytest.mark.parametrize(
    "noise",
    [
        Augmentation(delete=0.2, insert=0.2, drop_language=0.25, num_edits=2),
        Augmentation(drop_language=0.4),
    ],
)
def test_a_batch_has_the_noise_of_each_sample_alone(tmp_path: Path, noise: Augmentation) -> None:
    options = {"augmentation": noise, "plan": PlanOptions(seed=7)}
    held_out = table(tmp_path / "v.csv", ROWS)
    data = module(tmp_path, [*ROWS, *many(60)], validation_files=held_out, **options)
    data.setup("fit")
    dataset = data.datasets["train"]
    batch = dataset.batch(np.arange(len(dataset.lengths)), EPOCH)
    store, languages = dataset.store, data.recipe["languages"]
    dropped = 0
    for number, row in enumerate(dataset.row_ids):
        (draws,) = uniforms_for(7, EPOCH, np.array([number]), 8)
        fires = draws[:3] < (noise.delete, noise.insert, noise.substitute)
        text = decode(store.texts(np.array([row]))[0])
        text = letter_noise(text, fires, rng_for(7, EPOCH, number), noise.num_edits)
        assert decode(batch["input_ids"][number].numpy()) == text[: data.recipe["max_length"]]
        language = languages[store.arrays["language_id"][row]]
        if draws[7] < noise.drop_language and language != "unk":
            language, dropped = "unk", dropped + 1
        assert languages[batch["language_id"][number]] == language
    assert 0 < dropped < len(dataset.row_ids)
    assert (batch["attention_mask"] == (batch["input_ids"] != 0)).all()
