"""Scored texts out: the written table, the audit, the demo's facts."""

from pathlib import Path

import numpy as np
import pytest

from datamodules import ScoredTextDataModule
from datamodules.demo import parameters
from datamodules.files.tables import TableOptions
from datamodules.scored.labels import LabelOptions, scores_of
from datamodules.scored.store import (
    ScoredRequest,
    TextColumns,
    check_output,
    open_store,
    write_scored,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))


def test_a_scored_table_holds_every_row_and_a_rejected_one_without_scores(tmp_path) -> None:
    path, out = tmp_path / "mine.csv", tmp_path / "out.csv"
    path.write_text("text,quality\nhello,7\n ,8\nworld,9\nhello,1\n")
    request = ScoredRequest(((2, path),), TextColumns(), {}, "reject")
    store = open_store(request)
    facts = {"quality": {"kind": "ordinal", "classes": ["bad", "good"]}}
    write_scored(store, facts, {"quality": np.array([[0.2, 0.8], [0.9, 0.1]])}, out)
    assert out.read_text().splitlines() == [
        "text,quality,predicted_quality,expected_quality",
        "hello,7,good,0.8",
        " ,8,,",
        "world,9,bad,0.1",
        "hello,1,good,0.8",
    ]
    with pytest.raises(ValueError, match='the prediction has no "quality" for each of 2 texts'):
        write_scored(store, facts, {}, out)
    with pytest.raises(ValueError, match=r"out.jsonl cannot hold .*mine.csv: lines of JSON"):
        check_output([path], tmp_path / "out.jsonl")
    path.write_bytes("text;quality\nhello;7\nwør;8\n".encode("cp1252"))
    in_greek = {"quality": {"kind": "ordinal", "classes": ["κακό", "good"]}}
    one = open_store(ScoredRequest(((2, path),), TextColumns(), {}, "reject"))
    write_scored(one, in_greek, {"quality": np.array([[0.9, 0.1]] * 2)}, tmp_path / "greek.csv")
    assert "wør;8;κακό;0.1" in (tmp_path / "greek.csv").read_text(encoding="utf-8")
    path.write_text("text,quality\nhello,7\n")
    with pytest.raises(RuntimeError, match="hold 1 rows, 4 were read before"):
        write_scored(store, facts, {"quality": np.zeros((2, 2))}, tmp_path / "other.csv")


def test_a_separator_that_no_table_is_searched_for_is_given(tmp_path) -> None:
    path, out, table = tmp_path / "mine.csv", tmp_path / "out.csv", TableOptions(separator="^")
    path.write_text("text^quality\nhello, you^7\n")
    store = open_store(ScoredRequest(((2, path),), TextColumns(), {}, table=table))
    facts = {"quality": {"kind": "ordinal", "classes": ["bad", "good"]}}
    write_scored(store, facts, {"quality": np.array([[0.2, 0.8]])}, out, table)
    assert out.read_text().splitlines()[1] == "hello, you^7^good^0.8"
    audit = ScoredTextDataModule(
        files={"train": str(path)}, heads={"quality": LabelOptions("regression")}, table=table
    ).audit()
    assert audit.files == {str(path): 1}


def test_the_audit_names_what_is_there_and_what_is_wrong(tmp_path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("text,grade,trade\na,1.5,smith\nb,,\na,-3,baker\nc,good,smith\n")
    heads = {"grade": LabelOptions("regression"), "trade": LabelOptions("multiclass")}
    audit = ScoredTextDataModule(files={"train": str(path)}, heads=heads).audit()
    assert audit.files == {str(path): 3}
    assert audit.parts[0].num_duplicates == 1
    assert [(row.line, row.value) for row in audit.bad_rows] == [(5, "good")]
    assert audit.labels == {"trade": {"baker": 1, "smith": 1}}
    assert ("head", "trade: multiclass, 2 of 3 rows labelled") in audit.notes
    assert ("head", "grade: regression, 2 of 3 rows labelled; -3 to 1.5, mean -0.75") in audit.notes


def test_the_columns_of_each_kind() -> None:
    chances = np.array([[0.25, 0.75], [0.625, 0.375]])
    classes = {"classes": ["x", "y"]}
    for kind, expected in {
        "multiclass": {"predicted_q": ["y", "x"], "probability_q": [0.75, 0.625]},
        "multilabel": {"probability_q_x": [0.25, 0.625], "probability_q_y": [0.75, 0.375]},
        "binary": {"probability_q": [0.25, 0.625]},
        "regression": {"predicted_q": [0.25, 0.625]},
    }.items():
        assert scores_of("q", {"kind": kind, **classes}, chances) == expected
    levels = {"kind": "ordinal", "classes": ["-1", "0"]}  # numbers keep their scale
    found = {"predicted_q": ["0", "-1"], "expected_q": [-0.25, -0.625]}
    assert scores_of("q", levels, chances) == found


def test_the_demo_counts_the_parameters_of_a_function() -> None:
    assert parameters("C.f(self, a, *b, c=1) -> int") == (3, True)
    assert parameters("f(a, /)") == (1, False)
