"""Schedules in optimizer steps, worked by hand."""

import pytest

from lit_models.consistency_lens.loss import LensLosses, LossWeight, TemperatureSchedule


def test_a_weight_counts_from_its_first_step_to_before_its_last() -> None:
    weight = LossWeight(2.0, begin=3, end=6)
    assert [weight.at(step) for step in range(8)] == [0, 0, 0, 2, 2, 2, 0, 0]
    assert [LossWeight(0.5).at(step) for step in (0, 10**6)] == [0.5, 0.5]


def test_a_temperature_falls_in_a_straight_line_and_stays() -> None:
    temperature = TemperatureSchedule(1.0, 0.5, begin=10, until=20)
    found = [temperature.at(step) for step in (0, 10, 11, 15, 20, 99)]
    assert found == pytest.approx([1, 1, 0.95, 0.75, 0.5, 0.5])


def test_losses_name_what_counts_at_a_step() -> None:
    losses = LensLosses(
        teacher_text=LossWeight(1.0, end=4),
        reconstruction=LossWeight(2.0, begin=4),
        fluency=LossWeight(0.1, begin=6),
    )
    assert losses.at(3) == {"teacher_text": 1.0}
    assert losses.at(4) == {"reconstruction": 2.0}
    assert losses.at(6) == {"reconstruction": 2.0, "fluency": 0.1}
    assert losses.joint_start == 4


def test_joint_learning_starts_with_the_first_weighted_term_of_both_networks() -> None:
    warm = {"teacher_text": LossWeight(1.0)}
    early, late = LossWeight(0.5, begin=2), LossWeight(1.0, begin=5)
    assert LensLosses(**warm, effect=early).joint_start == 2
    assert LensLosses(**warm, reconstruction=late, effect=early).joint_start == 2
    without = LossWeight(0.0, begin=1)
    assert LensLosses(**warm, reconstruction=without, effect=late).joint_start == 5
    assert LensLosses(**warm, fluency=early).joint_start is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LossWeight(-1.0), "must be 0 or more, got -1.0 and 0"),
        (lambda: LossWeight(1.0, begin=5, end=5), "from step 5 on cannot end at step 5; give a"),
        (
            lambda: TemperatureSchedule(end=0.0),
            "must be above 0, got 1.0 and 0.0; usual is 1 to 0.5",
        ),
        (
            lambda: TemperatureSchedule(begin=9, until=9),
            "temperature.begin 9 must be .* below .*until 9",
        ),
        (LensLosses, "every weight of losses is 0, so there is nothing to learn; give one"),
    ],
)
def test_impossible_schedules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
