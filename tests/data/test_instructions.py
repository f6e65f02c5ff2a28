"""Prompts with answers, and chats: trained tokens, and refused rows."""

import json
import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import processors

from datamodules import InstructionDataModule, PlanOptions, TextSplit, TokenizerOptions
from datamodules.core.batches import IGNORED
from datamodules.text.instructions import InstructionDataset
from datamodules.tokenizers.text import TextTokenizer, bpe_tokenizer, byte_tokenizer, make_tokenizer
from tests.text_corpora import rows_file, saved_tokenizer
from tests.toy import csv_rows

REWRITES = (  # templates that shorten earlier answers, as those do that drop thoughts
    "{% for m in messages %}{{ m.role }}: {{ m.content if loop.last else m.content[:1] }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SENTENCE = "hens sat in the mat and drank all of its milk at night"
WORDS = SENTENCE.split()
NO_SPLIT = TextSplit(validation_share=0)
TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hen?"},
    {"role": "assistant", "content": "Yes"},
    {"role": "user", "content": "Cow?"},
    {"role": "assistant", "content": "No"},
]
GOOD = {"prompt": "How?", "completion": " So."}
USER, ANSWER = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
CHATS = TokenizerOptions("bytes", chat_template="plain")
Make = Callable[..., InstructionDataModule]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def made(*rows: dict, name: str = "rows.jsonl", **options: Any) -> InstructionDataModule:
        path = rows_file(tmp_path / name, rows)
        options = {"split": NO_SPLIT, "context_length": 64, "tokenizer": CHATS, **options}
        return InstructionDataModule(path, plan=PlanOptions(seed=1), **options)

    return made


def template(text: str, tmp_path: Path) -> TokenizerOptions:
    (tmp_path / "template.jinja").write_text(text)
    return TokenizerOptions("bytes", chat_template=str(tmp_path / "template.jinja"))


def opened(data: InstructionDataModule) -> InstructionDataset:
    """Return the training part with all rows: so few leave nothing for validation."""
    data.prepare_data()
    data.store = data.store_request().open()
    dataset = data.build("train")
    assert isinstance(dataset, InstructionDataset)
    return dataset


def trained_runs(dataset: InstructionDataset, sample_id: int = 0) -> list[str]:
    """Return the text of each run of consecutive labels of one row."""
    runs: list[list[int]] = [[]]
    for piece in dataset.example(sample_id, 0):
        for label in [*piece.labels.tolist(), IGNORED]:
            if label == IGNORED:
                runs.append([])
            else:
                runs[-1].append(label)
    decode = dataset.store.tokenizer.decode
    return [decode(run, skip_special_tokens=False) for run in runs if run]


def example(count: int, seed: int = 0) -> list[dict]:
    pick = random.Random(seed)
    texts = (" ".join(pick.choices(WORDS, k=pick.randint(1, 9))) for _ in range(2 * count))
    return [{"prompt": f"{next(texts)} {i}", "completion": f" {next(texts)}"} for i in range(count)]


