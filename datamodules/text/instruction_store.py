"""Prompts with completions and chats: their rows, the tokens that are trained on, their store."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from datamodules.core.store import (
    ArrayFile,
    cache_root,
    digest_of,
    file_digest,
    made_once,
    mapped_array,
)
from datamodules.files.rows import (
    HALF_RULE,
    BadRow,
    BadRows,
    JsonRow,
    RowFault,
    half_character,
    read_rejected,
    sound_rows,
)
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION, keyed_hashes
from datamodules.text.splitting import Fragments, TextSplit, cuts_of
from datamodules.text.store import TokenisedFolder, token_dtype
from datamodules.tokenizers.text import TextTokenizer, TokenizerOptions, make_tokenizer

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT, "tool")
SHARE_GPT_ROLES = {"human": "user", "gpt": ASSISTANT, "chatgpt": ASSISTANT, "bot": ASSISTANT}
SHAPES = (
    '{"prompt": "…", "completion": "…"}, {"messages": [{"role": "user", "content": "…"}, …]}, '
    '{"conversations": [{"from": "human", "value": "…"}, …]} or {"instruction": "…", "input": "…", '
    '"output": "…"}'
)
TrainOn = Literal["answers", "all"]
STORE_VERSION = 3
ROWS_PER_BATCH = 1024
COLUMNS = {"tokens": None, "is_trained": bool} | {
    **{"starts": np.int64, "sizes": np.int64, "keys": np.uint64},
    **{"files": np.int32, "lines": np.int64},
}  # of a part, with the type of each; that of tokens depends on the vocabulary


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


def read_instructions(path: Path, bad_rows: BadRows) -> Iterator[Instruction]:
    """Yield the sound samples of one file; the others go to `bad_rows`.

    Raises:
        ValueError: the file cannot be read as rows.
    """
    return sound_rows(path, _checked, bad_rows)


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
        turns = [*turns]
        if values.get("system"):
            turns.insert(0, {"role": "system", "content": values["system"]})
        for place, turn in enumerate(turns):
            if isinstance(turn, dict) and "from" in turn and "role" not in turn:  # of ShareGPT
                others = {name: turn[name] for name in turn if name not in ("from", "value")}
                role = SHARE_GPT_ROLES.get(str(turn["from"]), turn["from"])
                turns[place] = {"role": role, "content": turn.get("value"), **others}
    return {**values, "messages": turns}


def _checked(row: JsonRow) -> Instruction:
    values = as_messages({name: value for name, value in row.values.items() if value is not None})
    read = [values.get(name) for name in ("messages", "prompt", "completion")]
    if (half := half_character(json.dumps(read, ensure_ascii=False, default=str))) is not None:
        raise RowFault("half character", half, f'"{half}" {HALF_RULE}')
    if "messages" in values:
        return Instruction(str(row.file), row.line, "", "", _messages(values["messages"]))
    for name in ("prompt", "completion"):
        if name not in values:
            keys = ", ".join(values) or "nothing"
            raise RowFault("keys", keys, f'the row has no "{name}"; a row must be {SHAPES}.')
        if not isinstance(values[name], str):
            raise RowFault(
                "keys", str(values[name]), f'"{name}" must be a text; write chats as "messages".'
            )
    if not values["completion"].strip():
        raise RowFault("empty answer", values["prompt"], _empty("the completion"))
    return Instruction(str(row.file), row.line, values["prompt"], values["completion"])


def _messages(messages: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise RowFault(
            "messages", str(messages), f'"messages" must be a list of objects: {SHAPES}.'
        )
    checked = tuple(_message(message, place) for place, message in enumerate(messages, start=1))
    if not any(message["role"] == ASSISTANT for message in checked):
        roles = ", ".join(message["role"] for message in checked) or "no message"
        raise RowFault(
            "no answer", roles, 'no message has the role "assistant": nothing could be learnt; '
            "add its answer."
        )  # fmt: skip
    return checked


def _message(message: dict[str, Any], place: int) -> dict[str, Any]:
    message = {name: value for name, value in message.items() if value is not None}
    role, content = message.get("role"), message.get("content", "")
    if role not in ROLES:
        raise RowFault(
            "role", str(role), f'message {place} has the role "{role}"; it must be one of '
            f"{', '.join(ROLES)}."
        )  # fmt: skip
    if not isinstance(content, str):
        raise RowFault("content", str(content), f'"content" of message {place} must be a text.')
    is_call = role == ASSISTANT and message.get("tool_calls")
    if "content" not in message and not is_call:
        raise RowFault("content", str(message), f'message {place} has no "content"; add it.')
    if role == ASSISTANT and not content.strip() and not is_call:
        raise RowFault("empty answer", content, _empty(f"the answer in message {place}"))
    return {**message, "content": content}


def _empty(what: str) -> str:
    return f"{what} is empty: only end-of-text could be learnt; fill it in, or delete the row."


class MarkedText(NamedTuple):
    """A text and what of it is trained on.

    Args:
        text: as it is tokenised.
        spans: first and past-the-last character of each.
        is_chat: written by a template, which brings its own begin token.
        ends: whether end-of-text goes behind it.
        is_end_trained: whether that is trained on.
        shrinks: see `Instruction`.
    """

    text: str
    spans: list[tuple[int, int]]
    is_chat: bool
    ends: bool
    is_end_trained: bool
    shrinks: tuple[int, int] = (0, 0)


class TrainedTokens(NamedTuple):
    """ids [n] int64; is_trained [n] bool; whether an answer begins inside a token."""

    ids: np.ndarray
    is_trained: np.ndarray
    begins_inside_token: bool


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


class Marker:
    """Turns instructions into tokens that know whether they are trained on.

    A prompt is followed by the separator, the completion and end-of-text. A chat becomes what the
    template makes of it; an answer lasts from where the template would let the assistant begin to
    its last special token, or to the next turn where there is none. A chat that ends in no
    special token gets end-of-text, so that there is always an end to learn.

    Args:
        tokenizer: with a chat template where there are chats.
        train_on: answers only, or all.
        separator: between a prompt and its completion.
        max_prompt: tokens of a prompt, its beginning included, from which on it loses the end of
            what shrinks; `None` cuts nothing.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        train_on: TrainOn,
        separator: str,
        max_prompt: int | None = None,
    ) -> None:
        self.tokenizer, self.train_on, self.separator = tokenizer, train_on, separator
        self.max_prompt = max_prompt
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self.special = tuple(token.content for token in added if token.special)
        self.special_behind = re.compile(rf"\s*({'|'.join(map(re.escape, self.special))})")

    def marked(self, row: Instruction) -> MarkedText:
        """Return the text of one instruction.

        Raises:
            ValueError: the template refuses the messages, or rewrites earlier turns.
        """
        if row.messages:
            return self._chat(row.messages)
        before = row.prompt + self.separator
        text = before + row.completion
        start = 0 if self.train_on == "all" else len(before)
        return MarkedText(text, [(start, len(text))], False, True, True, row.shrinks)

    def tokens(self, marked: Sequence[MarkedText]) -> list[TrainedTokens]:
        """Return the tokens of each text; one that lies partly in an answer belongs to it."""
        encodings = self.tokenizer.encode_with_offsets([text.text for text in marked])
        return [
            self._trained(text, np.array(e.ids, np.int64), np.array(e.offsets).reshape(-1, 2))
            for text, e in zip(marked, encodings, strict=True)
        ]

    def _chat(self, messages: tuple[dict, ...]) -> MarkedText:
        text = self.tokenizer.render(messages)
        ends = not text.rstrip().endswith(self.special)
        if self.train_on == "all":
            return MarkedText(text, [(0, len(text))], True, ends, True)
        spans = [
            self._answer(messages, i, text)
            for i, message in enumerate(messages)
            if message["role"] == ASSISTANT
        ]
        return MarkedText(text, spans, True, ends, messages[-1]["role"] == ASSISTANT)

    def _answer(self, messages: tuple[dict, ...], i: int, text: str) -> tuple[int, int]:
        """Return where answer i of the chat stands in its text."""
        through, said = self.tokenizer.render(messages[: i + 1]), messages[i]["content"].strip()
        if i or not said:
            before = self.tokenizer.render(messages[:i], add_generation_prompt=True)
        else:  # nothing to render yet: the answer begins with what it says
            before = through.partition(said)[0]
        if text.startswith(before):
            start = len(before)
            if text.startswith(through) and through.startswith(before):
                return start, len(through)
            # Some templates write the last answer in another way, with room for thoughts.
            place = text.find(said, start)
            end = self.special_behind.match(text, place + len(said)) if place >= 0 else None
            if end is not None:
                return start, end.end()
        raise ValueError(
            f"the chat template writes the turns before message {i + 1} in another way once it is "
            "there, so that its answer cannot be told apart; name another template with "
            "data.tokenizer.chat_template, or set data.train_on to all."
        )

    def _trained(self, text: MarkedText, ids: np.ndarray, offsets: np.ndarray) -> TrainedTokens:
        if self.max_prompt is not None:
            most = self.max_prompt - (self.tokenizer.begin_id is not None)
            kept = kept_tokens(offsets, text.spans[0][0], text.shrinks, most)
            ids, offsets = ids[kept], offsets[kept]
        is_trained, is_inside = np.zeros(len(ids), bool), False
        for start, end in text.spans:
            found = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < end))
            if not len(found):
                continue
            is_inside |= bool(offsets[found[0], 0] < start)
            special = np.flatnonzero(np.isin(ids[found], self.tokenizer.special_ids))
            if text.is_chat and self.train_on == "answers" and len(special):
                last = found[special[-1]]
                if not text.text[offsets[last, 1] : end].strip():  # a template's line break
                    found = found[found <= last]
            is_trained[found] = True
        begin_id = self.tokenizer.begin_id
        if not text.is_chat and begin_id is not None:
            ids, is_trained = np.append(begin_id, ids), np.append(False, is_trained)
        if text.ends:
            ids = np.append(ids, self.tokenizer.end_id)
            is_trained = np.append(is_trained, text.is_end_trained)
        return TrainedTokens(ids, is_trained, is_inside)


