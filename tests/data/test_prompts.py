"""Prompts in; completions and scores out."""

import datetime
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules.core.plan import MicroBatch
from datamodules.files.rows import JsonRow
from datamodules.text.prompts import Prompt, PromptDataset, read_prompts, read_rows, write_rows
from datamodules.tokenizers.text import TextTokenizer, byte_tokenizer, character_tokenizer
from tests.text_corpora import rows_file
from tests.toy import json_rows

TOKENIZER = byte_tokenizer()
BEGIN = TOKENIZER.begin_id


class ChatTokenizer(TextTokenizer):
    """Formats chats as lines."""

    def render(self, messages, add_generation_prompt, tools):
        lines = [f"{m['role']}: {m['content']}\n" for m in (*tools, *messages)]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")


CHATS = ChatTokenizer(TOKENIZER.backend, TOKENIZER.end_id, BEGIN, "a template")
TALK, ANSWER = [{"role": "user", "content": "Hi"}], {"role": "assistant", "content": "No"}


def dataset(folder, rows, tokenizer=TOKENIZER, **options) -> PromptDataset:
    path = Path(rows_file(folder / "mine.jsonl", rows))
    return PromptDataset(read_prompts(read_rows([path]), tokenizer, **options))


def ids_of(data: PromptDataset, sample: int) -> list[int]:
    return list(data.example(sample, 0)[0].ids)


def test_prompts_begin_documents_and_chats_begin_as_their_template_writes_them(tmp_path):
    rows = [{"prompt": "Hello"}, {"prompt": ""}, {"messages": TALK}, {"prompt": "Hello"}]
    data = dataset(tmp_path, rows, CHATS)
    assert ids_of(data, 0) == [BEGIN, *TOKENIZER.encode("Hello")]
    assert ids_of(data, 1) == [BEGIN]
    assert ids_of(data, 2) == TOKENIZER.encode("user: Hi\nassistant: ").tolist()
    assert data.lengths.tolist() == [6, 1, 20, 6]  # equal rows are separate samples
    batch = data.collated(MicroBatch(0, 3, np.array([1, 0]), np.ones(2, np.float32), {}))
    assert batch["input_ids"].tolist() == [[BEGIN, 0, 0, 0, 0, 0], ids_of(data, 0)]
    assert batch["lengths"].tolist() == [1, 6]
    assert batch["sample_id"].tolist() == [1, 0]


def test_chats_of_other_keys_are_asked_as_messages(tmp_path):
    rows = [
        {"conversations": [{"from": "human", "value": "Hi"}]},
        {"instruction": "Hi", "input": "", "output": "No"},  # the answer is not part of the prompt
        {"messages": [*TALK, ANSWER], "tools": [{"role": "tool", "content": "look"}]},
    ]
    data, question = dataset(tmp_path, rows, CHATS), "user: Hi\nassistant: "
    texts = [TOKENIZER.decode(ids_of(data, i)) for i in range(3)]
    assert texts == [question, question, f"tool: look\n{question}"]


def test_a_tokenizer_without_a_begin_token_adds_one_only_where_there_is_nothing(tmp_path):
    bare = TextTokenizer(TOKENIZER.backend, TOKENIZER.end_id)
    data = dataset(tmp_path, [{"prompt": "Hello"}, {"prompt": ""}], bare)
    assert ids_of(data, 0) == TOKENIZER.encode("Hello").tolist()
    assert ids_of(data, 1) == [TOKENIZER.end_id]


def test_the_fingerprint_tells_other_prompts(tmp_path):
    first = dataset(tmp_path, [{"prompt": "ab"}, {"prompt": "c"}]).fingerprint
    assert first == dataset(tmp_path, [{"prompt": "ab", "id": 1}, {"prompt": "c"}]).fingerprint
    assert first != dataset(tmp_path, [{"prompt": "a"}, {"prompt": "bc"}]).fingerprint


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "a"}, {}, '2: the row has neither "prompt" nor "messages", it has: text; write'),
        ({"prompt": "a", "messages": TALK}, {}, '2: the row has both "prompt" and "messages"'),
        ({"prompt": 3}, {}, '2: "prompt" must be a text; write chats as "messages"'),
        ({"messages": TALK}, {}, "2: the tokenizer has no chat template"),
        ({"prompt": "a"}, {"mode": "score"}, '2: mode score needs "choices", a list of texts'),
        ({"prompt": "a", "choices": "b"}, {"mode": "score"}, '2: mode score needs "choices"'),
        ({"prompt": "a", "choices": [""]}, {"mode": "score"}, "2: a choice adds no token"),
        ({"prompt": "a\ud83d"}, {}, r'2: "\\ud83d" is half of a surrogate pair'),
        ("{", {}, "2: the line is no JSON"),
    ],
)
def test_a_wrong_row_is_named_with_its_place(tmp_path, row, options, message):
    good = {"prompt": "x", "choices": ["y"]}
    with pytest.raises(ValueError, match="mine.jsonl:" + message):
        dataset(tmp_path, [good, row], **options)


