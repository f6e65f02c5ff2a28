"""Tables to code: each distinct input once, each row in its place, in the output file too."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from datamodules import Columns, OccupationDataModule
from datamodules.files.tables import free_names
from datamodules.occupations.datamodule import (
    CrosswalkOptions,
    DistinctInputs,
    read_crosswalk,
    write_coded_table,
)
from datamodules.occupations.store import PredictIndex
from datamodules.tokenizers.codes import CodeBook, CodeSystem, TextOptions, decode
from tests.occupation_tables import index_of
from tests.occupation_tables import table as job_table
from tests.text_corpora import text_file

SYSTEM = CodeSystem(5, "0123456789", max_codes=2)
BOOK = CodeBook(SYSTEM, ["10000", "20000"], ["Smith, General", "Tailor"])
RECIPE: dict[str, Any] = {
    **TextOptions(max_length=10).to_recipe(),
    "languages": ["unk", "da", "en"],
    "default_language": "en",
    "code_book": BOOK.to_dict(),
}
COLUMNS = Columns(language="language")
TABLE = """id,text,language,note
1,Smith,en,"a, b"
2,  SMITH ,en,
3,smith,da,
4,A very long description,en,x
5,smith,sv,007
6,smith,,
"""


def columns_of(path: Path) -> dict[str, list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        names, *rows = csv.reader(file)
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def results_of(index: PredictIndex) -> dict[str, np.ndarray]:
    """Made-up answers: input i gets code i % 2, every third input both codes."""
    ids = np.arange(len(index.arrays["language_ids"]))
    code_ids = np.stack([ids % 2, np.where(ids % 3 == 0, 1 - ids % 2, -100)], axis=1)
    return {
        "code_ids": code_ids,
        "code_confidence": np.where(code_ids >= 0, 1 / (ids[:, None] + 1), 0.0),
        "set_confidence": 1 / (ids + 1),
        "needs_review": 1 / (ids + 1) < 0.5,
    }


def test_several_files_are_one_table(tmp_path):
    files = [
        text_file(tmp_path / "a.csv", "text\na\nb\n"),
        text_file(tmp_path / "b.csv", "text\nb\nc\n"),
    ]
    index = index_of(files, RECIPE, Columns(default_language="en"))
    assert index.arrays["input_of_row"].tolist() == [0, 1, 1, 2]
    other = text_file(tmp_path / "c.csv", "text,more\na,b\n")
    with pytest.raises(ValueError, match="need the same columns: predict them one"):
        index_of([files[0], other], RECIPE)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["a", "A ", "b", "", "c c", "c  c"]), min_size=1))
def test_every_row_finds_its_text_again(tmp_path_factory, texts):
    path = tmp_path_factory.mktemp("t") / "t.csv"
    text_file(path, "text,n\n" + "".join(f"{text},{i}\n" for i, text in enumerate(texts)))
    if not any(text.strip() for text in texts):
        with pytest.raises(ValueError, match=r"t.csv: no row can be coded"):
            index_of([path], RECIPE, on_bad_rows="reject")
        return
    index = index_of([path], RECIPE, on_bad_rows="reject")
    dataset, normalise = DistinctInputs(index), TextOptions()
    assert len(dataset.lengths) == len({normalise(t) for t in texts} - {""})
    points = dataset.batch(np.arange(len(dataset.lengths)), 0)["input_ids"].numpy()
    for text, number in zip(texts, index.arrays["input_of_row"].tolist(), strict=True):
        assert normalise(text) == ("" if number < 0 else decode(points[number]))


def test_the_coded_table_has_every_row_and_column_in_order(tmp_path):
    index = index_of([text_file(tmp_path / "t.csv", TABLE)], RECIPE, COLUMNS)
    write_coded_table(index, BOOK, results_of(index), tmp_path / "out.csv")
    table = columns_of(tmp_path / "out.csv")
    assert ",".join(table) == (
        "id,text,language,note,code_1,description_1,confidence_1,code_2,description_2,confidence_2,"
        "confidence_set,needs_review,truncated,language_known"
    )
    assert table["id"] == list("123456")
    assert table["note"] == ["a, b", "", "", "x", "007", ""]
    assert table["code_1"] == ["10000", "10000", "20000", "10000", "20000", "20000"]
    assert table["code_2"] == ["20000", "20000", "", "", "10000", "10000"]
    assert table["description_1"][0] == "Smith, General"
    assert table["confidence_set"][2:4] == ["0.500000", "0.333333"]
    assert table["confidence_2"][2:] == ["", "", "0.250000", "0.250000"]
    assert table["needs_review"] == ["false", "false", "false", "true", "true", "true"]
    assert table["truncated"][2:4] == ["false", "true"]
    assert table["language_known"] == ["true"] * 4 + ["false"] * 2
    write_coded_table(index, BOOK, results_of(index), tmp_path / "out.parquet")  # keeps the types
    table = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert table["needs_review"] == [False, False, False, True, True, True]
    assert table["confidence_2"][2:5] == [None, None, 0.25]
    assert table["confidence_set"][3] == 0.333333


@pytest.mark.parametrize("description", ["Tømrer", "Cieśla"])
def test_the_coded_table_comes_back_in_the_dialect_of_the_input(tmp_path, caplog, description):
    content = 'text;note\r\nsmed på Ærø;"to\nlinjer"\r\n;x\r\n'.encode("latin-1")
    (tmp_path / "t.csv").write_bytes(content)
    index = index_of([tmp_path / "t.csv"], RECIPE)
    book = CodeBook(SYSTEM, ["10000", "20000"], [description, "Tailor"])
    write_coded_table(index, book, results_of(index), tmp_path / "out.csv")
    has_all = description == "Tømrer"  # Latin-1 has no ś: the table becomes UTF-8, and says so
    out = (tmp_path / "out.csv").read_bytes().decode("windows-1252" if has_all else "utf-8")
    lines = out.split("\r\n")
    assert lines[0].startswith("text;note;code_1;description_1;")
    assert lines[1].startswith(f'smed på Ærø;"to\nlinjer";10000;{description};1.000000')
    assert lines[2].startswith(";x;;;;")
    assert ("in UTF-8: windows-1252 cannot hold" in caplog.text) != has_all


def test_a_row_without_text_or_with_an_unknown_language_stays(tmp_path, caplog):
    path = text_file(tmp_path / "t.csv", "text,language\nsmith,en\n,en\nsmith,klingon\n")
    data = OccupationDataModule(predict_files=str(path), columns=COLUMNS)
    data.recipe = RECIPE
    data.trainer = Trainer(accelerator="cpu", logger=False)
    data.trainer.state.fn = TrainerFn.PREDICTING
    data.prepare_data()
    assert '1 row has no text in the column "text": such a row stays' in caplog.text
    assert '1 row has a language that is no known code ("klingon"): coded as' in caplog.text
    index = index_of([path], RECIPE, COLUMNS)
    for name in ("out.csv", "out.parquet"):
        write_coded_table(index, BOOK, results_of(index), tmp_path / name)
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert lines[2] == ",en,,,,,,,,true,,"
    assert lines[3].startswith("smith,klingon,20000,Tailor,")
    assert lines[3].endswith(",false,false")  # truncated, language_known
    assert pq.read_table(tmp_path / "out.parquet").to_pylist()[1]["truncated"] is None


def test_next_sets_are_written_and_no_empty_code_columns(tmp_path):
    index = index_of([text_file(tmp_path / "t.csv", 'text\nsmith\n""\ntailor\n')], RECIPE)
    results = results_of(index) | {
        "code_ids": np.array([[1, -100], [0, -100]]),
        "next_ids": np.array([[[0, 1], [0, -100]], [[1, -100], [-100, -100]]]),
        "next_confidence": np.array([[0.25, 0.125], [0.5, 0.0]]),
    }
    write_coded_table(index, BOOK, results, tmp_path / "out.csv")
    table = columns_of(tmp_path / "out.csv")
    of_sets = "confidence_set,set_2,confidence_set_2,set_3,confidence_set_3"
    assert ",".join(list(table)[1:9]) == f"code_1,description_1,confidence_1,{of_sets}"
    assert table["set_2"] == ["10000+20000", "", "20000"]
    assert table["confidence_set_3"] == ["0.125000", "", ""]


def test_a_crosswalk_adds_codes_of_other_systems(tmp_path, caplog):
    index = index_of([text_file(tmp_path / "t.csv", TABLE)], RECIPE, COLUMNS)
    rows = [("10000", "7", "M"), ("10000", "7", "M"), ("20000", "4", ""), ("00000", "1", "x")]
    walk = job_table(tmp_path / "walk.csv", rows, "code,hisclass,sex")
    crosswalk = read_crosswalk(CrosswalkOptions(walk), BOOK)
    write_coded_table(index, BOOK, results_of(index), tmp_path / "out.csv", crosswalk)
    table = columns_of(tmp_path / "out.csv")
    assert table["hisclass_1"] == ["7", "7", "4", "7", "4", "4"]
    assert table["hisclass_2"] == ["4", "4", "", "", "7", "7"]
    assert table["sex_1"] == ["M", "M", "", "M", "", ""]
    assert '1 codes are not in the model\'s book, such as "00000" in line 5: left' in caplog.text
    assert '1 of 2 codes lead to no sex, such as "20000": empty' in caplog.text
    rows = [("20000", "7"), ("20000", "8")]
    walk = job_table(tmp_path / "walk.csv", rows, "code,hisclass")
    both = read_crosswalk(CrosswalkOptions(walk, joined_by="+"), BOOK)
    assert both["hisclass"].tolist() == ["", "7+8", ""]


WRONG_CROSSWALKS = {
    "code,hisclass\n20000,7\n20000,8\n": 'two hisclass, "7" in line 2 and "8" in line 3; keep one',
    "code,hisclass\n123,7\n": "has no code of this model, such as 10000",
    "code\n20000\n": "has the columns code; it needs code and one for each",
    "code,description\n20000,Tailor\n": r"none that the coded table makes itself \(description",
}


@pytest.mark.parametrize("content", WRONG_CROSSWALKS)
def test_a_crosswalk_that_leads_nowhere_is_refused_before_any_work(tmp_path, monkeypatch, content):
    monkeypatch.setenv("HOME", str(tmp_path))
    text_file(tmp_path / "walk.csv", content)
    text_file(tmp_path / "t.csv", TABLE)
    options = {"columns": COLUMNS, "crosswalk": CrosswalkOptions("~/walk.csv")}
    data = OccupationDataModule(predict_files=str(tmp_path / "t.csv"), **options)
    data.recipe = RECIPE
    with pytest.raises(ValueError, match=WRONG_CROSSWALKS[content]):
        data.setup("predict")


def test_nothing_is_overwritten_and_a_table_that_changed_meanwhile_is_noticed(tmp_path):
    path = text_file(tmp_path / "t.csv", TABLE)
    index = index_of([path], RECIPE, COLUMNS)
    kept = text_file(tmp_path / "out.csv", "kept")
    with pytest.raises(FileExistsError, match="out.csv exists and is not overwritten"):
        write_coded_table(index, BOOK, results_of(index), kept)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.csv", "t.csv"]
    assert kept.read_text() == "kept"
    kept.unlink()
    text_file(path, TABLE + "7,new,en,\n")
    with pytest.raises(RuntimeError, match="hold 7 rows, 6 were read before: a table changed"):
        write_coded_table(index, BOOK, results_of(index), tmp_path / "out.csv")
    assert not (tmp_path / "out.csv").exists()


def test_an_input_column_with_a_name_of_the_output_is_renamed(caplog):
    added = ["code_1", "description_1", "confidence_1", "confidence_set"]
    assert free_names(["text", "code_1", "x"], added) == ["text", "input_code_1", "x"]
    assert free_names(["text", "code_2"], added) == ["text", "input_code_2"]  # no second answer
    assert 'column "code_1" is written as "input_code_1"' in caplog.text
    assert free_names(["code_1", "input_code_1"], added) == ["input_input_code_1", "input_code_1"]
