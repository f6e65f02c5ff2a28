"""Prediction of language models: rows of prompts or choices, their datasets, output files."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, cycle, dropwhile, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.core.batches import IGNORED, PADDING_ID, padded
from datamodules.core.planned import PlannedDataset
from datamodules.core.store import new_file
from datamodules.files.rows import JsonRow, RowFault, check_characters, placed, read_json_rows
from datamodules.files.tables import free_names
from datamodules.text.packing import Piece, best_fit, joined_rows
from datamodules.tokenizers.text import TextTokenizer

ASSISTANT = "assistant"
SHARE_GPT_ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT}
ROLES = ("system", "user", ASSISTANT, "tool")
SHAPES = (
    '{"prompt": "…", "completion": "…"}, {"messages": [{"role": "user", "content": "…"}, …]}, '
    '{"conversations": [{"from": "human", "value": "…"}, …]} or {"instruction": "…", "input": "…", '
    '"output": "…"}'
)
FINISH_REASONS = ("end", "stop", "length", "positions")
NO_TOKEN = -1
OTHER_OUTPUT = "or name another file with --data.predict_output"


class Prompt(NamedTuple):
    """The tokens of one text, how many at its end are scored, and how many were cut off it."""

    ids: Sequence[int] | np.ndarray
    num_rated: int
    num_cut: int


def read_rows(files: Sequence[Path]) -> Iterator[JsonRow]:
    """Yield the rows of all files, in order."""
    return chain.from_iterable(read_json_rows(path) for path in files)


def rows_in_memory(values: Iterable[dict[str, Any]]) -> Iterator[JsonRow]:
    """Yield rows from values in memory."""
    return (JsonRow(Path("row"), number, row) for number, row in enumerate(values, start=1))


def read_prompts(
    rows: Iterable[JsonRow],
    tokenizer: TextTokenizer,
    separator: str = "",
    mode: str = "generate",
    max_positions: int | None = None,
) -> Iterator[list[Prompt]]:
    """Yield the tokens of each row, lazily: one prompt, or the row's prompt with each choice.

    Args:
        rows: each has a text `prompt` or `messages`.
        separator: appended to a text prompt.
        mode: `generate`, or `score` for rows with choices.
        max_positions: positions of the network; `None` for no limit.

    Raises:
        ValueError: a row breaks a rule, or is longer than `max_positions`.
    """
    is_scored = mode == "score"

    def fitted(prompt: list[int], joint: list[int], is_chat: bool) -> Prompt:
        num_rated = joint_tokens(prompt, joint) if is_scored else 0
        if is_scored and not num_rated:
            raise ValueError("a choice adds no token to the prompt; write what follows it.")
        ids = with_begin(joint, is_chat, tokenizer)
        if is_scored and num_rated == len(ids):  # the first scored token needs a predecessor
            ids = [tokenizer.end_id, *ids]
        size = len(ids) - is_scored  # a choice's last token is not an input
        if max_positions is not None and size > max_positions:
            raise ValueError(
                f"{'prompt and choice' if is_scored else 'the prompt'} has {size} tokens and the "
                f"network {max_positions} positions; shorten it."
            )
        return Prompt(ids, num_rated, 0)

    def read(row: JsonRow) -> list[Prompt]:
        prompt, messages = row_prompt(row.values)
        choices = row.values.get("choices") if is_scored else [""]
        if prompt is not None and messages is not None:
            raise ValueError('the row has both "prompt" and "messages"; write one of them.')
        if not (choices and isinstance(choices, list) and all(isinstance(c, str) for c in choices)):
            raise ValueError('mode score needs "choices", a list of texts that may follow.')
        is_chat, tools = prompt is None, objects_of(row.values, "tools")
        asking = question_of(messages or ())
        text = tokenizer.render(asking, True, tools) if is_chat else f"{prompt}{separator}"
        encoded = tokenizer.encode_batch([text, *(text + choice for choice in choices)])
        alone, *joint = (ids.tolist() for ids in encoded)
        return [fitted(alone, ids, is_chat) for ids in joint]

    return (placed(row.place, read, row) for row in rows)


def row_prompt(row: dict[str, Any]) -> tuple[str | None, tuple[dict[str, Any], ...] | None]:
    """Return the prompt and the messages of a row's values; `None` for one that it lacks.

    Raises:
        RowFault: the row has neither, or they break a rule.
    """
    values = as_messages(row)
    prompt, messages = values.get("prompt"), values.get("messages")
    read = [prompt, messages, *(row.get(name) for name in ("completion", "choices", "tools"))]
    check_characters(json.dumps(read, ensure_ascii=False, default=str))
    if prompt is None and messages is None:
        names = ", ".join(row) or "nothing"
        rule = f'the row has neither "prompt" nor "messages", it has: {names}; write {SHAPES}.'
        raise RowFault("keys", names, rule)
    if not isinstance(prompt, str | None):
        raise RowFault("keys", str(prompt), '"prompt" must be a text; write chats as "messages".')
    if messages is None:
        return prompt, None
    is_list = isinstance(messages, list) and all(isinstance(one, dict) for one in messages)
    if not messages or not is_list:
        rule = f'"messages" must be a list of objects: {SHAPES}.'
        raise RowFault("messages", str(messages), rule)
    checked = []
    for place, stored in enumerate(messages, start=1):
        message = {name: value for name, value in stored.items() if value is not None}
        role, is_call = message.get("role"), bool(message.get("tool_calls"))
        if role not in ROLES:
            rule = f'message {place} has the role "{role}"; it must be one of {", ".join(ROLES)}.'
            raise RowFault("role", str(role), rule)
        content = message.get("content", "" if is_call and role == ASSISTANT else None)
        if not isinstance(content, str):
            rule = f'message {place} needs a "content" that is a text.'
            raise RowFault("content", str(content), rule)
        if message.get("weight", 1) not in (0, 1):
            rule = f"message {place} has the weight {message['weight']}; it must be 0 or 1."
            raise RowFault("weight", str(message["weight"]), rule)
        calls = {"tool_calls": objects_of(message, "tool_calls")} if is_call else {}
        checked.append({**message, "content": content, **calls})
    return prompt, tuple(checked)


def question_of(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages of a chat without any answer at its end."""
    return [*dropwhile(lambda one: one["role"] == ASSISTANT, reversed(messages))][::-1]


