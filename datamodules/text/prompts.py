"""Prompts to go on from and choices to rate: rows in, datasets of prediction, files out."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.core.batches import IGNORED, PromptBatch
from datamodules.core.planned import PlannedDataset
from datamodules.files.rows import HALF_RULE, JSON_SUFFIXES, JsonRow, half_character, read_json_rows
from datamodules.files.tables import free_names, naming, new_text_file
from datamodules.text.instruction_store import as_messages
from datamodules.text.packing import Piece, best_fit, padded_rows
from datamodules.tokenizers.text import TextTokenizer

ROWS_AT_ONCE = 1024
DEFAULT_COLUMNS = ("prompt", "messages")
FINISH_REASONS = ("end", "stop", "length", "positions")
NO_TOKEN = -1
COMPLETED = ("completion_ids", "num_tokens", "num_characters", "finish_reason")
COMPLETED_COLUMNS = ("completion", "num_tokens", "finish_reason", "prompt_tokens_cut")
SCORED = ("scores", "num_tokens")
SCORED_COLUMNS = (*SCORED, "best", "prompt_tokens_cut")


@dataclass(frozen=True)
class PromptRequest:
    """All that the tokens of prompts depend on.

    Args:
        files: jsonl, json or parquet.
        tokenizer: of the model.
        column: of the prompt, a text or messages; `None` takes `prompt` or `messages`.
        separator: stands behind a prompt that is a text.
        mode: `generate`, or `score` for rows with choices or a continuation.
        max_positions: most positions of the network; `None` for no limit.
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
    tokenizer, limit = request.tokenizer, request.max_positions

    def encoded(texts: list[tuple[JsonRow, str]]) -> list[list[int]]:
        """Return the tokens of texts that stand in rows; an error names the row."""
        try:
            return [ids.tolist() for ids in tokenizer.encode_batch([text for _, text in texts])]
        except ValueError:
            for row, text in texts:
                with _at(row):
                    tokenizer.encode(text)
            raise

    def check_cut(text: _Text, what: str, size: int) -> None:
        if not request.cuts:
            raise ValueError(
                f"{text.row.place}: {what} has {size} tokens and the network {limit} positions; "
                "shorten it, or cut its beginning with model.generation.context=recent."
            )

    def prompt(text: _Text, ids: list[int]) -> Prompt:
        ids = begun(ids, text.is_chat, tokenizer)
        if limit is None or len(ids) <= limit:
            return Prompt(ids, 0, 0)
        check_cut(text, "the prompt", len(ids))
        kept = recent(ids, limit, request.max_new_tokens)
        return Prompt(kept, 0, len(ids) - len(kept))

    def choice(text: _Text, prompt: list[int], joint: list[int]) -> Prompt:
        num_rated = joint_tokens(prompt, joint)
        ids = begun(joint, text.is_chat, tokenizer)
        if num_rated == len(ids):  # the first token, too, needs one to follow
            ids = [tokenizer.end_id, *ids]
        if not num_rated:
            raise ValueError(
                f"{text.row.place}: a continuation adds no token to the prompt; write what "
                "follows it."
            )
        if limit is None or len(ids) - 1 <= limit:
            return Prompt(ids, num_rated, 0)
        check_cut(text, "prompt and continuation", len(ids) - 1)
        if num_rated > limit:
            raise ValueError(
                f"{text.row.place}: the continuation has {num_rated} tokens and the network "
                f"{limit} positions; shorten it."
            )
        return Prompt(ids[-limit - 1 :], num_rated, len(ids) - limit - 1)

    texts = (_text(row, request) for row in request.rows())
    while some := list(islice(texts, ROWS_AT_ONCE)):
        prompts = encoded([(text.row, text.prompt) for text in some])
        if request.mode == "generate":
            yield from ([prompt(text, ids)] for text, ids in zip(some, prompts, strict=True))
            continue
        both = [(text.row, text.prompt + more) for text in some for more in text.choices]
        joint = iter(encoded(both))
        for text, ids in zip(some, prompts, strict=True):
            yield [choice(text, ids, next(joint)) for _ in text.choices]


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


