"""Wrong instructions: every row is named with its line, the rule and the way out."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from datamodules import InstructionDataModule, TextSplit, TokenizerOptions
from datamodules.text.instructions import InstructionDataset

GOOD = {"prompt": "How?", "completion": " So."}
USER, ANSWER = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
CHATS = TokenizerOptions("bytes", chat_template="plain")


def data_of(folder: Path, *rows: Any, **options: Any) -> InstructionDataModule:
    path = folder / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return InstructionDataModule(str(path), **{"tokenizer": CHATS, **options})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, '"text": the row has no "prompt"; a row must be .*"completion": "…".*mess'),
        ({"prompt": "x"}, 'the row has no "completion"'),
        ({"prompt": 3, "completion": "x"}, '"prompt" must be a text; write chats as "messages"'),
        ({"prompt": "x", "completion": " \n"}, "the completion is empty: only end-of-text could"),
        ({"messages": "x"}, '"messages" must be a list of objects'),
        ({"messages": []}, 'no message has the role "assistant"'),
        ({"messages": [USER]}, 'no message has the role "assistant": nothing could be learnt; add'),
        (
            {"messages": [{"role": "human", "content": "x"}, ANSWER]},
            'message 1 has the role "human"; it must be one of system, user, assistant, tool',
        ),
        ({"messages": [{"content": "x"}]}, 'message 1 has the role "None"; it must be one of'),
        ({"messages": [{"role": "user"}, ANSWER]}, 'message 1 has no "content"; add it'),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, '"content" of message 1 must be'),
        (
            {"messages": [USER, {"role": "assistant", "content": ""}]},
            "the answer in message 2 is empty",
        ),
        (
            {"conversations": [{"from": "tolstoy", "value": "x"}]},
            'message 1 has the role "tolstoy"; it must be one of system, user',
        ),
        ({"conversations": [{"from": "gpt"}]}, 'message 1 has no "content"'),
        ({"instruction": "x", "output": ""}, "the answer in message 2 is empty"),
        ({"instruction": "x"}, 'no message has the role "assistant"'),
        ({"prompt": "x", "completion": "a\ud83d"}, r'"\\ud83d" is half of a surrogate pair'),
        ({"messages": [{"role": "user", "content": "\ude00"}, ANSWER]}, r'"\\ude00" is half of'),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, row: dict, message: str) -> None:
    data = data_of(tmp_path, GOOD, row)
    with pytest.raises(ValueError, match=rf"(?s)mine.jsonl:2: .*{message}.*on_bad_rows=reject"):
        data.prepare_data()


def test_bad_rows_are_left_out_and_listed_where_this_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [GOOD, {"messages": [USER]}, {"messages": [USER, ANSWER]}]
    data = data_of(tmp_path, *rows, on_bad_rows="reject", split=TextSplit(validation_share=0.5))
    data.prepare_data()
    data.setup("fit")
    datasets = list(data.datasets.values())
    assert all(isinstance(dataset, InstructionDataset) for dataset in datasets)
    assert sum(len(dataset.lengths) for dataset in datasets) == 2
    with (tmp_path / "rejected.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["line"], row["kind"]) == ("2", "no answer")


def test_chats_need_a_chat_template(tmp_path: Path) -> None:
    for kind in ("bytes", "bpe", "characters"):
        data = data_of(tmp_path, {"messages": [USER, ANSWER]}, tokenizer=TokenizerOptions(kind))
        with pytest.raises(ValueError, match="no chat template.*data.tokenizer.chat_template"):
            data.prepare_data()


def test_a_template_may_refuse_messages(tmp_path: Path) -> None:
    (tmp_path / "strict.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    options = TokenizerOptions("bytes", chat_template=str(tmp_path / "strict.jinja"))
    data = data_of(tmp_path, {"messages": [USER, ANSWER]}, GOOD, tokenizer=options)
    with pytest.raises(ValueError, match=r"mine.jsonl:1: .*refuses these messages \(roles must al"):
        data.prepare_data()


@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_a_vocabulary_is_taken_from_the_rows_that_the_template_writes(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "strict.jinja").write_text(
        "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    refused = {"messages": [{"role": "system", "content": "ZQZQZQ"}, USER, ANSWER]}
    options = TokenizerOptions(kind, chat_template=str(tmp_path / "strict.jinja"))
    given = {"tokenizer": options, "split": TextSplit(validation_share=0.0)}
    rows = [GOOD, refused, {"messages": [USER, ANSWER]}]
    with pytest.raises(ValueError, match=r"1 row breaks.*\n.*mine.jsonl:2: .*begin with the user"):
        data_of(tmp_path, *rows, **given).prepare_data()
    data = data_of(tmp_path, *rows, on_bad_rows="reject", **given)
    with_it = data.open_store("fit").tokenizer.backend.get_vocab()
    without = data_of(tmp_path, rows[0], rows[2], **given).open_store("fit").tokenizer
    assert with_it == without.backend.get_vocab()


def test_files_without_any_sound_row_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the files hold no rows; write prompts"):
        data_of(tmp_path).prepare_data()
    with pytest.raises(ValueError, match="mine.jsonl:1: .*no message has the role"):
        data_of(tmp_path, {"messages": [USER]}).prepare_data()
    with pytest.raises(FileNotFoundError, match='train_files: .*Did you mean ".*mine.jsonl"'):
        InstructionDataModule(str(tmp_path / "mne.jsonl")).prepare_data()
    data = data_of(tmp_path, GOOD)
    data.prepare_data()
    with pytest.raises(ValueError, match="no sample is for validation; name data.validation_files"):
        data.setup("fit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 0}, "context_length must be at least 1, got 0"),
        ({"layout": "blocks"}, 'layout must be packed or documents, got "blocks"'),
        ({"train_on": "answer"}, 'train_on must be answers or all, got "answer"'),
        ({"too_long": "drop"}, 'too_long must be cut or leave_out or error, got "drop"'),
        ({"on_bad_rows": "x"}, 'on_bad_rows must be error or reject, got "x"'),
        ({"split": TextSplit(by="tail")}, 'split.by "tail" would cut samples apart'),
        ({"validation_files": "x.jsonl"}, "validation_files are given without train_files"),
    ],
)
def test_wrong_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InstructionDataModule(**options)


def test_a_list_of_rows_is_one_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for content, message in (
        ("[1]", "row 1 is a JSON int; every row"),
        ("[{},", "is no JSON list"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=f"rows.json.*{message}"):
            InstructionDataModule(str(path), tokenizer=CHATS).prepare_data()


def test_an_unknown_character_is_named_with_its_row(tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    rows = [GOOD, {"prompt": "How?", "completion": " Zo."}]
    held.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = TokenizerOptions("characters")
    data = data_of(tmp_path, GOOD, tokenizer=options, validation_files=str(held))
    with pytest.raises(ValueError, match=r'held.jsonl:2: .*does not know the character "Z"'):
        data.prepare_data()