def test_a_prompt_is_read_and_its_completion_with_the_end_is_learnt(make):
    data = make({"prompt": "ab", "completion": "cd"}, separator="|")
    (piece,) = opened(data).example(0, 0)
    encode, end = byte_tokenizer().encode, 256
    assert piece.input_ids.tolist() == [end, *encode("ab|cd")]
    assert piece.labels.tolist() == [-100, -100, -100, *encode("cd"), end]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_chats_are_known_by_their_keys(make, tmp_path, name):
    options = {"context_length": 99, "layout": "documents"}
    share_gpt = [
        {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"])}
        | {"value": m["content"]}
        for m in TWO_TURNS
    ]
    alpaca = {"instruction": "Hen?", "input": "", "output": "Yes"}
    question = [{"role": "user", "content": "Hen?\n\nThe red one."}, {**TWO_TURNS[2]}]
    alike = [
        ({"conversations": share_gpt}, TWO_TURNS),
        ({"conversations": share_gpt[1:], "system": "Be brief.", "prompt": None}, TWO_TURNS),
        ({"conversations": TWO_TURNS}, TWO_TURNS),
        (alpaca, TWO_TURNS[1:3]),
        ({**alpaca, "input": "The red one."}, question),
        ({**alpaca, "system": "Be brief.", "history": None}, TWO_TURNS[:3]),
        ({"messages": TWO_TURNS[1:], "system": "Be brief."}, TWO_TURNS),
        ({"instruction": "Cow?", "output": "No", "history": [["Hen?", "Yes"]]}, TWO_TURNS[1:]),
    ]
    data = make(*(row for row, _ in alike), name=name, **options)
    if name.endswith(".json"):  # one JSON list, with a byte order mark
        rows = json.dumps([row for row, _ in alike], indent=1)
        (tmp_path / name).write_text("\ufeff " + rows, encoding="utf-8")
    found = opened(data)
    plain = opened(make(*({"messages": m} for _, m in alike), name="plain.jsonl", **options))
    for i in range(len(alike)):
        assert trained_runs(found, i) == trained_runs(plain, i) != []
        assert [p.input_ids.tolist() for p in found.example(i, 0)] == [
            p.input_ids.tolist() for p in plain.example(i, 0)
        ]


def test_an_answer_without_an_end_token_gets_end_of_text(make, tmp_path):
    bare = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}" + (
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    options = template(bare, tmp_path)
    dataset = opened(make({"messages": TWO_TURNS}, tokenizer=options, context_length=99))
    assert trained_runs(dataset) == ["Yes\n", "No\n<|endoftext|>"]