def is_answer(message: dict[str, Any]) -> bool:
    """Return whether a message is trained on: the assistant's, with a weight other than 0."""
    return message["role"] == ASSISTANT and message.get("weight", 1) != 0


def objects_of(values: dict[str, Any], name: str) -> tuple[dict[str, Any], ...]:
    """Return the tools of a row or the tool calls of a message, () if it has none. They may be
    JSON text, because the columns of parquet files cannot hold objects of varying form.

    Raises:
        RowFault: they are not a list of objects.
    """
    value = values.get(name) or []
    try:
        objects = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        objects = None
    one_by_one = objects if isinstance(objects, list) else [objects]
    if not all(isinstance(o, dict) and isinstance(o.get("function", o), dict) for o in one_by_one):
        rule = f'"{name}" must be a list of objects such as {{"function": {{"name": "…"}}}}.'
        raise RowFault(name, str(value), rule)
    return tuple(one_by_one)


def as_messages(values: dict[str, Any]) -> dict[str, Any]:
    """Return a row's values, its chat (if it holds one) as `messages`.

    Args:
        values: may hold `messages`, `conversations` with `from` and `value` (ShareGPT), or
            `instruction`, `input`, `output` and `history`, pairs of earlier questions and answers
            (Alpaca); with a `system` message. In prediction the last answer may be missing.
    """
    if values.get("prompt") is not None:
        if values.get("system"):
            rule = (
                '"system" needs "messages", not a "prompt"; put it into the prompt or the messages.'
            )
            raise RowFault("system", str(values["system"]), rule)
        return values
    turns = values.get("messages")
    turns = values.get("conversations") if turns is None else turns
    if turns is None and isinstance(values.get("instruction"), str):
        past = values.get("history") or []
        if not (isinstance(past, list) and all(isinstance(p, list) and len(p) == 2 for p in past)):
            rule = '"history" must be a list of pairs, [["a question", "its answer"], …].'
            raise RowFault("history", str(past), rule)
        parts = [values["instruction"], values.get("input") or ""]
        asking = "\n\n".join(str(part) for part in parts if part)
        texts = [text for pair in [*past, [asking, values.get("output")]] for text in pair]
        texts = texts[:-1] if values.get("output") is None else texts
        turns = [{"role": r, "content": text} for r, text in zip(cycle(("user", ASSISTANT)), texts)]
    if turns is None:
        return values
    if isinstance(turns, list):
        turns = [*turns]
        if values.get("system"):
            turns.insert(0, {"role": "system", "content": values["system"]})
        for place, turn in enumerate(turns):
            if isinstance(turn, dict) and "from" in turn and "role" not in turn:  # of ShareGPT
                others = {name: turn[name] for name in turn if name not in ("from", "value")}
                role = SHARE_GPT_ROLES.get(str(turn["from"]), turn["from"])
                turns[place] = {"role": role, "content": turn.get("value"), **others}
    return {**values, "messages": turns}


