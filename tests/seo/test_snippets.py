"""The metrics of snippets against numbers worked by hand."""

import numpy as np
import pytest
import torch

from lit_models.seo.snippets import (
    Duplicates,
    SnippetMetrics,
    copy_rate,
    lead_sentence,
    rouge,
    snippet_scores,
    words,
)

BATCH = {
    "texts": ["An apple pie is old. Bake it.", "Pears are green.\nEat them", "Filler"],
    "targets": ["Old apple pie", "Green pears", "x"],
    "queries": ["apple cake", "", "x"],
    "weight": torch.tensor([1.0, 1.0, 0.0]),
}
WRITTEN = ["An apple pie", "pears " * 11, "x"]


def test_rouge_counts_words_runs_and_subsequences():
    # 2 of 3 and 4 words are shared, 1 of 2 and 3 pairs, the longest common subsequence is 2.
    scores = rouge("An apple pie", "OLD apple pie, baked")
    assert scores == pytest.approx({"rouge1": 4 / 7, "rouge2": 2 / 5, "rougeL": 4 / 7})
    assert rouge("", "x") == {"rouge1": 0, "rouge2": 0, "rougeL": 0}
    assert rouge("яблочный пирог", "Яблочный пирог")["rouge2"] == pytest.approx(1)


def test_rouge_is_that_of_torchmetrics():
    from torchmetrics.functional.text.rouge import rouge_score  # all of it is imported, 2 s

    rng = np.random.default_rng(0)
    for _ in range(60):
        said, wanted = (" ".join(rng.choice(list("abcde"), rng.integers(0, 9))) for _ in "12")
        keys = ("rouge1", "rouge2", "rougeL")
        expected = rouge_score(said, wanted, rouge_keys=keys, normalizer=str, tokenizer=words)
        assert rouge(said, wanted) == {key: float(expected[f"{key}_fmeasure"]) for key in keys}


def test_what_is_copied_is_counted_in_runs_of_three_words():
    page = words("An apple pie is old. Bake it.")
    assert copy_rate(words("an apple pie was old"), page) == pytest.approx(1 / 3)
    assert copy_rate(words("apple pie"), page) == 1  # shorter than a run
    assert copy_rate(words("pie apple"), page) == 0


def test_the_lead_sentence_is_the_first_of_the_text():
    assert lead_sentence("***\nDr. X came. He left.") == "Dr. X came."
    assert lead_sentence("--") == ""


def test_lengths_and_queries_are_rated_where_there_is_something_to_rate():
    scores = snippet_scores("x" * 60, "page", "y", "", (1, 60))
    assert scores["within_limits"].value == 1
    assert scores["query_coverage"].weight == 0
    assert snippet_scores("x" * 61, "page", "y", "", (1, 60))["within_limits"].value == 0
    nothing = snippet_scores("", "page", "y", "Apple, apple cake", (1, 60))
    assert (nothing["within_limits"].value, nothing["copy_rate"].weight) == (0, 0)
    half = snippet_scores("apples or Apple", "page", "y", "Apple, apple cake", (1, 60))
    assert half["query_coverage"].value == 0.5


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_mean_is_over_pages_whoever_had_them(num_ranks):
    ranks = [SnippetMetrics("title") for _ in range(num_ranks)]
    for i in range(3):
        one = {name: values[i : i + 1] for name, values in BATCH.items()}
        ranks[i % num_ranks].add_batch(WRITTEN[i : i + 1], one)
    got = {}
    for name, metric in ranks[0].items():
        for other in (rank[name] for rank in ranks[1:]):
            for state in metric._reductions:
                setattr(metric, state, getattr(metric, state) + getattr(other, state))
        got[name] = float(metric.compute())
    assert got["within_limits"] == 0.5  # 12 and 66 characters, and the filler counts nowhere
    assert got["characters"] == (12 + 66) / 2
    assert got["rouge1"] == pytest.approx((4 / 6 + 2 / 13) / 2)
    assert got["query_coverage"] == 0.5  # one page has a query
    assert got["copy_rate"] == 0.5
    assert got["lead_rouge1"] == pytest.approx((2 * 3 / 8 + 2 * 2 / 5) / 2)
    assert got["lead_characters"] == (20 + 16) / 2
    assert got["duplicates"] == got["lead_duplicates"] == 0


def test_duplicates_count_all_that_are_equal():
    metric = Duplicates()
    metric.update(["filler"], torch.zeros(1))
    assert metric.compute() == 0
    metric.update(["A  b", "c", "filler"], torch.tensor([1.0, 1.0, 0.0]))
    metric.update(["a B", "a b", "filler"], torch.ones(3))
    assert metric.compute() == pytest.approx(3 / 5)


def test_descriptions_have_limits_of_their_own():
    metrics = SnippetMetrics("description")
    metrics.add_batch(["x" * 70, "x" * 69, "x"], BATCH)
    assert metrics["within_limits"].compute() == 0.5
