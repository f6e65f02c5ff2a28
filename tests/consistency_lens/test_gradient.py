"""Which networks a step moves."""

import pytest
import torch

from lit_models.consistency_lens.loss import LensLosses, LossWeight, check_phases, leaves_one_idle
from lit_models.training.checkpoints import read_checkpoint
from tests.consistency_lens.small_lens import BOTH, JOINT, WARM, documents, fitted, lens

WAITS = LensLosses(
    teacher_reconstruction=LossWeight(1.0, end=1),
    teacher_text=LossWeight(1.0, end=3),
    reconstruction=LossWeight(1.0, begin=3),
)


def test_a_network_without_a_term_stands_still_in_spite_of_momentum(tmp_path):
    states = []
    for steps in (1, 3):
        path = fitted(
            tmp_path / str(steps), lens(losses=WAITS), documents(tmp_path), max_steps=steps
        )
        states.append(read_checkpoint(path)["state_dict"])
    for name, value in states[0].items():
        is_same = torch.equal(value, states[1][name])
        assert is_same == ("lens.verbalizer." not in name), name


ONE = LossWeight(1.0)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        *((losses, False) for losses in (WARM, JOINT, BOTH, LensLosses(effect=ONE))),
        *((WAITS, True), (LensLosses(fluency=ONE), True)),
        (LensLosses(teacher_reconstruction=ONE), True),
    ],
)
def test_a_recipe_says_whether_a_network_ever_waits(losses, expected):
    assert leaves_one_idle(losses) is expected
    assert lens(losses=losses).reaches_all_parameters is not expected


def test_a_run_with_nothing_to_learn_at_some_step_is_refused(tmp_path):
    ends = LensLosses(reconstruction=LossWeight(1.0, end=2))
    check_phases(ends, 2)
    with pytest.raises(ValueError, match=r"no term of losses counts from step 2 on, and .* 3 st"):
        check_phases(ends, 3)
    with pytest.raises(ValueError, match="no end"):
        check_phases(ends, None)
    with pytest.raises(ValueError, match="counts from step 2 on"):
        fitted(tmp_path / "run", lens(losses=ends), documents(tmp_path), max_steps=3)


def test_a_reference_that_is_not_kept_yet_is_refused():
    early = LensLosses(
        teacher_text=LossWeight(1.0),
        reconstruction=LossWeight(1.0, begin=4),
        reference=LossWeight(0.1, begin=3),
    )
    with pytest.raises(ValueError, match=r"reference begins at step 3, .* together, at step 4"):
        check_phases(early, 10)
    never = LensLosses(teacher_text=LossWeight(1.0), reference=LossWeight(0.1, begin=9))
    with pytest.raises(ValueError, match=r"reference begins at step 9, .* never do here"):
        check_phases(never, 10)
