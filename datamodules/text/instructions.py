"""Prompts with answers, and chats: their rows, what is trained on, their store and datamodule."""

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
from datamodules.text.prompts import SHAPES, asked, is_answer, objects_of, unanswered
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
    shrinks: int = 0  # characters of a prompt that lose their end where it is too long
    group: str = ""  # samples of equal groups are in one part; "" groups equal samples
    extra: str = ""  # text that the store keeps beside the tokens of evaluation
    tools: tuple[dict[str, Any], ...] = ()  # that a chat's assistant may call

    @property
    def key(self) -> str:
        """Equal for exact duplicates, and within a group."""
        said = self.messages or (self.prompt, self.completion)
        return self.group or json.dumps(said, sort_keys=True, ensure_ascii=False)

    @property
    def question(self) -> str:
        """Equal for what asks the same, with an answer or without one, and within a group."""
        return self.group or json.dumps(unanswered(self.messages) or self.prompt, sort_keys=True)


class MarkedText(NamedTuple):
    """The text of an instruction, and the characters of it that are trained on."""

    row: Instruction
    text: str
    spans: list[tuple[int, int]]  # first and past-the-last character of each
    ends: bool = True  # end-of-text goes behind it
    is_end_trained: bool = True


def tokens_within(offsets: np.ndarray, prompt_end: int, shrinks: int, most: int) -> np.ndarray:
    """Return which tokens stay, [n] bool, where a prompt that is too long loses the end of a part.

    Args:
        offsets: [n, 2] characters of each token, of a prompt and what may follow it.
        prompt_end: characters of the prompt.
        shrinks: characters of that part, which begins the prompt and loses no more than itself.
        most: tokens that the prompt may have.
    """
    surplus = int((offsets[:, 0] < prompt_end).sum()) - most
    part = np.flatnonzero(offsets[:, 1] <= shrinks)
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
        separator: between a prompt and its completion.
        max_prompt: tokens of a prompt, its beginning included, from which on it loses the end of
            what shrinks; `None` cuts nothing.
    """

    def __init__(
        self, tokenizer: TextTokenizer, separator: str, max_prompt: int | None = None
    ) -> None:
        self.tokenizer, self.separator, self.max_prompt = tokenizer, separator, max_prompt
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self.special = tuple(token.content for token in added if token.special)
        self.special_behind = re.compile(rf"\s*({'|'.join(map(re.escape, self.special))})")

    def marked(self, row: Instruction) -> MarkedText:
        """Return the text of one instruction; ValueError where the template refuses the messages,
        or rewrites earlier turns."""
        if not row.messages:
            before = row.prompt + self.separator
            text = before + row.completion
            return MarkedText(row, text, [(len(before), len(text))])
        text = self.tokenizer.render(row.messages, tools=row.tools)
        spans = [self._answer(row, i, text) for i, m in enumerate(row.messages) if is_answer(m)]
        ends = not text.rstrip().endswith(self.special)
        return MarkedText(row, text, spans, ends, is_answer(row.messages[-1]))

    def tokens(self, marked: Sequence[MarkedText]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the tokens of each text, ids [n] int64 and whether they are trained on [n] bool;
        one that lies partly in an answer belongs to it."""
        texts = [text.text for text in marked]
        places = [f"{text.row.file}:{text.row.line}" for text in marked]
        encodings = self.tokenizer.encode_with_offsets(texts, places)
        begin_id, special_ids, found = self.tokenizer.begin_id, self.tokenizer.special_ids, []
        for text, encoding in zip(marked, encodings, strict=True):
            ids = np.array(encoding.ids, np.int64)
            offsets = np.array(encoding.offsets).reshape(-1, 2)
            if self.max_prompt is not None:
                most = self.max_prompt - (begin_id is not None)
                kept = tokens_within(offsets, text.spans[0][0], text.row.shrinks, most)
                ids, offsets = ids[kept], offsets[kept]
            is_trained = np.zeros(len(ids), bool)
            for start, end in text.spans:
                of_span = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < end))
                is_special: Any = text.row.messages and np.isin(ids[of_span], special_ids)
                if np.any(is_special):
                    last = of_span[np.flatnonzero(is_special)[-1]]
                    if not text.text[offsets[last, 1] : end].strip():  # a template's line break
                        of_span = of_span[of_span <= last]
                is_trained[of_span] = True
            if not text.row.messages and begin_id is not None:  # which a template brings itself
                ids, is_trained = np.append(begin_id, ids), np.append(False, is_trained)
            if text.ends:
                ids = np.append(ids, self.tokenizer.end_id)
                is_trained = np.append(is_trained, text.is_end_trained)
            found.append((ids, is_trained))
        return found

    def _answer(self, row: Instruction, i: int, text: str) -> tuple[int, int]:
        """Return where answer i of the chat stands in its text."""
        through = self.tokenizer.render(row.messages[: i + 1], tools=row.tools)
        said = row.messages[i]["content"].strip()
        if i or not said:
            before = self.tokenizer.render(row.messages[:i], True, row.tools)
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
            "data.tokenizer.chat_template, such as plain."
        )


