"""Prompts with answers, and chats: rows, masks of trained tokens, token store and datamodule."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from datamodules import demo
from datamodules.core.batches import IGNORED, TERM
from datamodules.core.store import text_hash
from datamodules.files.rows import SUFFIXES, BadRow, BadRows, JsonRow, RowFault, refuse, sound_rows
from datamodules.files.splitting import PART_NAMES, TRAIN, keyed_hashes
from datamodules.files.tables import Files
from datamodules.text.packing import Piece, RowDataset
from datamodules.text.prompts import SHAPES, is_answer, objects_of, question_of, row_prompt
from datamodules.text.store import CorpusRequest, TokenStore, part_files
from datamodules.text.texts import LanguageModelDataModule
from datamodules.tokenizers.text import TextTokenizer, TokenizerOptions, make_tokenizer

TooLong = Literal["cut", "leave_out"]
EMPTY = "{} is empty: only end-of-text could be learnt; fill it in, or delete the row."
STORE_VERSION = 9
ROWS_PER_BATCH = 1024


class Instruction(NamedTuple):
    """One sample: a prompt and its completion, or the messages of a chat (then both are empty)."""

    file: str
    line: int
    prompt: str
    completion: str
    messages: tuple[dict[str, Any], ...] = ()
    shrinks: int = 0  # leading characters of the prompt whose end may be cut if it is too long
    group: str = ""  # the split keeps equal groups in one part; "" groups equal samples
    extra: str = ""  # text that the store keeps beside the tokens of evaluation samples
    tools: tuple[dict[str, Any], ...] = ()  # tools that a chat's assistant may call

    @property
    def key(self) -> str:
        """Key of the split: equal for exact duplicates and for samples of one group."""
        content = self.messages or (self.prompt, self.completion)
        return self.group or json.dumps(content, sort_keys=True, ensure_ascii=False)

    @property
    def question(self) -> str:
        """Equal for samples that ask the same, whatever the answer, and for those of one group."""
        return self.group or json.dumps(question_of(self.messages) or self.prompt, sort_keys=True)


class MarkedText(NamedTuple):
    """The text of an instruction, and which of its characters are trained on."""

    row: Instruction
    text: str
    spans: list[tuple[int, int]]  # start and end (exclusive) of each trained span
    ends: bool = True  # whether end-of-text is appended
    is_end_trained: bool = True


def tokens_within(offsets: np.ndarray, prompt_end: int, shrinks: int, most: int) -> np.ndarray:
    """Return which tokens stay, [n] bool, after the first part of too long a prompt loses its end.

    Args:
        offsets: [n, 2] characters of each token of a prompt and any text after it.
        prompt_end: number of characters of the prompt.
        shrinks: number of characters of its first part; only tokens within it are cut.
        most: maximum number of tokens of the prompt.
    """
    surplus = int((offsets[:, 0] < prompt_end).sum()) - most
    part = np.flatnonzero(offsets[:, 1] <= shrinks)
    stays = np.ones(len(offsets), bool)
    if surplus > 0:
        stays[part[max(len(part) - surplus, 0) :]] = False
    return stays


class Marker:
    """Turns instructions into tokens, each marked as trained on or not.

    A prompt is followed by the separator, the completion and end-of-text. A chat is rendered by its
    template; an answer begins after the template's generation prompt and ends with its last special
    token, or at the next turn if it has none. A chat that does not end in a special token gets
    end-of-text, so that the model always learns where to stop.

    Args:
        tokenizer: must have a chat template if there are chats.
        separator: text between a prompt and its completion.
        max_prompt: maximum number of tokens of a prompt, with begin-of-text; a longer one loses the
            end of its first `shrinks` characters. `None` cuts nothing.
    """

    def __init__(
        self, tokenizer: TextTokenizer, separator: str, max_prompt: int | None = None
    ) -> None:
        self.tokenizer, self.separator, self.max_prompt = tokenizer, separator, max_prompt
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self.special = tuple(token.content for token in added if token.special)
        self.special_behind = re.compile(rf"\s*({'|'.join(map(re.escape, self.special))})")

    def marked(self, row: Instruction) -> MarkedText:
        """Return the text of one instruction; ValueError if the template refuses the messages or
        rewrites earlier turns."""
        if not row.messages:
            before = row.prompt + self.separator
            text = before + row.completion
            return MarkedText(row, text, [(len(before), len(text))])
        text = self.tokenizer.render(row.messages, tools=row.tools)
        spans = [self._answer(row, i, text) for i, m in enumerate(row.messages) if is_answer(m)]
        ends = not text.rstrip().endswith(self.special)
        return MarkedText(row, text, spans, ends, is_answer(row.messages[-1]))

    def tokens(self, marked: Sequence[MarkedText]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ids [n] int64 of each text and whether each is trained on, [n] bool; a token
        that lies partly in an answer counts as part of it."""
        texts = [text.text for text in marked]
        places = [f"{text.row.file}:{text.row.line}" for text in marked]
        encodings = self.tokenizer.encode_with_offsets(texts, places)
        begin_id, special_ids, samples = self.tokenizer.begin_id, self.tokenizer.special_ids, []
        for text, encoding in zip(marked, encodings, strict=True):
            ids = np.array(encoding.ids, np.int64)
            offsets = np.array(encoding.offsets).reshape(-1, 2)
            if self.max_prompt is not None:
                most = self.max_prompt - (begin_id is not None)
                stays = tokens_within(offsets, text.spans[0][0], text.row.shrinks, most)
                ids, offsets = ids[stays], offsets[stays]
            is_trained = np.zeros(len(ids), bool)
            for start, end in text.spans:
                of_span = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < end))
                is_special: Any = text.row.messages and np.isin(ids[of_span], special_ids)
                if np.any(is_special):
                    last = of_span[np.flatnonzero(is_special)[-1]]
                    if not text.text[offsets[last, 1] : end].strip():  # a line break at most
                        of_span = of_span[of_span <= last]
                is_trained[of_span] = True
            if not text.row.messages and begin_id is not None:  # a template writes its own
                ids, is_trained = np.append(begin_id, ids), np.append(False, is_trained)
            if text.ends:
                ids = np.append(ids, self.tokenizer.end_id)
                is_trained = np.append(is_trained, text.is_end_trained)
            samples.append((ids, is_trained))
        return samples

    def _answer(self, row: Instruction, i: int, text: str) -> tuple[int, int]:
        """Return start and end (exclusive) of message i, an answer, in the text of its chat."""
        through = self.tokenizer.render(row.messages[: i + 1], tools=row.tools)
        content = row.messages[i]["content"].strip()
        if i or not content:
            before = self.tokenizer.render(row.messages[:i], True, row.tools)
        else:  # no earlier turns to render: the answer starts at its content
            before = through.partition(content)[0]
        if text.startswith(before):
            start = len(before)
            if text.startswith(through) and through.startswith(before):
                return start, len(through)
            # Some templates write the last answer differently, with a block for its reasoning.
            place = text.find(content, start)
            end = self.special_behind.match(text, place + len(content)) if place >= 0 else None
            if end is not None:
                return start, end.end()
        raise ValueError(
            f"the chat template changes the turns before message {i + 1} when this message is "
            "added, so that the tokens of its answer cannot be located; name another template with "
            "data.tokenizer.chat_template, such as plain."
        )


