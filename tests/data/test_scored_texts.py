"""Files of scored texts: labels, missing and wrong ones, folds, scored output, audit."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules import ScoredTextDataModule, SplitOptions
from datamodules.scored.datamodule import ChunkOptions
from datamodules.scored.labels import LabelOptions, LabelReader, label_text
from datamodules.scored.store import (
    ScoredRequest,
    ScoredStore,
    TextColumns,
    divided,
    open_store,
    strata_of,
)

HEADS = {
    "grade": LabelOptions("regression"),
    "level": LabelOptions("ordinal", "stars"),
    "sold": LabelOptions("binary"),
    "trade": LabelOptions("multiclass"),
    "tags": LabelOptions("multilabel", classes=["old", "cheap"], separator=";"),
}
ROWS = [
    {"text": "a", "grade": 1.5, "stars": 2, "sold": True, "trade": "smith", "tags": ["cheap"]},
    {"text": "b", "grade": None, "stars": 5, "sold": False, "trade": None, "tags": []},
    {"text": "a", "grade": -3, "stars": None, "sold": None, "trade": "baker", "tags": None},
]
NAN = np.nan
EXPECTED = [[1.5, 0, 1, 1, 0, 1], [NAN, 3, 0, NAN, 0, 0], [-3, NAN, NAN, 0, NAN, NAN]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))


def opened(path: Path, heads=HEADS, **columns) -> ScoredStore:
    return open_store(ScoredRequest(((0, path),), TextColumns(**columns), heads))


def as_csv(rows: list[dict], mark: str) -> str:
    def cell(value):
        if isinstance(value, list):
            return ";".join(value) or ";"
        return "" if value is None else str(value).lower()

    lines = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    return "\n".join(mark.join(line) for line in lines) + "\n"


def test_a_text_is_described_with_its_labels_as_the_file_has_them(tmp_path) -> None:
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    heads = opened(tmp_path / "mine.jsonl").heads
    columns = {"grade": [0], "level": [1], "sold": [2], "trade": [3], "tags": [4, 5]}
    told = [
        {name: label_text(heads[name], np.array(row)[places]) for name, places in columns.items()}
        for row in EXPECTED
    ]
    assert list(told[0].values()) == ["1.5", "2", "1", "smith", "cheap"]
    assert list(told[1].values()) == ["", "5", "0", "", ""]
    assert list(told[2].values()) == ["-3", "", "", "baker", ""]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_every_format_gives_the_same_labels_and_a_missing_one_is_never_0(tmp_path, suffix) -> None:
    path = tmp_path / f"mine.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    elif suffix == "parquet":
        flat = [{**row, "tags": None if row["tags"] is None else ";".join(row["tags"]) or ";"}
                for row in ROWS]  # fmt: skip
        pq.write_table(pa.Table.from_pylist(flat), path)
    else:
        path.write_text(as_csv(ROWS, {"csv": ",", "tsv": "\t"}[suffix]))
    store = opened(path)
    np.testing.assert_array_equal(store.labels, EXPECTED)
    assert store.text_of_row.tolist() == [0, 1, 0]  # equal texts are one
    assert store.heads["level"]["classes"] == ["2", "3", "4", "5"]
    assert store.heads["trade"]["classes"] == ["baker", "smith"]


@pytest.mark.parametrize(
    ("head", "cell", "rule"),
    [
        ("grade", "good", r'mine.csv:3: "good": head "grade": must be a finite number'),
        ("grade", "inf", "must be a finite number"),
        ("stars", "2.5", 'head "level": must be a whole number'),
        ("sold", "perhaps", 'head "sold": must be one of 0, false, no, 1, true, yes'),
        ("tags", "old;new", 'head "tags": must be one of old, cheap'),
        ("text", " ", "the column text holds no text"),
    ],
)
def test_a_wrong_cell_is_named_with_file_line_value_and_rule(tmp_path, head, cell, rule) -> None:
    rows = [dict(ROWS[0]), {**ROWS[0], head: cell}]
    path = tmp_path / "mine.csv"
    path.write_text(as_csv(rows, ","))
    with pytest.raises(ValueError, match=rule):
        opened(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "binary", "separator": ";"}, "separator ';' on a binary head: a multilabel"),
        ({"kind": "multilabel"}, "separator None on a multilabel head: a multilabel head needs"),
        ({"kind": "multilabel", "separator": ";"}, "a multilabel head needs the names of its cla"),
        ({"kind": "regression", "classes": ["a", "b"]}, "have no effect on a regression head"),
        ({"kind": "binary", "classes": ["a", "b", "c"]}, "a binary head has two classes"),
        ({"kind": "ordinal", "classes": ["a", "a"]}, "two or more different names"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        LabelOptions(**options)


@pytest.mark.parametrize("kind", ["regression", "binary"])
def test_one_label_in_all_rows_is_told(kind, caplog) -> None:
    reader = LabelReader("mark", LabelOptions(kind))
    reader.finish(np.array([[1.0], [0.0], [np.nan]]))
    assert caplog.text == ""
    reader.finish(np.ones((3, 1)))
    assert 'head "mark": all 3 rows have the label 1, so that' in caplog.text


def test_options_of_the_datamodule_are_checked(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"a stride needs more than one chunk, got 1 and 8"):
        ChunkOptions(stride=8)
    (tmp_path / "a.csv").write_text("text,x\na,1\n")
    with pytest.raises(ValueError, match="data.heads is empty: name what is learnt"):
        ScoredTextDataModule(files={"train": str(tmp_path / "a.csv")}).setup("fit")


def test_numbers_are_stratified_by_quantiles_and_missing_ones_apart() -> None:
    strata = strata_of(np.array([[v] for v in [*range(10), NAN]]), is_number=True)
    assert strata == ["0", "0", "1", "1", "2", "2", "3", "3", "4", "4", "-"]


def test_groups_are_never_in_two_parts(tmp_path) -> None:
    path = tmp_path / "mine.csv"
    rows = [f"word{i} x,{i % 2},g{i // 3}" for i in range(90)]
    path.write_text("\n".join(["text,y,site", *rows]) + "\n")
    store = opened(path, {"y": LabelOptions("binary")}, group="site")
    parts = divided(store, SplitOptions(0.2, 0.1))
    groups = [set(store.keys[parts == part].tolist()) for part in (0, 1, 2)]
    assert not groups[0] & groups[1] | groups[0] & groups[2] | groups[1] & groups[2]
    assert min(map(len, groups)) > 2
    assert sum(map(len, groups)) == 30