def test_no_token_of_a_completion_is_lost(make, tmp_path):
    tokenizer = bpe_tokenizer([SENTENCE], 300)
    tokenizer.backend.post_processor = processors.ByteLevel(trim_offsets=True)  # GPT-2's
    saved_tokenizer(tokenizer, tmp_path)
    options = TokenizerOptions("folder", path=str(tmp_path))
    completion = "  Yes<|endoftext|> hens \n "
    dataset = opened(make({"prompt": "hens?", "completion": completion}, tokenizer=options))
    assert trained_runs(dataset) == [completion + "<|endoftext|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused(make, tmp_path):
    options = template(REWRITES, tmp_path)
    with pytest.raises(ValueError, match=r"rows.jsonl:1: .*before message 3 when.*plain"):
        opened(make({"messages": TWO_TURNS}, tokenizer=options))


@pytest.mark.parametrize("layout", ["packed", "documents"])
def test_counts_of_targets_are_those_of_the_labels(make, layout):
    rows = [*example(40), {"messages": TWO_TURNS}]
    options = TokenizerOptions("bpe", 300, chat_template="plain")
    data = make(*rows, tokenizer=options, layout=layout, global_batch_size=4, micro_batch_size=2)
    dataset = opened(data)
    data.datasets["train"] = dataset
    found, stated, texts = 0, {}, []
    for batch in data.train_dataloader():
        labels, tokens = batch["labels"], batch["input_ids"]
        is_trained = labels != IGNORED
        here = int((is_trained * batch["weight"][batch["sample_index"]]).sum())
        assert batch["num_targets"] == {"tokens": here}
        found += here
        stated[int(batch["step_index"])] = float(batch["step_denominators"]["tokens"])
        in_document = batch["document_ids"][:, 1:] == batch["document_ids"][:, :-1]
        follows = is_trained[:, :-1] & in_document
        assert torch.equal(labels[:, :-1][follows], tokens[:, 1:][follows])
    assert found == sum(stated.values()) == dataset.target_counts["tokens"].sum()
    for sample in range(len(dataset.lengths)):
        pieces = dataset.example(sample, 0)
        assert sum(len(p.labels) for p in pieces) == dataset.lengths[sample] <= 64
        count = sum(int((p.labels != IGNORED).sum()) for p in pieces)
        assert count == dataset.target_counts["tokens"][sample]
        texts += [data.tokenizer.decode(p.labels[p.labels != IGNORED]) for p in pieces]
    assert sorted(texts) == sorted([*(row["completion"] for row in rows[:-1]), "YesNo"])


def test_over_long_samples_are_cut_and_counted(make, caplog):
    rows = [{"prompt": "p" * 5, "completion": "c" * 3}, {"prompt": "q" * 9, "completion": "d" * 3}]
    rows.append({"prompt": "r", "completion": "e" * 30})
    with caplog.at_level(logging.WARNING):
        dataset = opened(make(*rows, context_length=10, layout="documents"))
    assert "2 train samples exceed data.context_length 10: their beginnings" in caplog.text
    assert "1 lose a part of an answer" in caplog.text
    assert dataset.lengths.tolist() == [9, 10, 10]  # begin, prompt, completion, without the end
    assert dataset.target_counts["tokens"].tolist() == [4, 4, 10]
    assert trained_runs(dataset, 1) == ["ddd<|endoftext|>"]
    assert trained_runs(dataset, 2) == ["e" * 9 + "<|endoftext|>"]


def test_a_sample_that_loses_all_targets_is_left_out_and_counted(make, caplog, tmp_path):
    ends_with_user = {"messages": [*TWO_TURNS, {"role": "user", "content": "x" * 90}]}
    assert opened(make(ends_with_user, *example(3))).samples.tolist() == [1, 2, 3]
    assert "1 train samples have no target: left out" in caplog.text
    with pytest.raises(ValueError, match="no samples are for train .*1 train samples have no t"):
        opened(make(ends_with_user))


def test_a_store_is_made_once_and_parquet_is_jsonl(make, tmp_path):
    first, again = (opened(make(*example(5))).store for _ in range(2))
    assert first.folder == again.folder
    assert first.facts == again.facts
    rows = [*example(5), {"messages": TWO_TURNS}]
    path = tmp_path / "rows.parquet"
    columns = {n: [row.get(n) for row in rows] for n in ("prompt", "completion", "messages")}
    pq.write_table(pa.table(columns), path)
    theirs = InstructionDataModule(str(path), split=NO_SPLIT, tokenizer=CHATS)
    assert opened(theirs).store.fingerprint == opened(make(*rows)).store.fingerprint


def test_a_row_is_described_by_its_places_and_answers(make):
    said = opened(make({"prompt": "ab", "completion": "cd"})).describe(0, 0)
    assert said["place"].endswith("rows.jsonl:1")
    assert (said["text"], said["trained on"]) == ("'abcd'", "'cd<|endoftext|>'")


CHAT = (
    {"role": "user", "content": "Hen?"},
    {"role": "assistant", "content": "Yes, it is"},
    {"role": "user", "content": "Cow?"},
    {"role": "assistant", "content": "No"},
)
# Templates reduced to what matters here: (end-of-text, other special tokens, template, answers).
FORMS = {
    "headers": (
        "<|eot|>",
        ["<|head|>", "<|body|>"],
        "{{ bos_token }}{% for m in messages %}<|head|>{{ m.role }}<|body|>\n\n"
        "{{ m.content | trim }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|head|>assistant<|body|>\n\n{% endif %}",
        ["Yes, it is<|eot|>", "No<|eot|>"],
    ),
    "no generation prompt": (
        "</s>",
        [],
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %} [INST] {{ m.content }} "
        "[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
        [" Yes, it is</s>", " No</s>"],
    ),
    "another end of turn than of text": (
        "<eos>",
        ["<turn>", "<end>"],
        "{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}",
        ["Yes, it is<end>", "No<end>"],
    ),
    "room for thoughts in the last answer": (
        "<|end|>",
        ["<|start|>"],
        "{% set n = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set n.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "<|start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index0 > n.last %}"
        "<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}",
        ["Yes, it is<|end|>", "<think>\n\n</think>\n\nNo<|end|>"],
    ),
    "names in plain text": (
        "</s>",
        [],
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        ["Yes, it is</s>", "No</s>"],
    ),
}


