"""Rows of prompts in: jsonl, json and parquet become tokens to go on from, or choices to rate.

A document begins with the begin-of-text token where the tokenizer has one, as in training; a chat
begins as its template writes it. A prompt without any token begins with the end-of-text token,
which is what stands before a document.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.files.rows import JsonRow, read_json_rows
from datamodules.text.instruction_rows import as_messages
from datamodules.text.prompt_output import json_line
from datamodules.tokenizers.text_tokenizer import TextTokenizer

ROWS_AT_ONCE = 1024
DEFAULT_COLUMNS = ("prompt", "messages")


@dataclass(frozen=True)
class PromptRequest:
    """All that the tokens of prompts depend on.

    Args:
        files: jsonl, json or parquet.
        tokenizer: of the model.
        column: of the prompt, a text or messages; none takes `prompt` or `messages`.
        separator: stands behind a prompt that is a text.
        mode: `generate`, or `score` for rows with choices or a continuation.
        max_positions: most positions of the network; none for no limit.
        max_new_tokens: that will be generated.
        cuts: whether a text that is too long loses its beginning; else it is an error.
        given: rows instead of those of files.
    """

    files: Sequence[Path]
    tokenizer: TextTokenizer
    column: str | None = None
    separator: str = ""
    mode: str = "generate"
    max_positions: int | None = None
    max_new_tokens: int = 1
    cuts: bool = False
    given: Sequence[dict[str, Any]] = ()

    def rows(self) -> Iterator[JsonRow]:
        """Yield the rows, in order."""
        yield from (JsonRow(Path("row"), i, row) for i, row in enumerate(self.given, 1))
        yield from read_rows(self.files)

    def prompts(self) -> Iterator[list["Prompt"]]:
        """Yield the tokens of each row, see `read_prompts`."""
        return read_prompts(self)


class Prompt(NamedTuple):
    """The tokens of one text, how many at its end are rated, how many at its beginning are cut."""

    ids: list[int]
    num_rated: int
    num_cut: int


class _Text(NamedTuple):
    """A row's prompt as text, whether a chat template wrote it, and what may follow it."""

    row: JsonRow
    prompt: str
    is_chat: bool
    choices: list[str]


def read_rows(files: Sequence[Path]) -> Iterator[JsonRow]:
    """Yield the rows of all files, in order."""
    return chain.from_iterable(read_json_rows(path) for path in files)


def read_prompts(request: PromptRequest) -> Iterator[list[Prompt]]:
    """Yield the tokens of each row: one prompt, or each choice after the row's prompt.

    Raises:
        ValueError: a row lacks what the mode needs, a value is of a wrong type, or a text is
            longer than the network's positions.
    """
    texts = (_text(row, request) for row in request.rows())
    while some := list(islice(texts, ROWS_AT_ONCE)):
        prompts = _encoded(request.tokenizer, [(text.row, text.prompt) for text in some])
        if request.mode == "generate":
            for text, ids in zip(some, prompts, strict=True):
                yield [_prompt(text, ids, request)]
            continue
        both = [(text.row, text.prompt + choice) for text in some for choice in text.choices]
        joint = iter(_encoded(request.tokenizer, both))
        for text, ids in zip(some, prompts, strict=True):
            yield [_choice(text, ids, next(joint), request) for _ in text.choices]