@dataclass(frozen=True)
class InstructionRequest(CorpusRequest):
    """As `CorpusRequest`; the separator stands between a prompt and its completion."""

    separator: str = ""
    kind = "instructions"

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "names": self._names(), "rows": STORE_VERSION}

    def _names(self) -> list[str]:
        return [str(path) for paths in self.files.values() for path in paths]

    def marker(self, tokenizer: TextTokenizer) -> Marker:
        """Return what turns rows into tokens."""
        return Marker(tokenizer, self.separator)

    def sample(self, row: JsonRow) -> Instruction:
        """Return the sample of a row; RowFault where it breaks a rule."""
        prompt, messages = asked(row.values)
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
        """Yield the samples of a file's sound rows."""
        return sound_rows(path, self.sample, bad_rows)

    def rows(self, bad_rows: BadRows) -> Iterator[tuple[int, int, Instruction]]:
        """Yield the part, the number of the file and the row of all sound rows."""
        paths = [(part, path) for part, paths in self.files.items() for path in paths]
        for number, (part, path) in enumerate(paths):
            yield from ((part, number, row) for row in self.samples(path, bad_rows))

    def write(self, folder: Path, bad_rows: BadRows) -> tuple[TextTokenizer, dict[str, Any]]:
        """Fill the folder; bad rows are left out and listed in it, and a ValueError where there is
        no other or chats have no template."""
        of_files, found = list[int](), BadRows("reject")

        def keys() -> Iterator[str]:
            for part, _, row in self.rows(found):
                of_files.append(part)
                yield row.key

        hashes = keyed_hashes(keys(), 0)
        if not of_files:  # before a tokenizer misses its text
            refuse(found.rows)
        parts = self.divided(of_files, hashes)

        def training_texts() -> Iterator[str]:
            """What a vocabulary is taken from; templates read special tokens and no vocabulary."""
            template = TokenizerOptions(chat_template=self.tokenizer.chat_template)
            marker = self.marker(make_tokenizer(template, iter(())))
            # Collected alone: the reading that fills the store names bad rows.
            refused, marked = BadRows("reject"), None
            for index, _, marked in self._marked(marker, len(parts), refused):
                if parts[index] == TRAIN:
                    text = marked.text
                    for token in marker.special:
                        text = text.replace(token, "")
                    yield text
            if marked is None:  # before a tokenizer misses its text
                refuse(refused.rows)

        tokenizer = self.given or make_tokenizer(self.tokenizer, training_texts())
        marker, content = self.marker(tokenizer), hashlib.sha256()
        byte_lengths = tokenizer.byte_lengths()
        num_bytes = [0] * len(PART_NAMES)
        with part_files(folder, tokenizer.vocab_size) as files:
            rows = self._marked(marker, len(parts), bad_rows)
            while batch := list(islice(rows, ROWS_PER_BATCH)):
                tokens = marker.tokens([text for *_, text in batch])
                for (index, file, text), (ids, is_trained) in zip(batch, tokens, strict=True):
                    row = text.row
                    part, arrays = parts[index], files[parts[index]]
                    if byte_lengths is not None:
                        num_bytes[part] += int(byte_lengths[ids].sum())
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
        return tokenizer, {
            "fingerprint": content.hexdigest()[:32],
            "files": self._names(),
            "num_bytes": num_bytes if byte_lengths is not None else [None] * len(PART_NAMES),
        }

    def _marked(
        self, marker: Marker, number: int, bad_rows: BadRows
    ) -> Iterator[tuple[int, int, MarkedText]]:
        """Yield number, number of the file and text of each sound row, of as many as there were
        before; what the template refuses goes to `bad_rows`."""
        rows = self.rows(bad_rows)  # asked first, so that bad rows at the end are read, too
        for (_, file, row), index in zip(rows, range(number), strict=False):
            if row.messages and marker.tokenizer.chat_template is None:
                marker.tokenizer.render(row.messages)  # names the way out
            try:
                text = marker.marked(row)
            except ValueError as error:
                bad_rows.add(BadRow(row.file, row.line, "", str(error), "template"))
            else:
                yield index, file, text


def count_trained(is_trained: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the trained tokens of each stretch, [K] int64."""
    stretches = zip(starts.tolist(), sizes.tolist(), strict=True)
    counts = (np.count_nonzero(is_trained[start : start + size]) for start, size in stretches)
    return np.fromiter(counts, np.int64, len(starts))


class InstructionDataset(RowDataset):
    """One part of a store, each instruction a piece; see `InstructionDataModule`.

    A sample that does not fit into the context loses its beginning (`cut`), so that the end of the
    answer, where end-of-text stands, is what stays.
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
        # [K] int64, of the part, that are used.
        self.samples = np.flatnonzero(stays & (targets > 0))
        used = self.samples
        super().__init__(stream, starts[used], sizes[used], context_length, layout)
        self.target_counts = {TERM: self.per_row(targets[used])}
        self.fingerprint = f"{store.fingerprint}-{part}-{layout}-{context_length}-{too_long}"

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the places, the texts and what is trained on, one line per instruction."""
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
        """Return some positions; what is not trained on has no label."""
        input_ids, labels = super().stretch(start, size)
        is_trained = self.stream.is_trained[start + 1 : start + size + 1]
        return Piece(input_ids, np.where(is_trained, labels, IGNORED))


class InstructionDataModule(LanguageModelDataModule):
    """Tokenises instructions once and deals them; without any file, embedded demo data. Training
    files are divided by a hash of the text; answers are trained on, each with its end. A sample
    beyond context_length loses its beginning, which is counted and said.

    Args:
        train_files: jsonl, json or parquet; a path, a pattern, or several. A row has prompt and
            completion, messages with role and content, conversations with from and value
            (ShareGPT), or instruction, input and output (Alpaca). Chats need a tokenizer with a
            chat template, which also writes a row's tools; of an answer of weight 0 nothing is
            learnt.
        context_length: most positions of a row.
        layout: `packed` fills rows with whole samples that do not see each other, `documents`
            keeps samples apart and joins those of a micro-batch without padding.
        separator: stands between a prompt and its completion.
        on_bad_rows: `error` names the first, `reject` writes all to rejected.csv.
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
        prompt, messages = asked(row.values)
        return Instruction("", 0, prompt or "", "", messages or ()).question