def joint_tokens(prompt: Sequence[int], joint: Sequence[int]) -> int:
    """Return how many tokens at the end of `joint`, the tokens of a prompt and its continuation as
    one text, belong to the continuation.

    A model saw prompt and continuation as one text in training, so they are tokenised as one: the
    continuation begins at the first token that differs from the prompt's own.
    """
    pairs = zip(prompt, joint, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(joint)))
    return len(joint) - same


def with_begin(ids: list[int], is_chat: bool, tokenizer: TextTokenizer) -> list[int]:
    """Return the tokens of a text after the tokenizer's begin-of-text token, if it has one, as in
    training; a chat begins as its template writes it. An empty text without such a token becomes
    end-of-text, after which a document begins in training."""
    if ids and (is_chat or tokenizer.begin_id is None):
        return ids
    return [tokenizer.end_id if tokenizer.begin_id is None else tokenizer.begin_id, *ids]


class PromptDataset(PlannedDataset):
    """One sample per row of `read_prompts`, equal rows included; batches are `PromptBatch`.

    Raises:
        ValueError: there are no rows.
    """

    mode = "generate"

    def __init__(self, prompts: Iterable[list[Prompt]]) -> None:
        # Arrays take a small fraction of the memory of lists.
        self.rows = [[p._replace(ids=np.array(p.ids, np.int32)) for p in row] for row in prompts]
        if not self.rows:
            raise ValueError("there is no row to predict for; write at least one prompt.")
        self.most_choices = max(map(len, self.rows))  # of one row; 1 for prompts
        # [N] int64, the most tokens cut off a text of each row.
        self.num_cut = np.array([max(prompt.num_cut for prompt in row) for row in self.rows])
        self.lengths = np.array([sum(len(prompt.ids) for prompt in row) for row in self.rows])
        content = hashlib.sha256(json.dumps(self.mode).encode())
        for row in self.rows:
            for prompt in row:
                content.update(np.array([len(row), len(prompt.ids), prompt.num_rated]).tobytes())
                content.update(np.asarray(prompt.ids).tobytes())
        self.fingerprint = content.hexdigest()[:32]
        self.target_counts = {}

    def example(self, sample_id: int, epoch: int) -> list[Prompt]:
        """Return the texts of one row."""
        return self.rows[sample_id]

    def collate(self, examples: list[list[Prompt]]) -> dict[str, Tensor]:
        """Return input_ids [B, S], padded at the right, and lengths [B]."""
        input_ids, lengths = padded_prompts([np.asarray(prompts[0].ids) for prompts in examples])
        return {"input_ids": input_ids, "lengths": lengths}

    def columns(
        self, results: dict[str, np.ndarray], tokenizer: TextTokenizer
    ) -> Iterator[dict[str, Any]]:
        """Yield the output columns of each completion: text, number of tokens, why it ended.

        Args:
            results: completion_ids [N, M], num_tokens [N], num_characters [N] and finish_reason
                [N], index in `FINISH_REASONS`.
        """
        for number, cut in enumerate(self.num_cut.tolist()):
            ids, size = results["completion_ids"][number], int(results["num_characters"][number])
            yield {
                "completion": completion_text(tokenizer, ids, size),
                "num_tokens": int(results["num_tokens"][number]),
                "finish_reason": FINISH_REASONS[int(results["finish_reason"][number])],
                "prompt_tokens_cut": cut,
            }