def tokenizer_of(name: str, folder: Path) -> TextTokenizer:
    end, others, template, _ = FORMS[name]
    backend = bpe_tokenizer(["hen cow yes no it is"], 270).backend
    backend.add_special_tokens([end, *others])
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": end, "bos_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return make_tokenizer(TokenizerOptions("folder", path=str(folder)), iter(()))


@pytest.mark.parametrize("name", FORMS)
def test_answers_and_their_ends_are_found(make, name, tmp_path):
    tokenizer = tokenizer_of(name, tmp_path)
    options = TokenizerOptions("folder", path=str(tmp_path))
    greeting = {"role": "assistant", "content": "Hello!"}
    rows = [{"messages": list(CHAT)}, {"messages": [greeting, *CHAT[:2]]}]
    dataset = opened(make(*rows, tokenizer=options, context_length=199, layout="documents"))
    assert trained_runs(dataset) == FORMS[name][-1]
    assert "Hello!" in trained_runs(dataset, 1)[0]
    (piece,) = dataset.example(0, 0)
    ids = [*piece.input_ids.tolist(), *tokenizer.encode(tokenizer.render(CHAT))[-1:].tolist()]
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == tokenizer.render(CHAT)  # no second begin or end token
    # A model continues from exactly the text that precedes the answer in training.
    prompt = tokenizer.encode(tokenizer.render(CHAT[:-1], add_generation_prompt=True)).tolist()
    if name != "room for thoughts in the last answer":
        assert ids[: len(prompt)] == prompt
        assert piece.labels[len(prompt) - 2] == IGNORED  # the label is the next token
        assert piece.labels[len(prompt) - 1] != IGNORED


def test_tools_and_their_calls_are_written_by_the_template_or_refused(make, tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    chat = [CHAT[0], call, {"role": "tool", "content": "it is"}, CHAT[1]]
    row = {"messages": chat, "tools": json.dumps([{"function": {"name": "find"}}])}
    text = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.name }}{% endfor %};{% endfor %}"
    )
    data = make(row, tokenizer=template(text, tmp_path), layout="documents")
    assert trained_runs(opened(data)) == ["look;", "Yes, it is;<|endoftext|>"]
    assert opened(data).describe(0, 0)["text"] == "'find;Hen?;look;it is;Yes, it is;'"
    for without, name in ((row, "find"), ({"messages": chat}, "look")):
        with pytest.raises(ValueError, match=f'template leaves the tool "{name}" out; name one'):
            make(without).prepare_data()


