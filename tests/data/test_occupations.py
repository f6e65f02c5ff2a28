"""OccupationDataModule: batches hold the tables' contents; faults are named."""

from pathlib import Path

import numpy as np
import pytest
import torch

from datamodules import (
    Augmentation,
    CodeBookOptions,
    Columns,
    OccupationDataModule,
    SplitOptions,
    TextOptions,
)
from datamodules.core.planned import ModelFacts
from datamodules.occupations.store import ALIASES, ISO_639_1, language_code, open_store
from tests.occupation_tables import COLUMNS, ROWS, many, module, table


def texts_of(batch: dict[str, torch.Tensor]) -> list[str]:
    return ["".join(chr(point) for point in row if point) for row in batch["input_ids"].tolist()]


def sizes_of(data: OccupationDataModule) -> dict[str, int]:
    data.setup("fit")
    data.setup("test")
    return {stage: len(dataset.lengths) for stage, dataset in data.datasets.items()}


def test_batches_hold_the_normalised_rows(tmp_path):
    data = module(tmp_path, ROWS, validation_files=table(tmp_path / "v.csv", ROWS[:2]))
    data.setup("fit")
    dataset = data.datasets["train"]
    batch = dataset.batch(np.arange(5), 0)
    first, *rest = texts_of(batch)
    assert first == "wine and spirit merchant"
    assert rest == ["miner (deceased)", "roentgen nan", "smed", "nan"]
    languages = data.recipe["languages"]
    assert [languages[i] for i in batch["language_id"]] == ["en", "en", "de", "da", "unk"]
    codes = data.recipe["code_book"]["codes"]
    code_sets = [[codes[i] for i in row if i >= 0] for row in batch["code_ids"].tolist()]
    assert code_sets == [["41025"], ["71105"], ["06510", "-1"], ["83110", "95410"], ["-1"]]
    assert batch["code_ids"][0].tolist()[1:] == [-100]
    assert batch["num_with_codes"] == (batch["code_ids"] >= 0).sum(1).bincount().tolist()
    assert batch["attention_mask"].sum(1).tolist() == dataset.lengths.tolist()
    assert "is_seen_text" not in batch


def test_no_variant_of_a_string_is_on_both_sides(tmp_path):
    rows = [(f"{'Retired ' * (i % 2)}trade {i // 4}", "en", "10000", "") for i in range(400)]
    data = module(tmp_path, rows, split=SplitOptions(0.2, 0.2))
    sides = {}
    for stage, size in sizes_of(data).items():
        batch = data.datasets[stage].batch(np.arange(size), 0)
        sides[stage] = {text.removeprefix("retired ") for text in texts_of(batch)}
    assert sum(len(side) for side in sides.values()) == 100
    assert 10 <= len(sides["validation"]) <= 30
    assert 10 <= len(sides["test"]) <= 30


def test_the_users_own_split_column_wins(tmp_path):
    rows = [("a", "10000", "train"), ("a", "10000", "dev"), ("b", "20000", "Test")]
    path = table(tmp_path / "t.csv", rows, "text,code_1,part")
    data = OccupationDataModule(path, columns=Columns(split="part"))
    assert sizes_of(data) == {"train": 1, "validation": 1, "test": 1}


def test_a_test_file_leaves_the_validation_share_alone(tmp_path):
    data = module(
        tmp_path, many(100), test_files=table(tmp_path / "t.csv", many(10)), split=SplitOptions()
    )
    counts = sizes_of(data)
    assert counts["test"] == 10
    assert counts["train"] + counts["validation"] == 100


def test_seen_and_unseen_are_marked_in_evaluation(tmp_path):
    held_out = [
        ("trade 1 of 1", "en", "10001", ""),
        ("new", "en", "10001", ""),
        ("other", "en", "77777", "10001"),
    ]
    data = module(tmp_path, many(20), test_files=table(tmp_path / "t.csv", held_out))
    data.setup("test")
    batch = data.datasets["test"].batch(np.arange(3), 0)
    assert batch["is_seen_text"].tolist() == [True, False, False]
    assert batch["is_seen_code"].tolist() == [True, True, False]