def test_what_a_tokenizer_refuses_is_named_with_its_place(tmp_path):
    letters = character_tokenizer(iter(["abc"]))
    for row, mode in (({"prompt": "abX"}, "generate"), ({"prompt": "", "choices": ["X"]}, "score")):
        with pytest.raises(ValueError, match="mine.jsonl:2: .* does not know the character .X."):
            dataset(tmp_path, [{"prompt": "a", "choices": ["b"]}, row], letters, mode=mode)
    picky = replace(TOKENIZER, chat_template="{{ raise_exception('no system please') }}")
    with pytest.raises(ValueError, match="mine.jsonl:1: the chat template refuses .*no system pl"):
        dataset(tmp_path, [{"messages": TALK}], picky)


def test_a_file_without_rows_is_refused(tmp_path):
    said = "there is no row to predict for; write at least one prompt"
    with pytest.raises(ValueError, match=said):
        dataset(tmp_path, [])


def rows_of(rows: list[dict]) -> list[JsonRow]:
    return [JsonRow(Path("mine.jsonl"), line, row) for line, row in enumerate(rows, start=1)]


def write_completions(
    rows: list[JsonRow], texts: list[str], path: Path, num_cut: tuple[int, ...] = (0, 0)
) -> None:
    ids = np.full((len(texts), 9), -1)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = TOKENIZER.encode(text)
    lengths = np.array([len(text) for text in texts])
    results = {
        "completion_ids": ids,
        "num_tokens": lengths,
        "num_characters": np.maximum(lengths - 1, 0),
        "finish_reason": np.arange(len(texts)) % 4,
    }
    prompts = PromptDataset([[Prompt([1], 0, cut)] for cut in num_cut])
    write_rows(rows, prompts.columns(results, TOKENIZER), path)


def test_completions_stand_in_the_rows_that_asked_for_them(tmp_path, caplog):
    rows = rows_of([{"prompt": "ä", "num_tokens": 3}, {"id": [1], "prompt": "b"}])
    out = tmp_path / "new" / "out.jsonl"
    num_cut = (0, 4)
    write_completions(rows, ["one.", ""], out, num_cut)
    assert json_rows(out) == [
        {"prompt": "ä", "input_num_tokens": 3, "completion": "one", "num_tokens": 4}
        | {"finish_reason": "end", "prompt_tokens_cut": 0},
        {"id": [1], "prompt": "b", "completion": "", "num_tokens": 0}
        | {"finish_reason": "stop", "prompt_tokens_cut": 4},
    ]
    assert 'column "num_tokens" is written as "input_num_tokens"' in caplog.text
    assert "ä" in out.read_text("utf-8")  # unescaped, as in the input
    with pytest.raises(FileExistsError, match=r"out.jsonl exists and is not overwritten"):
        write_completions(rows, ["a", "b"], out, num_cut)


def test_parquet_is_read_as_jsonl_and_any_value_is_written(tmp_path):
    values = {"day": datetime.date(2024, 2, 29), "price": Decimal("1.50"), "prompt": "a"}
    pq.write_table(pa.Table.from_pylist([values]), tmp_path / "mine.parquet")
    rows = list(read_rows([tmp_path / "mine.parquet"]))
    data = PromptDataset(read_prompts(rows, TOKENIZER))
    assert data.fingerprint == dataset(tmp_path, [{"prompt": "a"}]).fingerprint
    rows += rows_of([{"prompt": "b", "note": ["\ud83d"]}])  # half a surrogate pair, as an escape
    write_completions(rows, ["b", "c"], tmp_path / "out.jsonl")
    first, second = json_rows(tmp_path / "out.jsonl")
    assert (first["day"], first["price"]) == ("2024-02-29", "1.50")
    assert second["note"] == ["\ud83d"]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_file_that_changed_meanwhile_is_not_written(tmp_path, num_rows):
    rows = rows_of([{"prompt": "a"}] * num_rows)
    with pytest.raises(RuntimeError, match=f"the files hold {num_rows} rows, 2 were predicted"):
        write_completions(rows, ["a", "b"], tmp_path / "o.jsonl")
    assert not list(tmp_path.iterdir())
