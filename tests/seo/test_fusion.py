"""Two rankings as one, by hand."""

import pytest
import torch

from lit_models.seo.retriever import Fusion, fused, unit_range


def test_scores_are_brought_to_one_range_per_query() -> None:
    scores = torch.tensor([[0.8, 0.4, 0.2], [5.0, 3.0, 0.0], [2.0, 2.0, 2.0]])
    is_there = torch.tensor([[True, True, True], [True, True, False], [True, True, True]])
    own = unit_range(scores, is_there, is_open=False)
    torch.testing.assert_close(own[0], torch.tensor([1, 1 / 3, 0], dtype=torch.float64))
    torch.testing.assert_close(own[1], torch.tensor([1, 0, 0], dtype=torch.float64))
    torch.testing.assert_close(own[2], torch.ones(3, dtype=torch.float64))
    words = unit_range(scores, is_there, is_open=True)  # the second ranking ended at 0
    torch.testing.assert_close(words[1], torch.tensor([1, 0.6, 0], dtype=torch.float64))


def test_a_document_of_both_rankings_has_the_sum_of_both() -> None:
    documents, scores = torch.tensor([[7, 2, 5]]), torch.tensor([[0.9, 0.5, 0.1]])
    first, first_scores = torch.tensor([[5, 9, -1]]), torch.tensor([[4.0, 1.0, 0.0]])
    found, values = fused(documents, scores, first, first_scores, weight=0.25)
    pairs = {d: v for d, v in zip(found[0].tolist(), values[0].tolist(), strict=True) if d >= 0}
    assert pairs == pytest.approx({7: 0.75, 2: 0.75 * 0.5, 5: 0.25, 9: 0.25 * 0.25})
    assert (found[0] >= 0).sum() == 4


def test_a_weight_of_nothing_or_all_keeps_one_ranking() -> None:
    documents, scores = torch.tensor([[3, 1, 2]]), torch.tensor([[0.9, 0.8, 0.1]])
    first, first_scores = torch.tensor([[2, 3, 4]]), torch.tensor([[9.0, 4.0, 1.0]])
    for weight, expected in ((0.0, [3, 1]), (1.0, [2, 3])):
        found, values = fused(documents, scores, first, first_scores, weight)
        order = values.masked_fill(found < 0, -1).argsort(dim=1, descending=True)[0, :2]
        assert found[0, order].tolist() == expected


def test_the_depth_of_a_ranking_changes_nothing_but_what_follows() -> None:
    documents = torch.tensor([[3, 1, 2, 7, 6, 5], [1, 2, 3, 4, -1, -1]])
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.2, 0.1, 0.0], [0.9, 0.5, 0.1, 0.0, 0.0, 0.0]])
    first, first_scores = torch.tensor([[2, 6, -1], [9, -1, -1]]), torch.ones(2, 3)
    shallow = fused(documents[:, :3], scores[:, :3], first, first_scores, 0.5)
    found, values = fused(documents, scores, first, first_scores, 0.5)
    # 3 and 2 have 0.5 each, 6 of BM25 alone too; 1 has 0.25; 7 and 5 lie deeper.
    assert found.tolist()[0] == [2, 3, 6, 1, 7, 5, -1, -1, -1]
    assert found.tolist()[1] == [1, 9, 2, 3, 4, -1, -1, -1, -1]
    assert values[0].tolist() == pytest.approx([0.5, 0.5, 0.5, 0.25, -1, -3] + [-torch.inf] * 3)
    assert torch.equal(found[:, :3], shallow[0][:, :3])
    assert torch.equal(values[:, :3], shallow[1][:, :3])


def test_a_weight_outside_its_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fusion\.weight must be 0 to 1, got 1\.5"):
        Fusion(1.5)
