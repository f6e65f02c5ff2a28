"""InfoNCE by hand, against a loop, and what must not count as a negative."""

import math

import pytest
import torch
import torch.nn.functional as F

from lit_models.seo.networks import Temperature, TemperatureOptions, in_batch_loss

ONE, HALF = torch.ones(()), torch.tensor(0.5, dtype=torch.float64)


def unit(*rows: tuple[float, ...]) -> torch.Tensor:
    return F.normalize(torch.tensor(rows, dtype=torch.float64), dim=1)


def test_two_queries_by_hand() -> None:
    queries = unit((1, 0), (0, 1))
    documents = unit((1, 0), (1, 1))
    total, count = in_batch_loss(
        queries,
        documents,
        documents,
        torch.tensor([10, 20]),
        torch.tensor([[10], [20]]),
        HALF,
        torch.ones(2),
    )
    a = math.sqrt(0.5)  # cosine of (1, 1) with either axis; cosines are doubled by temperature 1/2
    first = math.log(math.exp(2) + math.exp(2 * a)) - 2
    second = math.log(math.exp(2 * a) + math.exp(0)) - 2 * a
    assert float(total) == pytest.approx(first + second, rel=1e-12)
    assert float(count) == 2


def test_it_is_the_loop_over_all_documents_but_the_known_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, documents = (
        F.normalize(torch.randn(n, 6, dtype=torch.float64, generator=generator), dim=1)
        for n in (4, 12)
    )
    document = torch.tensor([0, 1, 2, 3, 1, 5, 6, 0, -1, 8, 9, 3])
    known = torch.tensor([[0, 9], [1, -1], [2, 5], [3, -1]])
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0])
    expected = 0.0
    for row in (0, 1, 3):
        scores = [float(queries[row] @ documents[row]) / 0.5]
        scores += [
            float(queries[row] @ vector) / 0.5
            for number, vector in zip(document.tolist(), documents, strict=True)
            if number != -1 and number not in known[row].tolist()
        ]
        expected += math.log(sum(map(math.exp, scores))) - scores[0]
    total, count = in_batch_loss(queries, documents[:4], documents, document, known, HALF, weight)
    assert float(total) == pytest.approx(expected, rel=1e-12)
    assert float(count) == 3


def test_a_copy_of_the_answer_and_a_known_document_change_nothing() -> None:
    queries, answers = unit((1, 0.2)), unit((1, 0))
    others = unit((0.5, 1), (1, 0), (0.9, 0.1))
    known = torch.tensor([[7, 9]])
    alone = in_batch_loss(
        queries, answers, others[:1], torch.tensor([3]), known, HALF, torch.ones(1)
    )
    with_copies = in_batch_loss(
        queries, answers, others, torch.tensor([3, 7, 9]), known, HALF, torch.ones(1)
    )
    assert float(alone.total) == float(with_copies.total)


def test_one_query_without_a_negative_has_no_loss() -> None:
    queries = unit((1, 0.2))
    known = torch.tensor([[4]])
    found = in_batch_loss(queries, queries, queries, known[0], known, HALF, torch.ones(1))
    assert float(found.total) == 0.0


@pytest.mark.parametrize("start", [0.01, 0.05, 0.9])
def test_a_temperature_begins_where_it_should_and_stays_between_its_bounds(start: float) -> None:
    temperature = Temperature(TemperatureOptions(start)).double()
    assert float(temperature().detach()) == pytest.approx(start, rel=1e-6)
    for position in (-50.0, 50.0):
        temperature.position.data.fill_(position)
        assert 0.005 - 1e-9 <= float(temperature().detach()) <= 1.0 + 1e-9
    assert not Temperature(TemperatureOptions(learns=False)).position.requires_grad


@pytest.mark.parametrize("start", [0.0, 0.001, 2.0])
def test_a_temperature_outside_its_bounds_is_refused(start: float) -> None:
    with pytest.raises(ValueError, match=r"temperature\.start must lie between 0\.005 and 1"):
        TemperatureOptions(start)


def test_a_temperature_of_a_float64_run_is_float64_before_its_checkpoint_is_read() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        temperature = Temperature(TemperatureOptions(start=0.07))
    finally:
        torch.set_default_dtype(before)
    assert temperature.position.dtype == torch.float64
    assert float(temperature().detach()) == pytest.approx(0.07, rel=1e-14)