@dataclass(frozen=True)
class InstructionPart:
    """The samples of one part: N of them, n tokens in all.

    Args:
        tokens: [n] uint16 or uint32.
        is_trained: [n] bool.
        starts: [N] int64, first token of each sample.
        sizes: [N] int64, its tokens.
        keys: [N] uint64, equal for exact duplicates.
        files: [N] int32, index in `InstructionStore.files`.
        lines: [N] int64.
    """

    tokens: np.ndarray
    is_trained: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    keys: np.ndarray
    files: np.ndarray
    lines: np.ndarray


class InstructionStore(TokenisedFolder):
    """A folder of tokenised instructions, as `open_instruction_store` makes it."""

    @cached_property
    def bad_rows(self) -> list[BadRow]:
        """The rows that are left out because they break a rule."""
        return read_rejected(self.folder)

    def part(self, part: int) -> InstructionPart:
        """Return the samples of one part: 0 train, 1 validation, 2 test."""
        name = PART_NAMES[part]
        return InstructionPart(
            *(mapped_array(self.folder / f"{name}.{kind}.npy") for kind in COLUMNS)
        )

    def place(self, part: InstructionPart, sample: int) -> str:
        """Return the file and line of a sample."""
        return f"{self.file_of(part, sample)}:{part.lines[sample]}"

    def file_of(self, part: InstructionPart, sample: int) -> str:
        """Return the file of a sample."""
        return self.facts["files"][part.files[sample]]


