"""What a language model made of prompts, as a jsonl file: each input row, in order, and more.

Shapes: N rows, M most tokens of a completion, C most choices of a row.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import IO, Any

import numpy as np

from datamodules.files.rows import HALF_RULE, JSON_SUFFIXES, JsonRow, half_character
from datamodules.files.tables import free_names, naming, new_text_file
from datamodules.tokenizers.text_tokenizer import TextTokenizer

FINISH_REASONS = ("end", "stop", "length", "positions")
NO_TOKEN = -1
COMPLETED = ("completion_ids", "num_tokens", "num_characters", "finish_reason")
COMPLETED_COLUMNS = ("completion", "num_tokens", "finish_reason", "prompt_tokens_cut")
SCORED = ("scores", "num_tokens", "is_greedy")
SCORED_COLUMNS = (*SCORED, "best", "prompt_tokens_cut")


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
        results: scores [N, C] in nats, NaN where a row has fewer choices, num_tokens [N, C] and
            is_greedy [N, C].
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
