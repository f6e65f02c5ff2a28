"""Prompts in: which tokens they become, and which place an error names."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules.core.loader import collated
from datamodules.core.plan import MicroBatch
from datamodules.text.prompts import PromptDataset, PromptRequest, recent
from datamodules.tokenizers.text_tokenizer import TextTokenizer
from datamodules.tokenizers.trained import byte_tokenizer, character_tokenizer

TOKENIZER = byte_tokenizer()
BEGIN = TOKENIZER.begin_id


class ChatTokenizer(TextTokenizer):
    """Writes chats as lines."""

    def render(self, messages, add_generation_prompt):
        lines = [f"{m['role']}: {m['content']}\n" for m in messages]
        return "".join(lines) + ("assistant: " if add_generation_prompt else "")


CHATS = ChatTokenizer(TOKENIZER.backend, TOKENIZER.end_id, BEGIN, "a template")
TALK = [{"role": "user", "content": "Hi"}]


def written(folder: Path, rows: list) -> Path:
    path = folder / "mine.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def dataset(folder, rows, tokenizer=TOKENIZER, **options) -> PromptDataset:
    return PromptDataset(PromptRequest([written(folder, rows)], tokenizer, **options))


def ids_of(data: PromptDataset, sample: int) -> list[int]:
    return data.example(sample, 0)[0].ids


def test_prompts_begin_documents_and_chats_begin_as_their_template_writes_them(tmp_path):
    rows = [{"prompt": "Hello"}, {"prompt": ""}, {"messages": TALK}, {"prompt": "Hello"}]
    data = dataset(tmp_path, rows, CHATS)
    assert ids_of(data, 0) == [BEGIN, *TOKENIZER.encode("Hello")]
    assert ids_of(data, 1) == [BEGIN]
    assert ids_of(data, 2) == TOKENIZER.encode("user: Hi\nassistant: ").tolist()
    assert data.lengths.tolist() == [6, 1, 20, 6]  # equal rows are samples of their own
    batch = collated(data, MicroBatch(0, 3, np.array([1, 0]), np.ones(2, np.float32), {}))
    assert batch["input_ids"].tolist() == [[BEGIN, 0, 0, 0, 0, 0], ids_of(data, 0)]
    assert batch["lengths"].tolist() == [1, 6]
    assert batch["sample_id"].tolist() == [1, 0]


def test_chats_of_other_keys_are_asked_as_messages(tmp_path):
    turns = [{"from": "human", "value": "Hi"}]
    rows = [{"conversations": turns}, {"instruction": "Hi", "input": ""}, {"prompt": turns}]
    data = dataset(tmp_path, rows, CHATS)
    assert {tuple(ids_of(data, i)) for i in range(3)} == {
        tuple(TOKENIZER.encode("user: Hi\nassistant: "))
    }
    named = dataset(tmp_path, rows[1:2], CHATS, column="instruction")  # a text where it is named
    assert ids_of(named, 0) == [BEGIN, *TOKENIZER.encode("Hi")]


def test_a_tokenizer_without_a_begin_token_adds_one_only_where_there_is_nothing(tmp_path):
    bare = TextTokenizer(TOKENIZER.backend, TOKENIZER.end_id)
    data = dataset(tmp_path, [{"prompt": "Hello"}, {"prompt": ""}], bare)
    assert ids_of(data, 0) == TOKENIZER.encode("Hello").tolist()
    assert ids_of(data, 1) == [TOKENIZER.end_id]


def test_parquet_and_jsonl_are_read_alike(tmp_path):
    rows = [{"question": "a"}, {"question": "b"}]
    pq.write_table(pa.table({"question": ["a", "b"]}), tmp_path / "mine.parquet")
    request = PromptRequest([tmp_path / "mine.parquet"], TOKENIZER, "question")
    assert PromptDataset(request).fingerprint == (
        dataset(tmp_path, rows, column="question").fingerprint
    )


def test_the_fingerprint_tells_other_prompts(tmp_path):
    first = dataset(tmp_path, [{"prompt": "ab"}, {"prompt": "c"}]).fingerprint
    assert first == dataset(tmp_path, [{"prompt": "ab", "id": 1}, {"prompt": "c"}]).fingerprint
    assert first != dataset(tmp_path, [{"prompt": "a"}, {"prompt": "bc"}]).fingerprint


def test_a_long_prompt_is_an_error_or_loses_its_beginning(tmp_path):
    rows = [{"prompt": "abc"}, {"prompt": "abcdefghij"}]
    with pytest.raises(ValueError, match=r"mine.jsonl:2: the prompt has 11 tokens and the network"):
        dataset(tmp_path, rows, max_positions=8)
    data = dataset(tmp_path, rows, max_positions=8, max_new_tokens=3, cuts=True)
    assert ids_of(data, 1) == TOKENIZER.encode("fghij").tolist()
    assert data.num_cut.tolist() == [0, 6]
    assert recent(list(range(20)), 8, 100) == [16, 17, 18, 19]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "a"}, {}, '2: the row has neither of "prompt" and "messages" .it has "text".'),
        ({"prompt": "a", "messages": TALK}, {}, '2: the row has both of "prompt" and "messages"'),
        ({"prompt": "a"}, {"column": "ask"}, '2: the row has no "ask" .it has "prompt".; name'),
        ({"prompt": 3}, {}, '2: "prompt" is 3; it must be a text, or a list of messages'),
        ({"prompt": None}, {}, '2: "prompt" is None; it must be a text'),
        ({"messages": []}, {}, r'2: "messages" is \[\]; it must be a text'),
        ({"messages": [{"role": "user"}]}, {}, '2: "messages" is .* it must be a text'),
        ({"messages": TALK}, {}, '2: "messages" holds messages, but the tokenizer has no chat'),
        ({"prompt": "a"}, {"mode": "score"}, '2: mode score needs "choices", .* has "prompt"'),
        ({"prompt": "a", "choices": []}, {"mode": "score"}, r"2: mode score .* the row has \[\]"),
        ({"prompt": "a", "choices": "b"}, {"mode": "score"}, "2: mode score .* the row has 'b'"),
        ({"prompt": "a", "choices": [""]}, {"mode": "score"}, "2: a continuation adds no token"),
        ("{", {}, "2: the line is no JSON"),
    ],
)
def test_a_wrong_row_is_named_with_its_place(tmp_path, row, options, message):
    good = {"prompt": "x", "ask": "x", "choices": ["y"]}
    with pytest.raises(ValueError, match="mine.jsonl:" + message):
        dataset(tmp_path, [good, row], **options)


def test_what_a_tokenizer_refuses_is_named_with_its_place(tmp_path):
    letters = character_tokenizer(iter(["abc"]))
    for row, mode in (({"prompt": "abX"}, "generate"), ({"prompt": "", "choices": ["X"]}, "score")):
        with pytest.raises(ValueError, match="mine.jsonl:2: .* does not know the character .X."):
            dataset(tmp_path, [{"prompt": "a", "choices": ["b"]}, row], letters, mode=mode)
    picky = byte_tokenizer("{{ raise_exception('no system please') }}")
    with pytest.raises(ValueError, match="mine.jsonl:1: the chat template refuses .*no system pl"):
        dataset(tmp_path, [{"messages": TALK}], picky)


def test_a_file_without_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match="mine.jsonl: there is no row; write at least one prompt"):
        dataset(tmp_path, [])


def test_a_value_that_json_does_not_know_is_found_before_any_work(tmp_path):
    pq.write_table(pa.table({"prompt": ["a"], "raw": [b"x"]}), tmp_path / "mine.parquet")
    with pytest.raises(ValueError, match="mine.parquet:1: a value is of type bytes, and the outp"):
        PromptDataset(PromptRequest([tmp_path / "mine.parquet"], TOKENIZER))


@pytest.mark.parametrize(
    "row",
    [{"prompt": "a\ud83d"}, {"prompt": "a", "note": ["\ud83d"]}, {"prompt": "a", "\ud83d": 1}],
)
def test_half_of_a_character_is_named_when_the_file_is_read(tmp_path, row):
    with pytest.raises(ValueError, match=r'mine.jsonl:2: "\\ud83d" is half of a surrogate pair'):
        dataset(tmp_path, [{"prompt": "x"}, row])