@dataclass(frozen=True)
class InstructionRequest(CorpusRequest):
    """`CorpusRequest` for instructions; `separator` goes between prompt and completion."""

    separator: str = ""
    kind = "instructions"

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "names": self._names(), "rows": STORE_VERSION}

    def _names(self) -> list[str]:
        return [str(path) for paths in self.files.values() for path in paths]

    def marker(self, tokenizer: TextTokenizer) -> Marker:
        """Return the marker that turns rows into tokens."""
        return Marker(tokenizer, self.separator)

    def sample(self, row: JsonRow) -> Instruction:
        """Return the sample of a row; RowFault if it breaks a rule."""
        prompt, messages = row_prompt(row.values)
        if messages is not None:
            answers = [message for message in messages if is_answer(message)]
            if not answers:
                rule = (
                    'no message has the role "assistant", and a weight that is not 0: nothing '
                    "could be learnt; add its answer."
                )
                raise RowFault("no answer", str(messages), rule)
            if not all(one["content"].strip() or one.get("tool_calls") for one in answers):
                raise RowFault("empty answer", str(messages), EMPTY.format("an answer"))
            tools = objects_of(row.values, "tools")
            return Instruction(str(row.file), row.line, "", "", messages, tools=tools)
        completion = row.values.get("completion")
        if not isinstance(completion, str):
            raise RowFault("keys", str(completion), f'"completion" must be a text: {SHAPES}.')
        if not completion.strip():
            raise RowFault("empty answer", str(prompt), EMPTY.format("the completion"))
        return Instruction(str(row.file), row.line, str(prompt), completion)

    def samples(self, path: Path, bad_rows: BadRows) -> Iterator[Instruction]:
        """Yield the samples of a file's valid rows."""
        return sound_rows(path, self.sample, bad_rows)

    def rows(self, bad_rows: BadRows) -> Iterator[tuple[int, int, Instruction]]:
        """Yield part, file number and sample for every valid row."""
        paths = [(part, path) for part, paths in self.files.items() for path in paths]
        for number, (part, path) in enumerate(paths):
            yield from ((part, number, row) for row in self.samples(path, bad_rows))

    def write(self, folder: Path, bad_rows: BadRows) -> tuple[TextTokenizer, dict[str, Any]]:
        """Fill the folder, leave bad rows out and list them there; ValueError if no row is left
        or chats have no template."""
        of_files, first_pass = list[int](), BadRows("reject")

        def keys() -> Iterator[str]:
            for part, _, row in self.rows(first_pass):
                of_files.append(part)
                yield row.key

        hashes = keyed_hashes(keys(), 0)
        if not of_files:  # else the tokenizer would fail for lack of text
            refuse(first_pass.rows)
        parts = self.divided(of_files, hashes)

        def training_texts() -> Iterator[str]:
            """Yield texts for the vocabulary; rendering chats needs special tokens only."""
            template = TokenizerOptions(chat_template=self.tokenizer.chat_template)
            marker = self.marker(make_tokenizer(template, iter(())))
            # Its own list: bad rows are reported when the store is filled.
            refused, marked = BadRows("reject"), None
            for index, _, marked in self._marked(marker, len(parts), refused):
                if parts[index] == TRAIN:
                    text = marked.text
                    for token in marker.special:
                        text = text.replace(token, "")
                    yield text
            if marked is None:  # else the tokenizer would fail for lack of text
                refuse(refused.rows)

        tokenizer = self.given or make_tokenizer(self.tokenizer, training_texts())
        marker, content = self.marker(tokenizer), hashlib.sha256()
        with part_files(folder, tokenizer.vocab_size) as files:
            rows = self._marked(marker, len(parts), bad_rows)
            while batch := list(islice(rows, ROWS_PER_BATCH)):
                tokens = marker.tokens([text for *_, text in batch])
                for (index, file, text), (ids, is_trained) in zip(batch, tokens, strict=True):
                    row = text.row
                    part, arrays = parts[index], files[parts[index]]
                    extra = row.extra.encode() if part != TRAIN else b""
                    arrays["texts"].add(np.frombuffer(extra, np.uint8))
                    places = {"starts": arrays["tokens"].length, "num_positions": len(ids) - 1}
                    places |= {"hashes": hashes[index], "text_ends": arrays["texts"].length}
                    places["questions"] = text_hash(row.question)
                    for name, value in {**places, "files": file, "lines": row.line}.items():
                        arrays[name].add(np.array([value]))
                    arrays["tokens"].add(ids)
                    arrays["is_trained"].add(is_trained)
                    for values in (ids, is_trained, np.array([part], np.int64)):
                        content.update(values.tobytes())
        if not any(arrays["starts"].length for arrays in files):
            refuse(bad_rows.rows)
            raise ValueError(
                "the files hold no rows; write prompts and completions, or chats, into them."
            )
        bad_rows.settle(folder)
        return tokenizer, {"fingerprint": content.hexdigest()[:32], "files": self._names()}

    def _marked(
        self, marker: Marker, number: int, bad_rows: BadRows
    ) -> Iterator[tuple[int, int, MarkedText]]:
        """Yield row number, file number and text of each valid row, at most `number`; rows that
        the template refuses go to `bad_rows`."""
        rows = self.rows(bad_rows)  # first in zip: reads bad rows after the last valid one
        for (_, file, row), index in zip(rows, range(number), strict=False):
            if row.messages and marker.tokenizer.chat_template is None:
                marker.tokenizer.render(row.messages)  # raises an error that says what to do
            try:
                text = marker.marked(row)
            except ValueError as error:
                bad_rows.add(BadRow(row.file, row.line, "", str(error), "template"))
            else:
                yield index, file, text


