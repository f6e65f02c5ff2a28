"""Metrics of snippets against hand-worked numbers."""

import math

import pytest
import torch

from lit_models.seo.writer import SnippetRows, snippet_scores

BATCH = {
    "texts": ["An apple pie is old. Bake it.", "Pears are green.\nEat them", "Filler"],
    "targets": ["Old apple pie", "Green pears", "x"],
    "queries": ["apple cake", "", "x"],
    "sample_id": torch.arange(3),
    "weight": torch.tensor([1.0, 1.0, 0.0]),
}
WRITTEN = ["An apple pie", "pears " * 11, "x"]


def scores_of(output, text="page", target="y", query=""):
    return snippet_scores(output, text, target, query, (1, 60))


def values_of(output, target):
    scores = scores_of(output, target=target)
    return {name: scores[name] for name in ("rouge1", "rouge2", "rougeL")}


def test_rouge_counts_words_runs_and_subsequences():
    # Shared: 2 of 3 and 4 words, 1 of 2 and 3 pairs; the longest common subsequence is 2.
    scores = values_of("An apple pie", "OLD apple pie, baked")
    assert scores == pytest.approx({"rouge1": 4 / 7, "rouge2": 2 / 5, "rougeL": 4 / 7})
    assert values_of("", "x") == {"rouge1": 0, "rouge2": 0, "rougeL": 0}
    assert values_of("яблочный пирог", "Яблочный пирог")["rouge2"] == pytest.approx(1)


def test_what_is_copied_is_counted_in_runs_of_three_words():
    page = "An apple pie is old. Bake it."
    assert scores_of("an apple pie was old", page)["copy_rate"] == pytest.approx(1 / 3)
    assert scores_of("apple pie", page)["copy_rate"] == 1  # shorter than a run
    assert scores_of("pie apple", page)["copy_rate"] == 0


def test_lengths_and_queries_are_rated_where_there_is_something_to_rate():
    scores = scores_of("x" * 60)
    assert scores["within_limits"] == 1
    assert math.isnan(scores["query_coverage"])
    assert scores_of("x" * 61)["within_limits"] == 0
    nothing = scores_of("", query="Apple, apple cake")
    assert nothing["within_limits"] == 0
    assert math.isnan(nothing["copy_rate"])
    assert scores_of("apples or Apple", query="Apple, apple cake")["query_coverage"] == 0.5


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_means_over_pages_are_equal_on_any_number_of_ranks(num_ranks):
    ranks = [SnippetRows("title") for _ in range(num_ranks)]
    for i in range(3):
        one = {name: values[i : i + 1] for name, values in BATCH.items()}
        ranks[i % num_ranks].add_batch(WRITTEN[i : i + 1], one)
    for name in ranks[0].names:
        setattr(ranks[0], name, [rows for rank in ranks for rows in getattr(rank, name)])
    got = {name: float(mean) for name, mean in ranks[0].means().items()}
    assert got["within_limits"] == 0.5  # 12 and 66 characters; the filler does not count
    assert got["characters"] == (12 + 66) / 2
    assert got["rouge1"] == pytest.approx((4 / 6 + 2 / 13) / 2)
    assert got["query_coverage"] == 0.5  # one page has a query
    assert got["copy_rate"] == 0.5
    assert got["lead_rouge1"] == pytest.approx((2 * 3 / 8 + 2 * 2 / 5) / 2)
    assert got["lead_characters"] == (20 + 16) / 2
    assert got["duplicates"] == got["lead_duplicates"] == 0


def test_duplicates_count_all_that_are_equal():
    rows = SnippetRows("title")
    rows.add_batch(["A  b", "c", "filler"], BATCH)
    rows.add_batch(["a B", "a b", "filler"], {**BATCH, "weight": torch.ones(3)})
    assert rows.means()["duplicates"] == pytest.approx(3 / 5)


def test_descriptions_have_limits_of_their_own():
    rows = SnippetRows("description")
    rows.add_batch(["x" * 70, "x" * 69, "x"], BATCH)
    assert rows.means()["within_limits"] == 0.5
