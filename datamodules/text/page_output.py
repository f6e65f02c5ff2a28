"""What was written for pages, as a jsonl file: each input row, in order, and more."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.files.rows import JsonRow
from datamodules.text.prompt_output import (
    COMPLETED,
    check_results,
    completed,
    write_rows,
)
from datamodules.tokenizers.text_tokenizer import TextTokenizer

Records = dict[str, Callable[[JsonRow, str], Any]]
COLUMNS = ("snippet", "num_characters", "finish_reason", "page_tokens_cut")


def write_snippets(
    rows: Iterable[JsonRow],
    results: dict[str, np.ndarray],
    path: Path,
    tokenizer: TextTokenizer,
    num_cut: np.ndarray,
    records: Records,
) -> None:
    """Write each row with what was written for it, its characters and the reason of its end.

    Args:
        rows: all rows that were predicted, in their order.
        results: see `datamodules.text.prompt_output.write_completions`.
        path: .jsonl.
        tokenizer: of the model.
        num_cut: [N] tokens at the end of a page that the model did not see.
        records: further columns: name -> what makes its value of a row and its snippet.

    Raises:
        FileExistsError: the file exists.
        ValueError: a result is missing.
        RuntimeError: there are more or fewer rows than results.
    """
    check_results(results, COMPLETED)

    def added(number: int, row: JsonRow) -> tuple[Any, ...]:
        text, reason = completed(results, number, tokenizer)
        snippet = " ".join(text.split())
        more = (record(row, snippet) for record in records.values())
        return (snippet, len(snippet), reason, int(num_cut[number]), *more)

    write_rows(rows, added, (*COLUMNS, *records), len(results["num_tokens"]), path)
