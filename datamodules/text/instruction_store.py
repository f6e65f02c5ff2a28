"""Prompts with completions and chats: their rows, the tokens that are trained on, their store."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from datamodules.core.store import cache_root, digest_of, file_digest, made_once, mapped
from datamodules.files.rows import (
    HALF_RULE,
    BadRow,
    BadRows,
    JsonRow,
    half_character,
    read_json_rows,
    read_rejected,
)
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION, keyed_hashes
from datamodules.text.splitting import Fragments, TextSplit, cuts_of
from datamodules.text.store import TokenisedFolder, token_dtype
from datamodules.tokenizers.text_tokenizer import TextTokenizer, TokenizerOptions, make_tokenizer

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


TrainOn = Literal["answers", "all"]


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
            what shrinks; none cuts nothing.
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

    def check_template(self, row: Instruction) -> None:
        """Raise ValueError where the row is a chat and the tokenizer cannot write any."""
        if row.messages and self.tokenizer.chat_template is None:
            self.tokenizer.render(row.messages)  # names the way out

    def holds_special_token(self, row: Instruction) -> bool:
        """Whether somebody wrote a special token; it counts as one."""
        return any(token in text for text in row.texts for token in self.special)

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


PER_SAMPLE = {
    "starts": np.int64,
    "sizes": np.int64,
    "keys": np.uint64,
    "files": np.int32,
    "lines": np.int64,
}


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
        streams = [
            mapped(self.folder / f"{name}.{kind}.bin", np.dtype(dtype))
            for kind, dtype in (("tokens", self.facts["dtype"]), ("is_trained", bool))
        ]
        arrays = [np.load(self.folder / f"{name}.{kind}.npy") for kind in PER_SAMPLE]
        return InstructionPart(*streams, *arrays)

    def place(self, part: InstructionPart, sample: int) -> str:
        """Return the file and line of a sample."""
        return f"{self.file_of(part, sample)}:{part.lines[sample]}"

    def file_of(self, part: InstructionPart, sample: int) -> str:
        """Return the file of a sample."""
        return self.facts["files"][part.files[sample]]


STORE_VERSION = 2
ROWS_PER_BATCH = 1024


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
        split = None if self.files.get(VALIDATION) else self.split
        if split is not None and self.files.get(TEST):
            split = replace(split, test_share=0.0)
        ones = np.ones(len(files), np.int64)  # a sample is not cut: all of it, or nothing
        cuts = cuts_of(Fragments(parts, ones, hashes, whole, whole), split)
        return np.where(cuts[:, 0], TRAIN, np.where(cuts[:, 1], VALIDATION, TEST)), hashes


def open_instruction_store(request: InstructionRequest) -> InstructionStore:
    """Return the store of a request, made at first use; bad rows are left out and listed in it.

    Raises:
        ValueError: no row is sound, or there are chats and no chat template.
    """
    folder = made_once(request.folder(), lambda folder: _Writer(request, folder).write())
    return InstructionStore(folder)


class _Writer:
    def __init__(self, request: InstructionRequest, folder: Path) -> None:
        self.request, self.folder = request, folder
        self.bad_rows = BadRows("reject")
        self.parts, self.keys = request.divided()
        self.tokenizer = request.given or make_tokenizer(request.tokenizer, self._training_texts())
        self.marker = request.marker(self.tokenizer)
        self.dtype = np.dtype(token_dtype(self.tokenizer.vocab_size))
        self.content = hashlib.sha256()
        self.counts = {"begins_inside_token": 0, "holds_special_token": 0}

    def write(self) -> None:
        """Fill the folder."""
        columns: list[dict[str, list[int]]] = [{n: [] for n in PER_SAMPLE} for _ in PART_NAMES]
        with ExitStack() as stack:
            files = [
                [
                    stack.enter_context((self.folder / f"{name}.{kind}.bin").open("wb"))
                    for kind in ("tokens", "is_trained")
                ]
                for name in PART_NAMES
            ]
            for index, number, row, tokens in self._tokenised():
                part = int(self.parts[index])
                tokens.ids.astype(self.dtype).tofile(files[part][0])
                tokens.is_trained.tofile(files[part][1])
                sample = columns[part]
                sample["starts"].append(sum(sample["sizes"][-1:] + sample["starts"][-1:]))
                sample["sizes"].append(len(tokens.ids))
                sample["keys"].append(int(self.keys[index]))
                sample["files"].append(number)
                sample["lines"].append(row.line)
                for values in (tokens.ids, tokens.is_trained, np.array([part])):
                    self.content.update(values.tobytes())
        for name, sample in zip(PART_NAMES, columns, strict=True):
            for kind, dtype in PER_SAMPLE.items():
                np.save(self.folder / f"{name}.{kind}.npy", np.array(sample[kind], dtype))
        self._close(sum(len(sample["sizes"]) for sample in columns))

    def _close(self, num_samples: int) -> None:
        if not num_samples:
            raise ValueError(
                self.bad_rows.message()
                if self.bad_rows.count
                else "the files hold no rows; write prompts and completions, or chats, into them."
            )
        self.bad_rows.settle(self.folder)
        text = json.dumps(self.tokenizer.to_dict())
        (self.folder / "tokenizer.json").write_text(text, "utf-8")
        facts = {
            "fingerprint": self.content.hexdigest()[:32],
            "dtype": self.dtype.name,
            "files": [str(path) for paths in self.request.files.values() for path in paths],
            **self.counts,
        }
        (self.folder / "facts.json").write_text(json.dumps(facts), "utf-8")

    def _tokenised(self) -> Iterator[tuple[int, int, Instruction, TrainedTokens]]:
        marked = self._marked(self.marker, self.bad_rows)
        while batch := list(islice(marked, ROWS_PER_BATCH)):
            tokens = self._tokens([(row, text) for _, _, row, text in batch])
            for (index, number, row, _), found in zip(batch, tokens, strict=True):
                self.counts["begins_inside_token"] += found.begins_inside_token
                self.counts["holds_special_token"] += self.marker.holds_special_token(row)
                yield index, number, row, found

    def _tokens(self, texts: list[tuple[Instruction, MarkedText]]) -> list[TrainedTokens]:
        """Return the tokens of each text; an error names the row."""
        try:
            return self.marker.tokens([text for _, text in texts])
        except ValueError:
            for row, text in texts:
                try:
                    self.marker.tokens([text])
                except ValueError as error:
                    raise ValueError(f"{row.file}:{row.line}: {error}") from error
            raise

    def _marked(
        self, marker: Marker, bad_rows: BadRows
    ) -> Iterator[tuple[int, int, Instruction, MarkedText]]:
        """Yield each sound row with its text; what the template refuses goes to `bad_rows`."""
        for index, (_, number, row) in enumerate(self.request.rows(bad_rows)):
            marker.check_template(row)
            try:
                text = marker.marked(row)
            except ValueError as error:
                bad_rows.add(BadRow(row.file, row.line, "", str(error), "template"))
            else:
                yield index, number, row, text

    def _training_texts(self) -> Iterator[str]:
        """What a vocabulary is taken from; templates read special tokens and no vocabulary."""
        template = TokenizerOptions(chat_template=self.request.tokenizer.chat_template)
        marker = Marker(make_tokenizer(template, iter(())), "all", self.request.separator)
        # Collected alone, as `divided` does: the reading that fills the store names them all.
        for index, _, _, marked in self._marked(marker, BadRows("collect")):
            if self.parts[index] == TRAIN:
                text = marked.text
                for token in marker.special:
                    text = text.replace(token, "")
                yield text
