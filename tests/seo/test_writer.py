"""A writer learns titles, adds them to the rows, and is exported."""

import json

import pytest

from datamodules.files.rows import read_rejected
from lit_models.causal_lm.generation import GenerationOptions
from lit_models.commands.export import export
from lit_models.seo.writer import LitSnippetWriter
from lit_models.training import ErrorTable, Ledger
from tests.seo.pages import pages_of, predict, write_pages, writer
from tests.text_corpora import rows_file
from tests.toy import csv_rows, json_rows, toy_trainer

NAME = "lit_models.seo.writer.LitSnippetWriter"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with pages.jsonl, a.ckpt of a run that memorised them, and its metrics."""
    folder = tmp_path_factory.mktemp("writer")
    path = write_pages(folder / "pages.jsonl")
    quiet = {"callbacks": [Ledger()], "enable_checkpointing": False, "precision": 32}
    trainer = toy_trainer(folder, max_epochs=70, limit_val_batches=0, **quiet)
    module = writer()
    trainer.fit(module, pages_of(path))
    trainer.save_checkpoint(folder / "a.ckpt")
    [metrics] = trainer.test(module, pages_of(path), verbose=False)
    return folder, metrics, module


def test_what_is_learnt_by_heart_is_written(trained):
    _, metrics, _ = trained
    for name in ("rouge1", "rouge2", "rougeL", "within_limits"):
        assert metrics[f"test/{name}"] == 1
    assert metrics["test/duplicates"] == 0
    assert metrics["test/query_coverage"] == 0.5  # "hen" occurs, "food" does not
    assert metrics["test/characters"] == 7
    assert metrics["test/copy_rate"] == 0  # "big" is in no page
    assert metrics["test/lead_copy_rate"] == 1
    assert metrics["test/lead_characters"] == len("The hen is here.")
    assert metrics["test/lead_rouge1"] == pytest.approx(2 * (1 / 4 * 1 / 2) / (1 / 4 + 1 / 2))
    assert metrics["test/loss"] < 0.1


def test_rows_come_back_with_what_was_written(trained, tmp_path):
    folder, _, _ = trained
    module = writer()
    rows = predict(tmp_path, module, folder / "pages.jsonl", ckpt_path=str(folder / "a.ckpt"))
    assert [row["snippet"] for row in rows] == [row["title"] for row in rows]
    assert [row["id"] for row in rows] == list(range(4))
    assert all(row["num_characters"] == 7 for row in rows)
    assert all(row["finish_reason"] == "end" for row in rows)


def test_the_table_of_errors_shows_what_the_writer_wrote(trained, tmp_path, monkeypatch):
    """A stop text within a token ends the snippet there, for scores and report alike."""
    folder, _, module = trained
    monkeypatch.setattr(module, "generation", GenerationOptions(max_new_tokens=12, stop=["ig "]))
    trainer = toy_trainer(tmp_path, callbacks=[Ledger(), ErrorTable()], precision=32)
    [metrics] = trainer.test(module, pages_of(str(folder / "pages.jsonl")), verbose=False)
    assert metrics["test/characters"] == 1
    rows = csv_rows(tmp_path / "errors-test.csv")
    assert {row["answer"] for row in rows} == {"B"}
    assert "num_characters" not in rows[0]


def test_pages_without_a_title_are_written_for_too(trained, tmp_path):
    folder, _, _ = trained
    lines = json_rows(folder / "pages.jsonl")
    bare = [{"text": r["text"], "query": r["query"]} for r in lines if "text" in r]
    path = rows_file(tmp_path / "bare.jsonl", bare)
    rows = predict(tmp_path, writer(), path, ckpt_path=str(folder / "a.ckpt"))
    assert [row["snippet"] for row in rows] == [r["title"] for r in lines if "text" in r]


def test_bad_pages_are_named_together_or_left_without_a_snippet(trained, tmp_path):
    folder, _, _ = trained
    rows = [{"text": 3}, {"text": "The hen is here. It eats.", "query": "hen food"}, {"query": "x"}]
    path = tmp_path / "mixed.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"ckpt_path": str(folder / "a.ckpt")}
    message = r'mixed.jsonl:1: "3": "text" must be a text(.|\n)*mixed.jsonl:3: .*no "html"'
    with pytest.raises(ValueError, match=message):
        predict(tmp_path, writer(), path, **options)
    found = predict(tmp_path, writer(), path, on_bad_rows="reject", **options)
    assert [row["snippet"] for row in found] == [None, "Big hen", None]
    assert [bad.line for bad in read_rejected(tmp_path)] == [1, 3]


def test_an_exported_folder_writes_the_same(trained, tmp_path, monkeypatch):
    folder, _, module = trained
    export(folder / "a.ckpt", to=tmp_path / "model", class_path=NAME)
    loaded = LitSnippetWriter.from_exported(tmp_path / "model")
    assert loaded.target == "title"
    rows = json_rows(folder / "pages.jsonl")
    assert loaded.write(rows) == module.float().write(rows) == [row["title"] for row in rows]
    monkeypatch.setattr(loaded, "completions", lambda dataset, _: map(str, dataset.lengths))
    assert loaded.write(["The hen is here. " * 20]) == ["32"]  # prompt tokens, as in training
    with pytest.raises(ValueError, match='row:1: the row has no "html" and no "text"'):
        loaded.write([{"query": "hen"}])
    theirs = json.loads((tmp_path / "model" / "config.json").read_text())
    assert theirs["architectures"] == ["LlamaForCausalLM"]  # transformers reads it, too


def test_data_of_another_target_are_refused(tmp_path):
    path = write_pages(tmp_path / "pages.jsonl")
    trainer = toy_trainer(tmp_path, max_epochs=1)
    with pytest.raises(ValueError, match="model.target is title and the data's is description"):
        trainer.fit(writer(), pages_of(path, target="description"))
