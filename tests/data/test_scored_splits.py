"""Rows that judge are never those of the training; labels and chunks as they were trained."""

import json

import numpy as np
import pytest

from datamodules import ScoredTextDataModule, SplitOptions
from datamodules.core.planned import LoaderOptions
from datamodules.scored.datamodule import ChunkOptions
from datamodules.scored.labels import LabelOptions, trained_heads
from datamodules.scored.store import ScoredRequest, TextColumns, open_store
from datamodules.text.encoding import TextLimits

HEADS = {"y": LabelOptions("binary")}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))


def table(path, numbers) -> str:
    path.write_text("\n".join(["text,y", *(f"word{i},{i % 2}" for i in numbers)]) + "\n")
    return str(path)


def data_of(files, **options) -> ScoredTextDataModule:
    loader = LoaderOptions(num_workers=0)
    return ScoredTextDataModule(
        **{"files": files, "heads": HEADS, "loader": loader, "global_batch_size": 4, **options}
    )


def judged_by(trained, files, stage="test", **options) -> ScoredTextDataModule:
    """Return the data of an evaluation of what was trained with other data."""
    data = data_of(files, **options)
    data.recipe = json.loads(json.dumps(trained.recipe))  # as a checkpoint brings it
    data.setup(stage)
    return data


def test_a_file_that_has_grown_does_not_judge_with_rows_of_the_training(tmp_path) -> None:
    options = {"split": SplitOptions(0.1, 0.3)}
    path = table(tmp_path / "mine.csv", range(40))
    trained = data_of({"train": path}, **options)
    trained.setup("fit")
    same = judged_by(trained, {"train": path}, **options)
    assert not {*same.datasets["test"].texts} & {*trained.datasets["train"].texts}
    table(tmp_path / "mine.csv", range(100, 0, -1))
    with pytest.raises(ValueError, match=r"another division of rows \(rows: .*test=new.csv"):
        judged_by(trained, {"train": path}, **options)
    table(tmp_path / "mine.csv", range(40))
    with pytest.raises(ValueError, match=r"another division of rows \(seed: 0 -> 1\)"):
        judged_by(trained, {"train": path}, split=SplitOptions(0.1, 0.3, seed=1))
    new = table(tmp_path / "new.csv", range(100, 120))
    assert len(judged_by(trained, {"test": new}).datasets["test"].texts) == 20


def test_files_that_share_texts_judge_as_they_did_in_training(tmp_path) -> None:
    files = dict.fromkeys(("train", "validation", "test"), table(tmp_path / "a.csv", range(9)))
    trained = data_of(files)
    trained.setup("fit")
    assert len(judged_by(trained, files).datasets["test"].texts) == 9


@pytest.mark.parametrize(("named", "drawn"), [("test", "validation"), ("validation", "test")])
def test_only_the_part_without_a_file_is_drawn(tmp_path, named, drawn) -> None:
    train, other = (table(tmp_path / f"{n.start}.csv", n) for n in (range(50), range(50, 60)))
    files = {"train": train, named: other}
    trained = data_of(files, split=SplitOptions(0.2, 0.2))
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
    data = data_of({"train": path}, text=text, chunks=ChunkOptions(most=3, stride=8))
    data.setup("fit")


def test_trained_levels_and_switches_are_read_as_numbers(tmp_path) -> None:
    heads = {
        "level": LabelOptions("ordinal"),
        "sold": LabelOptions("binary"),
        "tags": LabelOptions("multilabel", classes=["old", "cheap"], separator=";"),
    }
    path = tmp_path / "mine.csv"
    path.write_text("text,level,sold,tags\na,1.0,1.0,cheap\nb,3,no,old\nc,2.0,0.0,\n")
    request = ScoredRequest(((0, path),), TextColumns(), heads)
    store = open_store(request)
    assert store.heads["level"]["classes"] == ["1", "2", "3"]
    expected = [[0, 1, 0, 1], [2, 0, 1, 0], [1, 0, np.nan, np.nan]]
    np.testing.assert_array_equal(store.labels, expected)
    path.write_text(path.read_text().replace("b,3,no", "b,3.0,False"))
    for given in (heads, None):  # declared again, or of the checkpoint alone
        again = open_store(
            ScoredRequest(((0, path),), TextColumns(), trained_heads(store.heads, given))
        )
        np.testing.assert_array_equal(again.labels, expected)
    path.write_text("text,level,sold,tags\na,4.0,1,old\n")
    with pytest.raises(ValueError, match=r'"4.0": head "level": must be one of 1, 2, 3; or'):
        open_store(ScoredRequest(((0, path),), TextColumns(), trained_heads(store.heads, heads)))