def count_trained(is_trained: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return how many tokens of each stretch are trained on, [K] int64."""
    stretches = zip(starts.tolist(), sizes.tolist(), strict=True)
    counts = (np.count_nonzero(is_trained[start : start + size]) for start, size in stretches)
    return np.fromiter(counts, np.int64, len(starts))


class InstructionDataset(RowDataset):
    """One part of a store; each instruction is a piece, see `InstructionDataModule`.

    With `too_long` "cut", a sample that exceeds the context loses its beginning and keeps the end
    of its answer with end-of-text; "leave_out" drops it.
    """

    def __init__(
        self,
        store: TokenStore,
        part: int,
        context_length: int,
        layout: str,
        too_long: TooLong = "cut",
    ) -> None:
        self.store, stream, name = store, store.stream(part), PART_NAMES[part]
        whole, is_trained = stream.num_positions, stream.is_trained
        sizes = np.minimum(whole, context_length)
        starts, is_long = stream.starts + whole - sizes, whole > context_length
        before = count_trained(is_trained, stream.starts + 1, whole)
        targets = count_trained(is_trained, starts + 1, sizes)
        stays = ~is_long | (too_long == "cut")
        losses = []  # a sentence for each kind of sample that is cut or left out
        if is_long.any():
            fate = "their beginnings are cut off" if too_long == "cut" else "they are left out"
            num_answers = (stays & (targets < before)).sum()
            lost = f", {num_answers:,} lose a part of an answer" if num_answers else ""
            long = f"{is_long.sum():,} {name} samples exceed data.context_length {context_length:,}"
            losses.append(f"{long}: {fate}{lost}")
        if num_without := (stays & (targets == 0)).sum():
            losses.append(f"{num_without:,} {name} samples have no target: left out")
        self.losses = losses
        # [K] int64, which samples of the part are used.
        self.samples = np.flatnonzero(stays & (targets > 0))
        used = self.samples
        super().__init__(stream, starts[used], sizes[used], context_length, layout)
        self.target_counts = {TERM: self.per_row(targets[used])}
        self.fingerprint = f"{store.fingerprint}-{part}-{layout}-{context_length}-{too_long}"

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return place, text and trained text, one line per instruction."""
        shown: dict[str, list[str]] = {"place": [], "text": [], "trained on": []}
        for i in self.pieces_of(sample_id):
            piece, sample = self.piece(i), self.samples[i]
            answer = piece.labels[piece.labels != IGNORED]
            file = self.store.facts["files"][self.stream.files[sample]]
            shown["place"].append(f"{file}:{self.stream.lines[sample]}")
            shown["text"].append(repr(self.store.tokenizer.decode(piece.input_ids)))
            decoded = self.store.tokenizer.decode(answer, skip_special_tokens=False)
            shown["trained on"].append(repr(decoded))
        return {name: "\n".join(lines) for name, lines in shown.items()}

    def stretch(self, start: int, size: int) -> Piece:
        """Return successive positions; those not trained on have the label -100."""
        input_ids, labels = super().stretch(start, size)
        is_trained = self.stream.is_trained[start + 1 : start + size + 1]
        return Piece(input_ids, np.where(is_trained, labels, IGNORED))


class InstructionDataModule(LanguageModelDataModule):
    """Tokenises instructions and chats once and serves them. Without any file it uses demo data.

    Only answers, each with its end token, are trained on. Training files are split by a hash of
    the text. A sample longer than context_length loses its beginning; a warning counts them.

    Args:
        train_files: jsonl, json or parquet; a path, a pattern, or a list of them. A row has prompt
            and completion, messages with role and content, conversations with from and value
            (ShareGPT), or instruction, input and output (Alpaca). Chats need a tokenizer with a
            chat template, which also writes a row's tools. Answers of weight 0 are not learnt.
        context_length: maximum number of positions per row.
        layout: `packed` fills rows with whole samples that do not see each other, `documents`
            keeps samples apart and joins those of a micro-batch without padding.
        separator: text between a prompt and its completion.
        on_bad_rows: `error` fails and names the first, `reject` skips all (see rejected.csv).
        language_model: other files, tokenizer, split and prediction, see `LanguageModelDataModule`.
    """

    suffixes = SUFFIXES
    noun = "samples"
    too_long: TooLong = "cut"
    request_class = InstructionRequest
    demo_file = demo.demo_instructions

    def __init__(
        self,
        train_files: Files = None,
        context_length: int = 512,
        layout: Literal["packed", "documents"] = "packed",
        separator: str = "",
        on_bad_rows: Literal["error", "reject"] = "error",
        **language_model: Any,
    ) -> None:
        super().__init__(
            train_files=train_files, context_length=context_length, layout=layout, **language_model
        )
        self.separator, self.on_bad_rows = separator, on_bad_rows

    def part_dataset(self, part: int) -> InstructionDataset:
        """Return the samples of a part that fit."""
        return InstructionDataset(self.store, part, self.context_length, self.layout, self.too_long)

    def question(self, row: JsonRow) -> str:
        prompt, messages = row_prompt(row.values)
        return Instruction("", 0, prompt or "", "", messages or ()).question