class ChoiceDataset(PromptDataset):
    """Rows of one or more texts whose ends are scored; batches are `ChoiceBatch`."""

    mode = "score"

    def collate(self, examples: list[list[Prompt]]) -> dict[str, Tensor]:
        """Return the texts as documents packed into rows, and the document of each choice."""
        texts = []
        for prompt in chain.from_iterable(examples):
            ids = np.array(prompt.ids, np.int64)
            labels = ids[1:].copy()
            labels[: len(labels) - prompt.num_rated] = IGNORED
            texts.append(Piece(ids[:-1], labels))
        counts = np.array([len(prompts) for prompts in examples])
        sizes = np.array([len(piece.labels) for piece in texts])
        order, offsets = best_fit(sizes, int(sizes.max()))
        batch: dict[str, Any] = joined_rows(
            [[texts[i] for i in order[a:b]] for a, b in pairwise(offsets)]
        )
        choices = np.full((len(examples), self.most_choices), -1)
        choices[np.arange(self.most_choices) < counts[:, None]] = np.argsort(order)
        samples = torch.from_numpy(np.repeat(np.arange(len(examples)), counts)[order])
        batch["sample_index"] = samples[batch["document_ids"].clamp(min=0)]
        return {**batch, "choice_documents": torch.from_numpy(choices)}

    def columns(
        self, results: dict[str, np.ndarray], tokenizer: TextTokenizer
    ) -> Iterator[dict[str, Any]]:
        """Yield the output columns of each row: scores and token counts of its choices, and the
        index of the best, from 0. `results` are scores [N, C] in nats, NaN past a row's last
        choice, and num_tokens [N, C]."""
        for number, cut in enumerate(self.num_cut.tolist()):
            is_there = ~np.isnan(results["scores"][number])
            scores = results["scores"][number][is_there]
            num_tokens = results["num_tokens"][number][is_there].tolist()
            own = {"scores": scores.tolist(), "num_tokens": num_tokens}
            yield {**own, "best": int(np.argmax(scores)), "prompt_tokens_cut": cut}


def prompt_tokens(tokenizer: TextTokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Return the tokens of plain prompts (not chats), each at the beginning of a document."""
    return [with_begin(ids.tolist(), False, tokenizer) for ids in tokenizer.encode_batch(prompts)]


def padded_prompts(rows: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return input_ids [B, S], padded at the right, and lengths [B], both int64."""
    return torch.from_numpy(padded(rows, PADDING_ID)), torch.tensor([len(row) for row in rows])


def completion_text(tokenizer: TextTokenizer, ids: np.ndarray, num_characters: int) -> str:
    """Return the text of a completion's `ids` [M] (-1 after its end), with the space before its
    first word, cut to `num_characters`: a stop text may begin within the last tokens."""
    return tokenizer.decode_continuation(ids[ids != NO_TOKEN])[:num_characters]


def write_rows(rows: Iterable[JsonRow], results: Iterable[dict[str, Any]], path: Path) -> None:
    """Write the rows with added columns to a new file, atomically.

    Args:
        rows: all predicted rows, in order.
        results: the added columns of each row, all with the same names; a row's own column of such
            a name is renamed `input_NAME`.
        path: a .jsonl file.

    Raises:
        FileExistsError: the file exists.
        RuntimeError: the numbers of rows and results differ.
    """
    names: dict[tuple[str, ...], list[str]] = {}
    num_rows = num_results = 0
    with new_file(path, way_out=OTHER_OUTPUT) as file:
        for row, columns in zip_longest(rows, results):
            num_rows, num_results = num_rows + bool(row), num_results + bool(columns)
            if row is None or columns is None:
                continue
            keys = tuple(row.values)
            if keys not in names:
                names[keys] = free_names(list(keys), list(columns))
            values = dict(zip(names[keys], row.values.values(), strict=True)) | columns
            # default=str writes dates and decimals of parquet files as text.
            line = json.dumps(values, ensure_ascii=False, default=str)
            if re.search("[\ud800-\udfff]", line):  # UTF-8 cannot encode lone surrogates
                line = json.dumps(values, default=str)
            file.write(line + "\n")
        if num_rows != num_results:
            raise RuntimeError(
                f"the files hold {num_rows} rows, {num_results} were predicted: a file changed "
                "meanwhile; start the prediction again."
            )