def test_an_answer_of_weight_0_is_read_and_not_learnt(make):
    first, last = ({**TWO_TURNS[2], "weight": w} for w in (0, 1.0))
    dataset = opened(make({"messages": [first, USER, last, USER, {**ANSWER, "weight": 0}]}))
    assert trained_runs(dataset) == ["Yes<|endoftext|>"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "x"}, 'the row has neither "prompt" nor "messages", it has: text; write .*tion"'),
        ({"prompt": "x"}, '"completion" must be a text: {"prompt": "…", "completion"'),
        ({"prompt": 3, "completion": "x"}, '"prompt" must be a text; write chats as "messages"'),
        ({"prompt": "x", "completion": " \n"}, "the completion is empty: only end-of-text could"),
        ({"messages": "x"}, '"messages" must be a list of objects'),
        ({"messages": [USER]}, 'no message has the role "assistant", and a weight that is not 0: '),
        ({"messages": [USER, {**ANSWER, "weight": 0}]}, "no message has the role .*, and a weight"),
        ({"messages": [USER, {**ANSWER, "weight": 3}]}, "message 2 has the weight 3; it must be 0"),
        ({"messages": [USER, ANSWER], "tools": "look"}, '"tools" must be a list of objects such'),
        ({"messages": [{**USER, "role": "human"}]}, '"human"; it must be one of system, user, ass'),
        ({"messages": [{"role": "user"}, ANSWER]}, 'message 1 needs a "content" that is a text'),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "an answer is empty: only"),
        ({"conversations": [{"from": "tolstoy", "value": "x"}]}, 'message 1 has the role "tolstoy'),
        ({"instruction": "x", "output": "y", "history": ["z"]}, '"history" must be a list of pai'),
        ({"prompt": "x", "completion": "y", "system": "z"}, '"system" needs "messages"'),
        ({"prompt": "x", "completion": "a\ud83d"}, r'"\\ud83d" is half of a surrogate pair'),
        ({"messages": [USER, ANSWER], "tools": [{"name": "\ud83d"}]}, r'"\\ud83d" is half of'),
    ],
)
def test_a_wrong_row_is_named(make, row, message):
    data = make(GOOD, row)
    with pytest.raises(ValueError, match=rf"(?s)rows.jsonl:2: .*{message}.*on_bad_rows=reject"):
        data.prepare_data()


def test_bad_rows_are_left_out_and_listed_where_this_is_wanted(make, own_folder):
    rows = [GOOD, {"messages": [USER]}, {"messages": [USER, ANSWER]}]
    data = make(*rows, on_bad_rows="reject", split=TextSplit(validation_share=0.5))
    data.prepare_data()
    data.setup("fit")
    datasets = list(data.datasets.values())
    assert all(isinstance(dataset, InstructionDataset) for dataset in datasets)
    assert sum(len(dataset.lengths) for dataset in datasets) == 2
    (row,) = csv_rows("rejected.csv")
    assert (row["line"], row["kind"]) == ("2", "no answer")


def test_chats_need_a_chat_template(make):
    data = make({"messages": [USER, ANSWER]}, tokenizer=TokenizerOptions("bpe"))
    with pytest.raises(ValueError, match="no chat template.*data.tokenizer.chat_template"):
        data.prepare_data()


@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_a_vocabulary_is_taken_from_the_rows_that_the_template_writes(make, tmp_path, kind):
    strict = template(
        "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}",
        tmp_path,
    )
    refused = {"messages": [{"role": "system", "content": "ZQZQZQ"}, USER, ANSWER]}
    options = replace(strict, kind=kind)
    rows = [GOOD, refused, {"messages": [USER, ANSWER]}]
    with pytest.raises(ValueError, match=r"1 row breaks.*\n.*rows.jsonl:2: .*begin with the user"):
        make(*rows, tokenizer=options).prepare_data()
    data = make(*rows, on_bad_rows="reject", tokenizer=options)
    with_it = data.open_store("fit").tokenizer.backend.get_vocab()
    without = make(rows[0], rows[2], tokenizer=options).open_store("fit").tokenizer
    assert with_it == without.backend.get_vocab()


def test_files_without_any_sound_row_are_refused(make):
    with pytest.raises(ValueError, match="the files hold no rows; write prompts"):
        make().prepare_data()
    with pytest.raises(ValueError, match="rows.jsonl:1: .*no message has the role"):
        make({"messages": [USER]}).prepare_data()
    data = make(GOOD)
    data.prepare_data()
    said = "no samples are for validation; name data.validation_files"
    with pytest.raises(ValueError, match=said):
        data.setup("fit")


def test_an_unknown_character_is_named_with_its_row(make, tmp_path):
    held = rows_file(tmp_path / "held.jsonl", [GOOD, {"prompt": "How?", "completion": " Zo."}])
    data = make(GOOD, tokenizer=TokenizerOptions("characters"), validation_files=held)
    with pytest.raises(ValueError, match=r'held.jsonl:2: .*does not know the character "Z"'):
        data.prepare_data()
