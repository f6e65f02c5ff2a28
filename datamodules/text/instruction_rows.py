"""Prompts with completions and chats in: rows of jsonl and parquet files, checked."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from datamodules.files.bad_rows import BadRow, BadRows
from datamodules.files.rows import HALF_RULE, JsonRow, half_character, read_json_rows

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT, "tool")
SHARE_GPT_ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT}
SHAPES = (
    '{"prompt": "…", "completion": "…"}, {"messages": [{"role": "user", "content": "…"}, …]}, '
    '{"conversations": [{"from": "human", "value": "…"}, …]} or {"instruction": "…", "input": "…", '
    '"output": "…"}'
)


class Instruction(NamedTuple):
    """One sample: a prompt and its completion, or the messages of a chat (then both are empty).

    Args:
        shrinks: first and past-the-last character of what loses its end in a prompt that is too
            long; equal where nothing may.
        group: samples of equal groups are in one part; "" groups by all that is said.
    """

    file: str
    line: int
    prompt: str
    completion: str
    messages: tuple[dict[str, Any], ...] = ()
    shrinks: tuple[int, int] = (0, 0)
    group: str = ""

    @property
    def key(self) -> str:
        """The sample without its place: equal for exact duplicates, and within a group."""
        if self.group:
            return self.group
        said = self.messages or (self.prompt, self.completion)
        return json.dumps(said, sort_keys=True, ensure_ascii=False)

    @property
    def texts(self) -> list[str]:
        """What people and the assistant wrote."""
        if self.messages:
            return [str(message.get("content") or "") for message in self.messages]
        return [self.prompt, self.completion]


class _Fault(Exception):
    """kind, value and rule of a bad row."""


def read_instructions(path: Path, bad_rows: BadRows) -> Iterator[Instruction]:
    """Yield the sound samples of one file; the others go to `bad_rows`.

    Raises:
        ValueError: the file cannot be read as rows.
    """
    for row in read_json_rows(path):
        try:
            yield _checked(row)
        except _Fault as fault:
            kind, value, rule = fault.args
            bad_rows.add(BadRow(str(row.file), row.line, value, rule, kind))


def as_messages(values: dict[str, Any]) -> dict[str, Any]:
    """Return a row's values with its chat as `messages`; others come back as they are.

    Args:
        values: may hold `conversations` with `from` and `value` (ShareGPT), or `instruction`,
            `input` and `output` (Alpaca); `system` goes before either. In prediction the last
            answer may be missing. A row with `messages` or `prompt` is no other.
    """
    if values.get("messages") is not None or values.get("prompt") is not None:
        return values
    turns = values.get("conversations")
    if turns is None and isinstance(values.get("instruction"), str):
        asked = [values["instruction"], values.get("input") or ""]
        turns = [{"role": "user", "content": "\n\n".join(str(part) for part in asked if part)}]
        if values.get("output") is not None:
            turns.append({"role": ASSISTANT, "content": values["output"]})
    if turns is None:
        return values
    if isinstance(turns, list):
        if values.get("system"):
            turns = [{"role": "system", "content": values["system"]}, *turns]
        turns = [_turn(turn) for turn in turns]
    return {**values, "messages": turns}


def _turn(turn: Any) -> Any:
    """Return a turn of ShareGPT as a message; a message as it is."""
    if not isinstance(turn, dict) or "from" not in turn or "role" in turn:
        return turn
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    role = SHARE_GPT_ROLES.get(str(turn["from"]), turn["from"])
    return {"role": role, "content": turn.get("value"), **others}


def _checked(row: JsonRow) -> Instruction:
    values = as_messages({name: value for name, value in row.values.items() if value is not None})
    read = [values.get(name) for name in ("messages", "prompt", "completion")]
    if (half := half_character(json.dumps(read, ensure_ascii=False, default=str))) is not None:
        raise _Fault("half character", half, f'"{half}" {HALF_RULE}')
    if "messages" in values:
        return Instruction(str(row.file), row.line, "", "", _messages(values["messages"]))
    for name in ("prompt", "completion"):
        if name not in values:
            keys = ", ".join(values) or "nothing"
            raise _Fault("keys", keys, f'the row has no "{name}"; a row must be {SHAPES}.')
        if not isinstance(values[name], str):
            raise _Fault(
                "keys", str(values[name]), f'"{name}" must be a text; write chats as "messages".'
            )
    if not values["completion"].strip():
        raise _Fault("empty answer", values["prompt"], _empty("the completion"))
    return Instruction(str(row.file), row.line, values["prompt"], values["completion"])


def _messages(messages: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise _Fault("messages", str(messages), f'"messages" must be a list of objects: {SHAPES}.')
    checked = tuple(_message(message, place) for place, message in enumerate(messages, start=1))
    if not any(message["role"] == ASSISTANT for message in checked):
        roles = ", ".join(message["role"] for message in checked) or "no message"
        raise _Fault(
            "no answer", roles, 'no message has the role "assistant": nothing could be learnt; '
            "add its answer."
        )  # fmt: skip
    return checked


def _message(message: dict[str, Any], place: int) -> dict[str, Any]:
    message = {name: value for name, value in message.items() if value is not None}
    role, content = message.get("role"), message.get("content", "")
    if role not in ROLES:
        raise _Fault(
            "role", str(role), f'message {place} has the role "{role}"; it must be one of '
            f"{', '.join(ROLES)}."
        )  # fmt: skip
    if not isinstance(content, str):
        raise _Fault("content", str(content), f'"content" of message {place} must be a text.')
    is_call = role == ASSISTANT and message.get("tool_calls")
    if "content" not in message and not is_call:
        raise _Fault("content", str(message), f'message {place} has no "content"; add it.')
    if role == ASSISTANT and not content.strip() and not is_call:
        raise _Fault("empty answer", content, _empty(f"the answer in message {place}"))
    return {**message, "content": content}


def _empty(what: str) -> str:
    return f"{what} is empty: only end-of-text could be learnt; fill it in, or delete the row."
