"""Scored texts: labels in every format, missing and wrong ones; evaluation rows that training never
uses; the scored file; the audit."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules import ScoredTextDataModule, SplitOptions
from datamodules.core.planned import LoaderOptions
from datamodules.demo import parameters
from datamodules.files.tables import TableOptions
from datamodules.scored.datamodule import ChunkOptions
from datamodules.scored.store import (
    LabelOptions,
    ScoredRequest,
    ScoredStore,
    TextColumns,
    divided,
    open_store,
    scores_of,
    strata_of,
    trained_heads,
    write_scored,
)
from datamodules.text.encoding import TextLimits

pytestmark = pytest.mark.usefixtures("own_cache")

BINARY = {"y": LabelOptions("binary")}
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


def opened(path: Path, heads=HEADS, **columns) -> ScoredStore:
    return open_store(ScoredRequest({0: [path]}, TextColumns(**columns), heads))


def as_csv(rows: list[dict], mark: str) -> str:
    def cell(value):
        if isinstance(value, list):
            return ";".join(value) or ";"
        return "" if value is None else str(value).lower()

    lines = [list(rows[0]), *([cell(value) for value in row.values()] for row in rows)]
    return "\n".join(mark.join(line) for line in lines) + "\n"


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "parquet"])
def test_every_format_gives_the_same_labels_and_a_missing_one_is_never_0(tmp_path, suffix) -> None:
    path = tmp_path / f"mine.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)) + "\n")
    elif suffix == "parquet":
        flat = [
            {**row, "tags": None if row["tags"] is None else ";".join(row["tags"]) or ";"}
            for row in ROWS
        ]
        pq.write_table(pa.Table.from_pylist(flat), path)
    else:
        path.write_text(as_csv(ROWS, {"csv": ",", "tsv": "\t"}[suffix]))
    store = opened(path)
    np.testing.assert_array_equal(store.labels, EXPECTED)
    assert store.text_of_row.tolist() == [0, 1, 0]  # equal texts are stored once
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


def test_options_of_the_datamodule_are_checked(tmp_path) -> None:
    assert ScoredTextDataModule(["x.csv"]).files[0] == ["x.csv"]
    with pytest.raises(ValueError, match="chunks.most must be at least 1, got 0"):
        ChunkOptions(most=0)
    with pytest.raises(ValueError, match="data.files names dev; its parts are train, validation"):
        ScoredTextDataModule(files={"train": "a.csv", "dev": "b.csv"})
    (tmp_path / "a.csv").write_text("text,x\na,1\n")
    for heads, name in ((None, "empty"), ({"a.x": LabelOptions("regression", "x")}, "a.x")):
        with pytest.raises(ValueError, match=f"data.heads is {name}: name what is learnt, without"):
            ScoredTextDataModule(files={"train": str(tmp_path / "a.csv")}, heads=heads).setup("fit")


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


def table(path, numbers) -> str:
    path.write_text("\n".join(["text,y", *(f"word{i},{i % 2}" for i in numbers)]) + "\n")
    return str(path)


def data_of(files, **options) -> ScoredTextDataModule:
    loader = LoaderOptions(num_workers=0)
    return ScoredTextDataModule(
        **{"files": files, "heads": BINARY, "loader": loader, "global_batch_size": 4, **options}
    )


def evaluation_data(trained, files, stage="test", **options) -> ScoredTextDataModule:
    """Return the data of an evaluation of a model that was trained on other data."""
    data = data_of(files, **options)
    data.recipe = json.loads(json.dumps(trained.recipe))  # as restored from a checkpoint
    data.setup(stage)
    return data


def test_a_changed_training_file_is_refused_for_evaluation(tmp_path) -> None:
    options = {"split": SplitOptions(0.1, 0.3)}
    path = table(tmp_path / "mine.csv", range(40))
    trained = data_of({"train": path}, **options)
    trained.setup("fit")
    same = evaluation_data(trained, {"train": path}, **options)
    assert not {*same.datasets["test"].texts} & {*trained.datasets["train"].texts}
    table(tmp_path / "mine.csv", range(100, 0, -1))
    with pytest.raises(ValueError, match=r"another split of rows \(rows: .*test=new.csv"):
        evaluation_data(trained, {"train": path}, **options)
    table(tmp_path / "mine.csv", range(40))
    with pytest.raises(ValueError, match=r"another split of rows \(seed: 0 -> 1\)"):
        evaluation_data(trained, {"train": path}, split=SplitOptions(0.1, 0.3, seed=1))
    new = table(tmp_path / "new.csv", range(100, 120))
    assert len(evaluation_data(trained, {"test": new}).datasets["test"].texts) == 20


def test_files_that_share_texts_are_evaluated_as_in_training(tmp_path) -> None:
    files = dict.fromkeys(("train", "validation", "test"), table(tmp_path / "a.csv", range(9)))
    trained = data_of(files)
    trained.setup("fit")
    assert len(evaluation_data(trained, files).datasets["test"].texts) == 9


@pytest.mark.parametrize(("named", "drawn"), [("test", "validation"), ("validation", "test")])
def test_only_the_part_without_a_file_is_drawn(tmp_path, named, drawn) -> None:
    train, other = (table(tmp_path / f"{n.start}.csv", n) for n in (range(50), range(50, 60)))
    trained = data_of({"train": train, named: other}, split=SplitOptions(0.2, 0.2))
    trained.setup("fit")
    trained.setup("test")
    sizes = {part: len(dataset.texts) for part, dataset in trained.datasets.items()}
    assert sizes[named] == 10
    assert sizes["train"] + sizes[drawn] == 50
    assert 8 <= sizes[drawn] <= 12


def test_a_stride_that_would_leave_out_tokens_is_refused(tmp_path) -> None:
    path, text = table(tmp_path / "mine.csv", range(40)), TextLimits(10, 4)
    chunks = ChunkOptions(most=3, stride=9)
    with pytest.raises(ValueError, match=r"stride is 9, and a chunk holds 8 tokens .* Lower"):
        data_of({"train": path}, text=text, chunks=chunks).setup("fit")
    data_of({"train": path}, text=text, chunks=ChunkOptions(most=3, stride=8)).setup("fit")


def test_trained_levels_and_switches_are_read_as_numbers(tmp_path) -> None:
    heads = {
        "level": LabelOptions("ordinal"),
        "sold": LabelOptions("binary"),
        "tags": LabelOptions("multilabel", classes=["old", "cheap"], separator=";"),
    }
    path = tmp_path / "mine.csv"
    path.write_text("text,level,sold,tags\na,1.0,1.0,cheap\nb,3,no,old\nc,2.0,0.0,\n")
    store = open_store(ScoredRequest({0: [path]}, TextColumns(), heads))
    assert store.heads["level"]["classes"] == ["1", "2", "3"]
    expected = [[0, 1, 0, 1], [2, 0, 1, 0], [1, 0, np.nan, np.nan]]
    np.testing.assert_array_equal(store.labels, expected)
    path.write_text(path.read_text().replace("b,3,no", "b,3.0,False"))
    for given in (heads, None):  # declared again, or only in the checkpoint
        again = open_store(
            ScoredRequest({0: [path]}, TextColumns(), trained_heads(store.heads, given))
        )
        np.testing.assert_array_equal(again.labels, expected)
    path.write_text("text,level,sold,tags\na,4.0,1,old\n")
    with pytest.raises(ValueError, match=r'"4.0": head "level": must be one of 1, 2, 3; or'):
        open_store(ScoredRequest({0: [path]}, TextColumns(), trained_heads(store.heads, heads)))


def test_a_scored_table_holds_every_row_and_a_rejected_one_without_scores(tmp_path) -> None:
    path, out = tmp_path / "mine.csv", tmp_path / "out.csv"
    path.write_text("text,quality\nhello,7\n ,8\nworld,9\nhello,1\n")
    store = open_store(ScoredRequest({2: [path]}, TextColumns(), {}), "reject")
    facts = {"quality": {"kind": "ordinal", "classes": ["bad", "good"]}}
    write_scored(store, facts, {"quality": np.array([[0.2, 0.8], [0.9, 0.1]])}, out)
    assert out.read_text().splitlines() == [
        "text,quality,predicted_quality,expected_quality",
        "hello,7,good,0.8",
        " ,8,,",
        "world,9,bad,0.1",
        "hello,1,good,0.8",
    ]
    jsonl = str(tmp_path / "out.jsonl")
    data = ScoredTextDataModule(files={"predict": str(path)}, predict_output=jsonl)
    with pytest.raises(ValueError, match=r"out.jsonl cannot hold .*mine.csv: lines of JSON"):
        _ = data.predict_output_path
    path.write_bytes("text;quality\nhello;7\nwør;8\n".encode("cp1252"))
    in_greek = {"quality": {"kind": "ordinal", "classes": ["κακό", "good"]}}
    one = open_store(ScoredRequest({2: [path]}, TextColumns(), {}), "reject")
    write_scored(one, in_greek, {"quality": np.array([[0.9, 0.1]] * 2)}, tmp_path / "greek.csv")
    assert "wør;8;κακό;0.1" in (tmp_path / "greek.csv").read_text(encoding="utf-8")
    path.write_text("text,quality\nhello,7\n")
    with pytest.raises(RuntimeError, match="hold 1 rows, 4 were read before"):
        write_scored(store, facts, {"quality": np.zeros((2, 2))}, tmp_path / "other.csv")
    assert not (tmp_path / "other.csv").exists()


def test_a_training_file_named_for_evaluation_gives_a_warning(tmp_path, caplog) -> None:
    path = table(tmp_path / "mine.csv", range(40))
    data_of({"train": path, "predict": path}).setup("fit")
    assert "is named for training" not in caplog.text
    data_of({"train": path, "test": path}).setup("fit")
    assert "mine.csv is named for training and for validation or test" in caplog.text


def test_a_rare_separator_can_be_named(tmp_path) -> None:
    path, out, table = tmp_path / "mine.csv", tmp_path / "out.csv", TableOptions(separator="^")
    path.write_text("text^quality\nhello, you^7\n")
    store = open_store(ScoredRequest({2: [path]}, TextColumns(), {}, table=table))
    facts = {"quality": {"kind": "ordinal", "classes": ["bad", "good"]}}
    write_scored(store, facts, {"quality": np.array([[0.2, 0.8]])}, out, table)
    assert out.read_text().splitlines()[1] == "hello, you^7^good^0.8"
    audit = ScoredTextDataModule(
        files={"train": str(path)}, heads={"quality": LabelOptions("regression")}, table=table
    ).audit()
    assert audit.files == {str(path): 1}


def test_a_page_of_many_lines_is_one_cell(tmp_path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text('text,y\n"' + "<p>\n" * 20_000 + '",1\n')
    assert opened(path, BINARY).num_bytes.tolist() == [80_000]


def test_the_audit_names_what_is_there_and_what_is_wrong(own_folder) -> None:
    path = Path("mine.csv")
    path.write_text("text,grade,trade\na,1.5,smith\nb,,\na,-3,baker\nc,good,smith\n")
    heads = {"grade": LabelOptions("regression"), "trade": LabelOptions("multiclass")}
    audit = ScoredTextDataModule(files={"train": str(path)}, heads=heads).audit()
    assert audit.files == {str(path): 3}
    assert audit.parts[0].num_duplicates == 1
    found = [(row.file, row.line, row.value) for row in audit.bad_rows]
    assert found == [("mine.csv", 5, "good")]
    assert audit.labels == {"trade": {"baker": 1, "smith": 1}}
    assert ("head", "trade: multiclass, 2 of 3 rows labelled") in audit.notes
    assert ("head", "grade: regression, 2 of 3 rows labelled; -3 to 1.5, mean -0.75") in audit.notes
    Path("new.csv").write_text('text\nA\nnew\n" "\n')
    files = {"train": "mine.csv", "predict": "new.csv"}
    audit = ScoredTextDataModule(files=files, heads=heads).audit()
    assert audit.files == {"mine.csv": 3, "new.csv": 2}
    assert [len(part.keys) for part in audit.parts] == [3, 2]
    assert list(audit.leaks()) == [("train", "predict", 1)]
    assert [(row.line, row.kind) for row in audit.bad_rows] == [(5, "label"), (4, "label")]
    path.write_text("text,grade,trade\na,good,smith\n")
    with pytest.raises(ValueError, match='mine.csv:2: "good": head "grade": must be a finite'):
        ScoredTextDataModule(files={"train": str(path)}, heads=heads).audit()


def test_the_columns_of_each_kind() -> None:
    chances = np.array([[0.25, 0.75], [0.625, 0.375]])
    classes = {"classes": ["x", "y"], "std": 1.0}
    for kind, expected in {
        "multiclass": {"predicted_q": ["y", "x"], "probability_q": [0.75, 0.625]},
        "multilabel": {"probability_q_x": [0.25, 0.625], "probability_q_y": [0.75, 0.375]},
        "binary": {"probability_q": [0.25, 0.625]},
        "regression": {"predicted_q": [0.25, 0.625]},
    }.items():
        assert scores_of("q", {"kind": kind, **classes}, chances) == expected
    levels = {"kind": "ordinal", "classes": ["-1", "0"]}  # numbers keep their values
    found = {"predicted_q": ["0", "-1"], "expected_q": [-0.25, -0.625]}
    assert scores_of("q", levels, chances) == found
    small = {"kind": "regression", "classes": None, "std": 2e-8}
    assert scores_of("q", small, chances * 1e-8) == {"predicted_q": [2.5e-9, 6.25e-9]}


def test_the_demo_counts_the_parameters_of_a_function() -> None:
    assert parameters("C.f(self, a, *b, c=1) -> int") == (3, True)
    assert parameters("f(a, /)") == (1, False)
