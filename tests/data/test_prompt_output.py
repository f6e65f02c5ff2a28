"""Completions and scores out: which columns, in which order, over no file that is there."""

import datetime
import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from datamodules.files.rows import JsonRow
from datamodules.text.prompts import check_output, write_completions, write_scores
from datamodules.tokenizers.trained import byte_tokenizer

TOKENIZER = byte_tokenizer()


def rows_of(rows: list[dict]) -> list[JsonRow]:
    return [JsonRow(Path("mine.jsonl"), line, row) for line, row in enumerate(rows, start=1)]


def results_of(texts: list[str]) -> dict[str, np.ndarray]:
    ids = np.full((len(texts), 9), -1)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = TOKENIZER.encode(text)
    lengths = np.array([len(text) for text in texts])
    reasons = np.arange(len(texts)) % 4
    return {
        "completion_ids": ids,
        "num_tokens": lengths,
        "num_characters": np.maximum(lengths - 1, 0),
        "finish_reason": reasons,
    }


def test_completions_stand_in_the_rows_that_asked_for_them(tmp_path, caplog):
    rows = rows_of([{"prompt": "ä", "num_tokens": 3}, {"id": [1], "prompt": "b"}])
    out = tmp_path / "new" / "out.jsonl"
    num_cut = np.array([0, 4])
    write_completions(rows, results_of(["one.", ""]), out, TOKENIZER, num_cut)
    assert [json.loads(line) for line in out.read_text("utf-8").splitlines()] == [
        {"prompt": "ä", "input_num_tokens": 3, "completion": "one", "num_tokens": 4}
        | {"finish_reason": "end", "prompt_tokens_cut": 0},
        {"id": [1], "prompt": "b", "completion": "", "num_tokens": 0}
        | {"finish_reason": "stop", "prompt_tokens_cut": 4},
    ]
    assert 'column "num_tokens" is written as "input_num_tokens"' in caplog.text
    assert "ä" in out.read_text("utf-8")  # as it was written, not as an escape
    with pytest.raises(FileExistsError, match=r"out.jsonl exists and is not overwritten"):
        write_completions(rows, results_of(["a", "b"]), out, TOKENIZER, num_cut)


def test_scores_are_lists_with_the_place_of_the_best(tmp_path):
    rows = rows_of([{"prompt": "a", "choices": ["b", "c"]}, {"continuation": "d"}])
    results = {
        "scores": np.array([[-3.5, -1.25], [-2.0, np.nan]]),
        "num_tokens": np.array([[2, 1], [1, 0]]),
        "is_greedy": np.array([[False, True], [False, False]]),
    }
    write_scores(rows, results, tmp_path / "out.jsonl", np.zeros(2, np.int64))
    first, second = map(json.loads, (tmp_path / "out.jsonl").read_text("utf-8").splitlines())
    assert (first["scores"], first["num_tokens"]) == ([-3.5, -1.25], [2, 1])
    assert (first["is_greedy"], first["best"]) == ([False, True], 1)
    assert (second["scores"], second["best"], second["prompt_tokens_cut"]) == ([-2.0], 0, 0)


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_file_that_changed_meanwhile_is_not_written(tmp_path, num_rows):
    rows = rows_of([{"prompt": "a"}] * num_rows)
    with pytest.raises(RuntimeError, match=f"the files hold {num_rows} rows, 2 were predicted"):
        write_completions(
            rows, results_of(["a", "b"]), tmp_path / "o.jsonl", TOKENIZER, np.zeros(2)
        )
    assert not list(tmp_path.iterdir())


def test_results_of_another_step_are_refused(tmp_path):
    with pytest.raises(ValueError, match="predict_step must return scores, num_tokens, is_greedy"):
        write_scores([], results_of(["a"]), tmp_path / "out.jsonl", np.zeros(1))
    with pytest.raises(ValueError, match=r'out.csv ends in ".csv"; name a file in .jsonl or'):
        check_output(tmp_path / "out.csv")


def test_values_that_json_does_not_know(tmp_path):
    values = {"day": datetime.date(2024, 2, 29), "price": Decimal("1.50"), "prompt": "a"}
    row = JsonRow(tmp_path / "mine.parquet", 1, values)
    write_completions(
        [row], results_of(["b"]), tmp_path / "out.jsonl", TOKENIZER, np.zeros(1, np.int64)
    )
    got = json.loads((tmp_path / "out.jsonl").read_text("utf-8"))
    assert (got["day"], got["price"]) == ("2024-02-29", "1.50")