def test_descriptions_become_training_examples_but_make_no_code_seen(tmp_path):
    book = tmp_path / "book.csv"
    book.write_text('code,description\n10000,"Smith, General"\n-1,no title\n20000,Tailor\n30000,\n')
    train = [("smed", "da", "10000", "")]
    held_out = table(tmp_path / "v.csv", [("tailor", "en", "20000", "")])
    data = module(
        tmp_path, train, validation_files=held_out, code_book=CodeBookOptions(str(book), True)
    )
    data.setup("fit")
    dataset = data.datasets["train"]
    batch = dataset.batch(np.arange(len(dataset.lengths)), 0)
    assert texts_of(batch) == ["smed", "smith, general", "tailor"]
    batch = data.datasets["validation"].batch(np.array([0]), 0)
    assert batch["is_seen_code"].tolist() == [False]
    with pytest.raises(ValueError, match="descriptions_as_examples needs a code book"):
        module(tmp_path, train, code_book=CodeBookOptions(None, True)).setup("fit")


def test_noise_is_in_training_alone(tmp_path):
    options = {"augmentation": Augmentation(substitute=1.0), "split": SplitOptions(0.3, 0.0)}
    data = module(tmp_path, many(50), **options)
    data.setup("fit")
    plain = {text for text, *_ in many(50)}
    found = {
        name: set(texts_of(part.batch(np.arange(5), 0))) for name, part in data.datasets.items()
    }
    assert found["validation"] <= plain
    assert not found["train"] & plain


def test_the_fingerprint_follows_the_content_not_the_place(tmp_path):
    for name in ("other", "third"):
        (tmp_path / name).mkdir()
    first, moved = module(tmp_path, ROWS), module(tmp_path / "other", ROWS)
    changed = module(tmp_path / "third", [*ROWS[:-1], ("nan", "", "-2", "")])
    all_of_them = (first, moved, changed, module(tmp_path, ROWS, text=TextOptions(max_length=9)))
    prints = [open_store(data.store_request()).fingerprint for data in all_of_them]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_a_checkpoint_decides_the_encoding(tmp_path, caplog):
    trained = module(tmp_path, many(40), text=TextOptions(max_length=5))
    recipe = open_store(trained.store_request()).recipe
    test = table(tmp_path / "t.csv", [("TRADE of all", "sv", "10003", "")])
    data = OccupationDataModule(test_files=test, columns=COLUMNS)
    data.model = ModelFacts(recipe)
    data.files[0] = str(tmp_path / "not_here.csv")  # a path of the training machine
    data.setup("test")
    store = data.store
    assert [chr(p) for p in store.texts(np.array([0]))[0]] == list("trade")
    assert store.arrays["language_id"].tolist() == [0]  # Swedish was not in the training data
    assert store.recipe == recipe
    assert "not_here.csv does not exist" in caplog.text
    assert "Seen and unseen strings are not told" in caplog.text
    assert not store.arrays["is_seen_text"].any()


@pytest.mark.real_data
def test_the_real_tables_are_read_whole():
    folder = Path(__file__).parents[3] / "shared" / "data" / "occupations"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent")
    data = OccupationDataModule(
        str(folder / "train.csv"),
        test_files=str(folder / "dev.csv"),
        columns=Columns(text="occ1", language="lang", codes=["hisco_1"]),
        code_book=CodeBookOptions(str(folder / "hisco_codes.csv"), True),
    )
    data.setup("fit")
    data.setup("test")
    parts = data.store.arrays["part"]
    specials, descriptions = 3, 1918
    assert (parts == 2).sum() == 1484
    assert len(parts) == 6010 + 1484 + descriptions - specials
    assert not data.store.arrays["is_seen_text"][parts == 2].any()
    assert len(data.recipe["code_book"]["codes"]) == descriptions


NAMES = {
    "en": ("en", " EN ", "English", "en-GB", "en_US"),
    "sv": ("se", "swe"),
    "no": ("nb", "Nynorsk"),
    **{"de": ("ge",), "da": ("dk",), "el": ("gr",), "nl": ("Dutch",)},
    "unk": ("unknown", "", "nan"),
}


def test_codes_aliases_and_names_are_understood():
    found = {code: tuple(map(language_code, names)) for code, names in NAMES.items()}
    assert found == {code: (code,) * len(names) for code, names in NAMES.items()}


def test_every_iso_code_is_itself_or_a_known_alias_of_another():
    assert {code for code in ISO_639_1 if language_code(code) != code} == {"na", "nb", "nn"}
    assert set(ALIASES.values()) <= ISO_639_1