def recent(tokens: list[int], max_positions: int, num_new: int) -> list[int]:
    """Return the end of a text that is longer than `max_positions`: as much as leaves room for
    `num_new` tokens, but half of the positions at least."""
    return tokens[-max(max_positions // 2, max_positions - num_new, 1) :]


def begun(ids: list[int], is_chat: bool, tokenizer: TextTokenizer) -> list[int]:
    """Return the tokens of a text with what a document begins with: the begin-of-text token where
    the tokenizer has one, as in training; a chat begins as its template writes it. A prompt
    without any token begins with the end-of-text token, which is what stands before a document."""
    if ids and (is_chat or tokenizer.begin_id is None):
        return ids
    begin = tokenizer.end_id if tokenizer.begin_id is None else tokenizer.begin_id
    return [begin, *ids]


@contextmanager
def _at(row: JsonRow) -> Iterator[None]:
    """Begin the message of an error with the place of a row."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{row.place}: {error}") from error


def _text(row: JsonRow, request: PromptRequest) -> _Text:
    json_line(row, row.values)  # what cannot be written is said now, not after hours of prediction
    values, column = row.values if request.column else as_messages(row.values), request.column
    names = ", ".join(f'"{name}"' for name in row.values) or "no value"
    if column is None:
        named = [name for name in DEFAULT_COLUMNS if name in values]
        held = [name for name in named if values[name] is not None] or named
        if len(held) != 1:
            raise ValueError(
                f'{row.place}: the row has {"both" if held else "neither"} of "prompt" and '
                f'"messages" (it has {names}); name the column with --data.prompt_column.'
            )
        column = held[0]
    if column not in values:
        raise ValueError(
            f'{row.place}: the row has no "{column}" (it has {names}); name the column with '
            "--data.prompt_column."
        )
    value: Any = values[column]
    choices: Any = []
    if isinstance(value, list):
        value = as_messages({"conversations": value})["messages"]
    if request.mode == "score":
        choices = row.values.get("choices")
        if choices is None:
            choices = row.values.get("continuation")
            choices = [choices] if isinstance(choices, str) else choices
        is_list = isinstance(choices, list) and choices
        if not is_list or not all(isinstance(choice, str) for choice in choices):
            raise ValueError(
                f'{row.place}: mode score needs "choices", a list of texts, or "continuation", a '
                f"text; the row has {names if choices is None else _shown(choices)}."
            )
    if isinstance(value, str):
        return _Text(row, value + request.separator, False, choices)
    if not isinstance(value, list) or not value or not all(map(_is_message, value)):
        raise ValueError(
            f'{row.place}: "{column}" is {_shown(value)}; it must be a text, or a list of messages '
            'such as [{"role": "user", "content": "…"}].'
        )
    if request.tokenizer.chat_template is None:
        raise ValueError(
            f'{row.place}: "{column}" holds messages, but the tokenizer has no chat template; '
            "write the prompt as a text, or use a model that was trained on chats."
        )
    with _at(row):
        return _Text(row, request.tokenizer.render(value, True), True, choices)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(key), str) for key in ("role", "content")
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


class PromptDataset(PlannedDataset):
    """One sample per row of the files, rows that are equal too; gives `PromptBatch`.

    Args:
        request: which files, how they become tokens.

    Attributes:
        num_cut: [N] int64, tokens at the beginning of a text that the model does not see; of the
            choice that lost most.

    Raises:
        ValueError: there is no row, or one breaks a rule; file and line are named.
    """

    def __init__(self, request: PromptRequest) -> None:
        per_row, lengths, rated, cut, tokens = [], [], [], [], []
        for prompts in request.prompts():
            per_row.append(len(prompts))
            for prompt in prompts:
                tokens.append(np.array(prompt.ids, np.int32))
                lengths.append(len(prompt.ids))
                rated.append(prompt.num_rated)
                cut.append(prompt.num_cut)
        if not per_row:
            names = ", ".join(map(str, request.files))
            raise ValueError(f"{names}: there is no row; write at least one prompt.")
        self.tokens = np.concatenate(tokens)
        self.text_offsets = np.concatenate([[0], np.cumsum(lengths)])  # [P + 1]
        self.offsets = np.concatenate([[0], np.cumsum(per_row)])  # [N + 1]
        self.num_rated = np.array(rated)  # [P]
        self.num_cut = np.maximum.reduceat(np.array(cut), self.offsets[:-1])
        self.lengths = np.add.reduceat(np.array(lengths), self.offsets[:-1])
        content = hashlib.sha256(json.dumps(request.mode).encode())
        for values in (self.tokens, self.text_offsets, self.offsets, self.num_rated):
            content.update(values.tobytes())
        self.fingerprint = content.hexdigest()[:32]
        self.target_counts = {}

    def example(self, sample_id: int, epoch: int) -> list[Prompt]:
        """Return the texts of one row."""
        return [self._text(i) for i in range(self.offsets[sample_id], self.offsets[sample_id + 1])]

    def collate(self, examples: list[list[Prompt]]) -> dict[str, Tensor]:
        """Return input_ids [B, S], padded at the right, and lengths [B]."""
        input_ids, lengths = padded_prompts([torch.tensor(prompts[0].ids) for prompts in examples])
        return {"input_ids": input_ids, "lengths": lengths}

    def _text(self, number: int) -> Prompt:
        start, end = self.text_offsets[number : number + 2]
        return Prompt(self.tokens[start:end].tolist(), int(self.num_rated[number]), 0)


class ChoiceDataset(PromptDataset):
    """As `PromptDataset`, but each row has one or more texts whose ends are rated; gives
    `ChoiceBatch`.

    Args:
        request: with mode `score`.

    Raises:
        ValueError: see `PromptDataset`.
    """

    def __init__(self, request: PromptRequest) -> None:
        super().__init__(request)
        self.most_choices = int(np.diff(self.offsets).max())

    def collate(self, examples: list[list[Prompt]]) -> dict[str, Tensor]:
        """Return the texts as documents, several in a row, and which document each choice is."""
        texts = []
        for prompt in chain.from_iterable(examples):
            ids = np.array(prompt.ids)
            labels = ids[1:].copy()
            labels[: len(labels) - prompt.num_rated] = IGNORED
            texts.append(Piece(ids[:-1], labels))
        counts = np.array([len(prompts) for prompts in examples])
        sizes = np.array([len(piece.labels) for piece in texts])
        order, offsets = best_fit(sizes, int(sizes.max()))
        rows = [[texts[i] for i in order[a:b]] for a, b in pairwise(offsets)]
        batch: dict[str, Any] = padded_rows(rows)
        document_of = np.empty(len(texts), np.int64)
        document_of[order] = np.arange(len(texts))
        choices = np.full((len(examples), self.most_choices), -1)
        choices[np.arange(self.most_choices) < counts[:, None]] = document_of
        sample_of_text = np.repeat(np.arange(len(examples)), counts)
        samples = torch.from_numpy(sample_of_text[order])  # of each document
        batch["sample_index"] = samples[batch["document_ids"].clamp(min=0)]
        return {**batch, "choice_documents": torch.from_numpy(choices)}


def prompt_batch(tokenizer: TextTokenizer, prompts: Sequence[str]) -> PromptBatch:
    """Return prompts that no chat template wrote as one batch; sample ids count from 0."""
    rows = [torch.tensor(ids) for ids in prompt_tokens(tokenizer, prompts)]
    input_ids, lengths = padded_prompts(rows)
    return PromptBatch(
        input_ids=input_ids,
        lengths=lengths,
        sample_id=torch.arange(len(rows)),
        weight=torch.ones(len(rows)),
        step_index=0,
        num_targets={},
        step_denominators={},
    )


def padded_prompts(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return input_ids [B, S], padded at the right, and lengths [B]."""
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return input_ids, torch.tensor([len(row) for row in rows])


def completion_text(tokenizer: TextTokenizer, ids: np.ndarray, num_characters: int) -> str:
    """Return the text of a completion, with the space before its first word.

    Args:
        tokenizer: of the model.
        ids: [M] token ids, -1 after the end.
        num_characters: that belong to it; a stop text may begin within the last tokens.
    """
    return tokenizer.decode_continuation(ids[ids != NO_TOKEN])[:num_characters]


def write_completions(
    rows: Iterable[JsonRow],
    results: dict[str, np.ndarray],
    path: Path,
    tokenizer: TextTokenizer,
    num_cut: np.ndarray,
) -> None:
    """Write each row with its completion, its tokens and the reason of its end; whole or not at
    all, and never over an existing file.

    Args:
        rows: all rows that were predicted, in their order.
        results: completion_ids [N, M], num_tokens [N], num_characters [N] and finish_reason [N],
            index in `FINISH_REASONS`.
        path: .jsonl.
        tokenizer: of the model.
        num_cut: [N] tokens at the beginning of a prompt that the model did not see.

    Raises:
        FileExistsError: the file exists.
        ValueError: a result is missing.
        RuntimeError: there are more or fewer rows than results.
    """
    check_results(results, COMPLETED)

    def added(number: int, row: JsonRow) -> tuple[Any, ...]:
        text, reason = completed(results, number, tokenizer)
        return text, int(results["num_tokens"][number]), reason, int(num_cut[number])

    write_rows(rows, added, COMPLETED_COLUMNS, len(results["num_tokens"]), path)


def completed(
    results: dict[str, np.ndarray], number: int, tokenizer: TextTokenizer
) -> tuple[str, str]:
    """Return the text of a completion, and the reason of its end, see `write_completions`."""
    characters = int(results["num_characters"][number])
    text = completion_text(tokenizer, results["completion_ids"][number], characters)
    return text, FINISH_REASONS[int(results["finish_reason"][number])]


def write_scores(
    rows: Iterable[JsonRow], results: dict[str, np.ndarray], path: Path, num_cut: np.ndarray
) -> None:
    """Write each row with the scores of its choices and the place of the best one, from 0.

    Args:
        rows: see `write_completions`.
        results: scores [N, C] in nats, NaN where a row has fewer choices, and num_tokens [N, C].
        path: .jsonl.
        num_cut: see `write_completions`, of the choice that lost most.

    Raises:
        FileExistsError, ValueError, RuntimeError: see `write_completions`.
    """
    check_results(results, SCORED)

    def added(number: int, row: JsonRow) -> tuple[Any, ...]:
        scores = results["scores"][number]
        there = ~np.isnan(scores)
        lists = [results[name][number][there].tolist() for name in SCORED]
        return (*lists, int(np.argmax(scores[there])), int(num_cut[number]))

    write_rows(rows, added, SCORED_COLUMNS, len(results["scores"]), path)


def check_output(path: Path) -> None:
    """Raise unless completions can be written under this name.

    Raises:
        ValueError: the suffix is unknown.
    """
    if path.suffix.lower() not in JSON_SUFFIXES:
        raise ValueError(
            f'{path} ends in "{path.suffix}"; name a file in {" or ".join(JSON_SUFFIXES)}.'
        )


def json_line(row: JsonRow, values: dict[str, Any]) -> str:
    """Return values as one line of JSON; dates and decimal numbers of parquet files become text.

    Raises:
        ValueError: a value has no such form, or holds half of a character.
    """
    try:
        line = json.dumps(values, ensure_ascii=False, default=_as_json)
    except TypeError as error:
        raise ValueError(
            f"{row.place}: {error}, and the output is JSON; leave that column out."
        ) from error
    if (half := half_character(line)) is not None:
        raise ValueError(f'{row.place}: "{half}" {HALF_RULE}')
    return line


def _as_json(value: Any) -> str:
    if isinstance(value, date | time | Decimal):  # a datetime is a date
        return value.isoformat() if not isinstance(value, Decimal) else str(value)
    raise TypeError(f"a value is of type {type(value).__name__}")


def check_results(results: dict[str, np.ndarray], names: Sequence[str]) -> None:
    """Raise ValueError where a prediction lacks results."""
    missing = [name for name in names if name not in results]
    if missing:
        raise ValueError(
            f"predict_step must return {', '.join(names)}; it returned {', '.join(results)}."
        )


def write_rows(
    rows: Iterable[JsonRow],
    added: Callable[[int, JsonRow], tuple[Any, ...]],
    columns: Sequence[str],
    num_results: int,
    path: Path,
) -> None:
    """Write each row with more columns, whole or not at all.

    Args:
        rows: all that were predicted, in their order.
        added: gives the values of the columns for a row and its number.
        columns: their names; a row's own value of such a name is kept as `input_NAME`.
        num_results: that there are.
        path: .jsonl.

    Raises:
        FileExistsError: the file exists.
        RuntimeError: there are more or fewer rows than results.
    """
    names: dict[tuple[str, ...], list[str]] = {}
    number = -1
    with new_json_file(path) as file:
        for number, row in enumerate(rows):
            keys = tuple(row.values)
            if keys not in names:
                names[keys] = free_names(list(keys), list(columns))
            if number < num_results:
                values = dict(zip(names[keys], row.values.values(), strict=True))
                values |= zip(columns, added(number, row), strict=True)
                with naming(path):
                    file.write(json_line(row, values) + "\n")
        if number + 1 != num_results:
            raise RuntimeError(
                f"the files hold {number + 1} rows, {num_results} were predicted: a file changed "
                "meanwhile; start the prediction again."
            )


@contextmanager
def new_json_file(path: Path) -> Iterator[IO[str]]:
    """Give a file that gets its name when all went well.

    Raises:
        FileExistsError: the name is taken.
        ValueError: the suffix is unknown.
    """
    check_output(path)
    with new_text_file(path, "or name another file with --data.predict_output") as file:
        yield file