def prompt_tokens(tokenizer: TextTokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of prompts that begin a document; no chat template wrote them."""
    return [begun(ids.tolist(), False, tokenizer) for ids in tokenizer.encode_batch(prompts)]


def joint_tokens(prompt: Sequence[int], joint: Sequence[int]) -> int:
    """Return how many tokens at the end of `joint` are the continuation's.

    Prompt and continuation are tokenised as one text, as a model saw them in training. The
    continuation's tokens are those from the first one that differs from the prompt's own tokens:
    where a token spans the border, it is the continuation's.

    Args:
        prompt: tokens of the prompt alone.
        joint: tokens of both as one text.
    """
    pairs = zip(prompt, joint, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(joint)))
    return len(joint) - same


def kept_tokens(
    offsets: np.ndarray, prompt_end: int, shrinks: tuple[int, int], most: int
) -> np.ndarray:
    """Return which tokens stay, [n] bool, where a prompt that is too long loses the end of a part.

    Args:
        offsets: [n, 2] characters of each token, of a prompt and what may follow it.
        prompt_end: characters of the prompt.
        shrinks: first and past-the-last character of that part.
        most: tokens that the prompt may have; it keeps more where the part is shorter than that.
    """
    surplus = int((offsets[:, 0] < prompt_end).sum()) - most
    part = np.flatnonzero((offsets[:, 0] >= shrinks[0]) & (offsets[:, 1] <= shrinks[1]))
    kept = np.ones(len(offsets), bool)
    if surplus > 0:
        kept[part[max(len(part) - surplus, 0) :]] = False
    return kept


def recent(tokens: list[int], max_positions: int, num_new: int) -> list[int]:
    """Return the end of a text that is longer than `max_positions`: as much as leaves room for
    `num_new` tokens, but half of the positions at least."""
    return tokens[-max(max_positions // 2, max_positions - num_new, 1) :]


def _encoded(tokenizer: TextTokenizer, texts: list[tuple[JsonRow, str]]) -> list[list[int]]:
    """Return the tokens of texts that stand in rows; an error names the row."""
    try:
        return [ids.tolist() for ids in tokenizer.encode_batch([text for _, text in texts])]
    except ValueError:
        for row, text in texts:
            with _at(row):
                tokenizer.encode(text)
        raise


@contextmanager
def _at(row: JsonRow) -> Iterator[None]:
    """Begin the message of an error with the place of a row."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from error


def _prompt(text: _Text, ids: list[int], request: PromptRequest) -> Prompt:
    ids, limit = begun(ids, text.is_chat, request.tokenizer), request.max_positions
    if limit is None or len(ids) <= limit:
        return Prompt(ids, 0, 0)
    _check_cut(text, "the prompt", len(ids), request)
    kept = recent(ids, limit, request.max_new_tokens)
    return Prompt(kept, 0, len(ids) - len(kept))


def _choice(text: _Text, prompt: list[int], joint: list[int], request: PromptRequest) -> Prompt:
    num_rated = joint_tokens(prompt, joint)
    ids, limit = begun(joint, text.is_chat, request.tokenizer), request.max_positions
    if num_rated == len(ids):  # the first token, too, needs one to follow
        ids = [request.tokenizer.end_id, *ids]
    if not num_rated:
        raise ValueError(
            f"{text.row.place}: a continuation adds no token to the prompt; write what follows it."
        )
    if limit is None or len(ids) - 1 <= limit:
        return Prompt(ids, num_rated, 0)
    _check_cut(text, "prompt and continuation", len(ids) - 1, request)
    if num_rated > limit:
        raise ValueError(
            f"{text.row.place}: the continuation has {num_rated} tokens and the network {limit} "
            "positions; shorten it."
        )
    return Prompt(ids[-limit - 1 :], num_rated, len(ids) - limit - 1)


def begun(ids: list[int], is_chat: bool, tokenizer: TextTokenizer) -> list[int]:
    """Return the tokens of a text with what a document begins with."""
    if ids and (is_chat or tokenizer.begin_id is None):
        return ids
    begin = tokenizer.end_id if tokenizer.begin_id is None else tokenizer.begin_id
    return [begin, *ids]


def _check_cut(text: _Text, what: str, size: int, request: PromptRequest) -> None:
    if not request.cuts:
        raise ValueError(
            f"{text.row.place}: {what} has {size} tokens and the network {request.max_positions} "
            "positions; shorten it, or cut its beginning with model.generation.context=recent."
        )


def _text(row: JsonRow, request: PromptRequest) -> _Text:
    json_line(row, row.values)  # what cannot be written is said now, not after hours of prediction
    values = row.values if request.column else as_messages(row.values)
    column = request.column or _column(row, values)
    if column not in values:
        raise ValueError(
            f'{row.place}: the row has no "{column}" (it has {_names(row)}); name the column with '
            "--data.prompt_column."
        )
    value = values[column]
    if isinstance(value, list):
        value = as_messages({"conversations": value})["messages"]
    choices = _choices(row) if request.mode == "score" else []
    if isinstance(value, str):
        return _Text(row, value + request.separator, False, choices)
    return _Text(row, _rendered(row, column, value, request.tokenizer), True, choices)


def _column(row: JsonRow, values: dict[str, Any]) -> str:
    named = [name for name in DEFAULT_COLUMNS if name in values]
    held = [name for name in named if values[name] is not None] or named
    if len(held) == 1:
        return held[0]
    how_many = "both" if held else "neither"
    raise ValueError(
        f'{row.place}: the row has {how_many} of "prompt" and "messages" (it has {_names(row)}); '
        "name the column with --data.prompt_column."
    )


def _rendered(row: JsonRow, column: str, value: Any, tokenizer: TextTokenizer) -> str:
    is_chat = isinstance(value, list) and value and all(map(_is_message, value))
    if not is_chat:
        raise ValueError(
            f'{row.place}: "{column}" is {_shown(value)}; it must be a text, or a list of messages '
            'such as [{"role": "user", "content": "…"}].'
        )
    if tokenizer.chat_template is None:
        raise ValueError(
            f'{row.place}: "{column}" holds messages, but the tokenizer has no chat template; '
            "write the prompt as a text, or use a model that was trained on chats."
        )
    with _at(row):
        return tokenizer.render(value, add_generation_prompt=True)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def _choices(row: JsonRow) -> list[str]:
    value: Any = row.values.get("choices")
    if value is None:
        value = row.values.get("continuation")
        value = [value] if isinstance(value, str) else value
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError(
            f'{row.place}: mode score needs "choices", a list of texts, or "continuation", a text; '
            f"the row has {_shown(value) if value is not None else _names(row)}."
        )
    return value


def _names(row: JsonRow) -> str:
    return ", ".join(f'"{name}"' for name in row.values) or "no value"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"
