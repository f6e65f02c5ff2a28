"""Pipelines of the tokenizers library: their files, what their tokens spell, chats as text.

A pipeline is read as the JSON that its tokenizer.json holds. Chats are rendered by Jinja templates
of the Hugging Face kind, as transformers does it.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers

SPACE_MARK = "▁"  # of SentencePiece
SEQUENCES = ("normalizers", "pretokenizers", "decoders")
# Four characters are white space to Python, and not to `tokenizers`.
WORD = re.compile(r"(?:\S|[\x1c-\x1f])+")
BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def byte_lengths(backend: Tokenizer) -> np.ndarray | None:
    """Return the UTF-8 bytes of each token, see `TextTokenizer.byte_lengths`."""
    pipeline = json.loads(backend.to_str())
    model, steps = pipeline["model"], _steps(pipeline["decoder"])
    kinds = {step["type"] for step in steps}
    is_marked = "Metaspace" in kinds or any(
        step["type"] == "Replace" and step["pattern"] == {"String": SPACE_MARK} for step in steps
    )
    spells_itself = kinds == {"Fuse"} and pipeline["pre_tokenizer"] is None
    if model["type"] not in ("BPE", "Unigram") or model.get("end_of_word_suffix"):
        return None
    if not ("ByteLevel" in kinds or is_marked or spells_itself):
        return None
    alphabet = frozenset(pre_tokenizers.ByteLevel.alphabet())

    def measured(token: str) -> int:
        if "ByteLevel" in kinds and alphabet.issuperset(token):  # another piece spells itself
            return len(token)
        if is_marked and BYTE_PIECE.fullmatch(token):
            return 1
        return len((token.replace(SPACE_MARK, " ") if is_marked else token).encode())

    vocabulary = backend.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for token, i in vocabulary.items():
        lengths[i] = measured(token)
    for i, added in backend.get_added_tokens_decoder().items():
        lengths[i] = 0 if added.special else len(added.content.encode())
    return lengths


def anchor(backend: Tokenizer) -> int | None:
    """Return a token whose text stays as it is, whatever is decoded behind it; none if there is
    none."""
    special = backend.get_added_tokens_decoder()
    for token, i in sorted(backend.get_vocab().items(), key=lambda pair: pair[1]):
        if i in special or BYTE_PIECE.fullmatch(token):  # bytes join with those behind them
            continue
        text = backend.decode([i])
        is_word = text.isprintable() and text.strip() == text and "\ufffd" not in text
        if text and is_word and backend.decode([i, i]).startswith(text):
            return i
    return None


def without_first_space(backend: Tokenizer) -> Tokenizer:
    """Return a copy that puts no space before a text's first word; itself where it puts none."""
    pipeline = json.loads(backend.to_str())
    normalizer = pipeline["normalizer"]
    prefixing = [step for step in _steps(normalizer) if step["type"] == "Prepend"]
    if prefixing:
        kept = [step for step in _steps(normalizer) if step not in prefixing]
        pipeline["normalizer"] = {"type": "Sequence", "normalizers": kept}
    for step in _steps(pipeline["pre_tokenizer"]):
        if step["type"] == "Metaspace" and step["prepend_scheme"] != "never":
            step["prepend_scheme"] = "never"
        elif step.get("add_prefix_space"):  # of ByteLevel
            step["add_prefix_space"] = False
        else:
            continue
        prefixing.append(step)
    return Tokenizer.from_str(json.dumps(pipeline)) if prefixing else backend


def may_drop(backend: Tokenizer) -> bool:
    """Whether the pipeline drops a character that it does not know, without a word.

    Byte pairs do, where no token stands for the unknown and the bytes are not all there.
    """
    pipeline = json.loads(backend.to_str())
    model = pipeline["model"]
    if model["type"] != "BPE" or model.get("unk_token") or model.get("byte_fallback"):
        return False
    is_of_bytes = "ByteLevel" in {step["type"] for step in _steps(pipeline["decoder"])}
    has_all = set(pre_tokenizers.ByteLevel.alphabet()) <= model["vocab"].keys()
    return pipeline["normalizer"] is None and not (is_of_bytes and has_all)


def spells(backend: Tokenizer, character: str) -> bool:
    """Whether a pipeline without normaliser can spell a character; some hold no white space."""
    if character.isspace() and backend.pre_tokenizer is not None:
        return True
    return character in backend.decode(backend.encode(character, add_special_tokens=False).ids)


def words_of(text: str) -> list[str]:
    """Return what stands between white space."""
    return WORD.findall(text)


def whole_words(backend: Tokenizer) -> frozenset[str] | None:
    """Return the words that a pipeline of whole words knows; none if it is of another kind.

    Such a pipeline has no token for the unknown.
    """
    pipeline = json.loads(backend.to_str())
    model, splits = pipeline["model"], pipeline["pre_tokenizer"]
    if model["type"] != "WordLevel" or model["unk_token"] in model["vocab"]:
        return None
    is_plain = pipeline["normalizer"] is None and splits == {"type": "WhitespaceSplit"}
    return frozenset(model["vocab"]) if is_plain else None


def _steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    inner = next(step[name] for name in SEQUENCES if name in step)
    return [part for each in inner for part in _steps(each)]


Message = Mapping[str, Any]  # role and content, and what else a template reads

TEMPLATES = {
    "plain": (
        "{% for message in messages %}"
        "{{ message.role + ':\\n' + message.content }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
        "{{ '\\n\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
    )
}


def named_template(name: str) -> str:
    """Return a built-in template, or the content of a file.

    Raises:
        FileNotFoundError: it is neither.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f'tokenizer.chat_template: "{name}" is no file and none of the built-in templates '
            f"({', '.join(TEMPLATES)}); name a Jinja file."
        )
    return path.read_text("utf-8")
