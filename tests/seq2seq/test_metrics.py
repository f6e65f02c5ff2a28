"""Scores of generated targets equal sacrebleu's, for sums over any parts."""

import pytest
import torch

from lit_models.seq2seq.metrics import WrittenMetrics

TEXTS = ["the baker's old wife", "smed og husmand", "", "shoe maker, retired.", "wool weaver", "x"]
TARGETS = ["the baker's wife", "smed og husmand", "tailor", "shoemaker", "a weaver of wool", "x"]


def scores_of(texts, targets, weights=None):
    metrics = WrittenMetrics()
    for first in range(0, len(texts), 2):
        part = slice(first, first + 2)
        weight = torch.ones(len(texts[part])) if weights is None else weights[part]
        metrics.add_batch(texts[part], targets[part], weight)
    return {name: float(metric.compute()) for name, metric in metrics.items()}


def test_scores_of_a_split_are_those_of_all_its_texts_at_once():
    from sacrebleu.metrics import BLEU, CHRF

    found = scores_of(TEXTS, TARGETS)
    assert found["exact_match"] == 2 / 6
    assert found["chrf"] == pytest.approx(CHRF().corpus_score(TEXTS, [TARGETS]).score, abs=1e-9)
    assert found["bleu"] == pytest.approx(BLEU().corpus_score(TEXTS, [TARGETS]).score, abs=1e-9)


def test_fillers_count_nowhere():
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    found = scores_of([*TEXTS, "so", "no"], [*TARGETS, "so", "yes"], weights)
    assert found == scores_of(TEXTS, TARGETS)


RIGHT = "one two three four"


@pytest.mark.parametrize(
    ("text", "target", "score"), [(RIGHT, RIGHT, 100.0), (RIGHT, "xyz", 0.0), ("", RIGHT, 0.0)]
)
def test_all_right_is_100_and_all_wrong_is_0(text, target, score):
    found = scores_of([text], [target])
    assert found["chrf"] == pytest.approx(score, abs=1e-9)
    assert found["bleu"] == pytest.approx(score, abs=1e-9)