@dataclass(frozen=True)
class InstructionRequest:
    """All that a store depends on.

    Args:
        files: per part (train, validation, test) the files.
        tokenizer: which tokenizer.
        split: how training samples are divided where validation has no files.
        train_on: see `Marker`.
        separator: see `Marker`.
        given: a tokenizer that is there already, such as a checkpoint's; wins over `tokenizer`.
    """

    files: dict[int, list[Path]]
    tokenizer: TokenizerOptions
    split: TextSplit
    train_on: TrainOn
    separator: str
    given: TextTokenizer | None = None

    def folder(self) -> Path:
        """Return the store's place in the cache, a digest of all that it depends on."""
        root = cache_root()
        facts = {
            "version": STORE_VERSION,
            "files": {
                PART_NAMES[part]: [[str(p), file_digest(p, root)] for p in paths]
                for part, paths in self.files.items()
            },
            "tokenizer": self.given.digest if self.given else self.tokenizer.facts(),
            "split": asdict(self.split),
            "train_on": self.train_on,
            "separator": self.separator,
        }
        return root / "instructions" / digest_of(facts)

    def marker(self, tokenizer: TextTokenizer) -> Marker:
        """Return what turns rows into tokens."""
        return Marker(tokenizer, self.train_on, self.separator)

    def rows(self, bad_rows: BadRows) -> Iterator[tuple[int, int, Instruction]]:
        """Yield the part, the number of the file and the row of all sound rows."""
        number = 0
        for part, paths in self.files.items():
            for path in paths:
                for row in read_instructions(path, bad_rows):
                    yield part, number, row
                number += 1

    def divided(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the part [N] int8 and the key [N] uint64 of each row, equal texts together."""
        files: list[int] = []

        def keys() -> Iterator[str]:
            for part, _, row in self.rows(BadRows("collect")):
                files.append(part)
                yield row.key

        hashes = keyed_hashes(keys(), 0)
        parts, whole = np.array(files, np.int8), np.ones(len(files), bool)
        ones = np.ones(len(files), np.int64)  # a sample is not cut: all of it, or nothing
        fragments = Fragments(parts, ones, hashes, whole, whole)
        cuts = cuts_of(fragments, self.split.beside(self.files))
        return np.where(cuts[:, 0], TRAIN, np.where(cuts[:, 1], VALIDATION, TEST)), hashes


def open_instruction_store(request: InstructionRequest) -> InstructionStore:
    """Return the store of a request, made at first use; bad rows are left out and listed in it.

    Raises:
        ValueError: no row is sound, or there are chats and no chat template.
    """
    return InstructionStore(made_once(request.folder(), lambda folder: _write(request, folder)))


def _write(request: InstructionRequest, folder: Path) -> None:
    """Fill the folder of a store."""
    parts, keys = request.divided()

    def training_texts() -> Iterator[str]:
        """What a vocabulary is taken from; templates read special tokens and no vocabulary."""
        template = TokenizerOptions(chat_template=request.tokenizer.chat_template)
        marker = Marker(make_tokenizer(template, iter(())), "all", request.separator)
        # Collected alone, as `divided` does: the reading that fills the store names them all.
        for index, _, _, marked in _marked(request, marker, BadRows("collect")):
            if parts[index] == TRAIN:
                text = marked.text
                for token in marker.special:
                    text = text.replace(token, "")
                yield text

    tokenizer = request.given or make_tokenizer(request.tokenizer, training_texts())
    marker, bad_rows, content = request.marker(tokenizer), BadRows("reject"), hashlib.sha256()
    counts = {"begins_inside_token": 0, "holds_special_token": 0}
    dtype = token_dtype(tokenizer.vocab_size)
    with ExitStack() as stack:
        files = [
            {
                kind: stack.enter_context(ArrayFile(folder / f"{name}.{kind}.npy", given or dtype))
                for kind, given in COLUMNS.items()
            }
            for name in PART_NAMES
        ]
        rows = _marked(request, marker, bad_rows)
        while batch := list(islice(rows, ROWS_PER_BATCH)):
            for (index, number, row, _), (ids, is_trained, is_inside) in zip(
                batch, _tokens(marker, batch), strict=True
            ):
                counts["begins_inside_token"] += is_inside
                counts["holds_special_token"] += any(
                    token in text for text in row.texts for token in marker.special
                )
                part = files[parts[index]]
                values = (part["tokens"].length, len(ids), keys[index], number, row.line)
                for kind, value in zip(list(COLUMNS)[2:], values, strict=True):
                    part[kind].add(np.array([value]))
                part["tokens"].add(ids)
                part["is_trained"].add(is_trained)
                for array in (ids, is_trained, parts[index : index + 1].astype(np.int64)):
                    content.update(array.tobytes())
    if not any(part["sizes"].length for part in files):
        raise ValueError(
            bad_rows.message()
            if bad_rows.count
            else "the files hold no rows; write prompts and completions, or chats, into them."
        )
    bad_rows.settle(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()), "utf-8")
    facts = {
        "fingerprint": content.hexdigest()[:32],
        "files": [str(path) for paths in request.files.values() for path in paths],
        **counts,
    }
    (folder / "facts.json").write_text(json.dumps(facts), "utf-8")


_Row = tuple[int, int, Instruction, MarkedText]  # number of the row, of its file; row; its text


def _marked(request: InstructionRequest, marker: Marker, bad_rows: BadRows) -> Iterator[_Row]:
    """Yield each sound row with its text; what the template refuses goes to `bad_rows`.

    Raises:
        ValueError: a row is a chat, and the tokenizer cannot write any.
    """
    for index, (_, number, row) in enumerate(request.rows(bad_rows)):
        if row.messages and marker.tokenizer.chat_template is None:
            marker.tokenizer.render(row.messages)  # names the way out
        try:
            text = marker.marked(row)
        except ValueError as error:
            bad_rows.add(BadRow(row.file, row.line, "", str(error), "template"))
        else:
            yield index, number, row, text


def _tokens(marker: Marker, batch: list[_Row]) -> list[TrainedTokens]:
    """Return the tokens of each text; an error names the row."""
    try:
        return marker.tokens([text for *_, text in batch])
    except ValueError:
        for *_, row, text in batch:
            try:
                marker.tokens([text])
            except ValueError as error:
                raise ValueError(f"{row.file}:{row.line}: {error}") from error
        raise
