"""Answers are found in the forms that published chat templates have, each with its own end."""

import json
from pathlib import Path

import pytest

from datamodules.text.instruction_store import Instruction, Marker
from datamodules.tokenizers.text_tokenizer import TextTokenizer, TokenizerOptions, make_tokenizer
from datamodules.tokenizers.trained import bpe_tokenizer

CHAT = (
    {"role": "user", "content": "Hen?"},
    {"role": "assistant", "content": "Yes, it is"},
    {"role": "user", "content": "Cow?"},
    {"role": "assistant", "content": "No"},
)
# Reduced to what matters here: (end-of-text, other special tokens, template, answers).
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
def test_answers_and_their_ends_are_found(name: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name, tmp_path)
    marker = Marker(tokenizer, "answers", "")
    (found,) = marker.tokens([marker.marked(Instruction("f", 1, "", "", CHAT))])
    text = tokenizer.decode(found.ids, skip_special_tokens=False)
    assert text == tokenizer.render(CHAT)  # no second end, no second begin
    runs: list[list[int]] = [[]]
    for token, is_trained in zip(found.ids, found.is_trained, strict=True):
        if is_trained:
            runs[-1].append(int(token))
        elif runs[-1]:
            runs.append([])
    answers = [tokenizer.decode(run, skip_special_tokens=False) for run in runs if run]
    assert answers == FORMS[name][-1]
    assert not found.begins_inside_token
    # What a model is asked to go on from is exactly what stands before the answer in training.
    asked = tokenizer.encode(tokenizer.render(CHAT[:-1], add_generation_prompt=True))
    before = found.ids[: len(asked)].tolist()
    if name != "room for thoughts in the last answer":
        assert before == asked.tolist()
        assert not found.is_trained[len(asked) - 1]
        assert found.is_trained[len(asked)]


def test_tool_calls_may_be_answers_without_content(tmp_path: Path) -> None:
    from datamodules.files.rows import BadRows
    from datamodules.text.instruction_store import read_instructions

    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    rows = [{"messages": [CHAT[0], call, {"role": "tool", "content": "it is"}, CHAT[1]]}]
    (tmp_path / "a.jsonl").write_text(json.dumps(rows[0]))
    bad = BadRows("collect")
    (row,) = read_instructions(tmp_path / "a.jsonl", bad)
    assert not bad.rows
    assert [message["role"] for message in row.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert row.messages[1]["tool_calls"] == [{"name": "look"}]
