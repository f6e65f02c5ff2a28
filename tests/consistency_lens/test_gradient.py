"""Which networks a step moves, and noise that belongs to the sample."""

import pytest
import torch

from lit_models.consistency_lens.loss import LensLosses, LossWeight, check_phases, leaves_one_idle
from lit_models.training.checkpoints import read_checkpoint
from tests.consistency_lens.small_lens import BOTH, documents, fitted, lens, trainer
from tests.distributed.lens_jobs import JOINT, WARM

WAITS = LensLosses(
    teacher_reconstruction=LossWeight(1.0, end=1),
    teacher_text=LossWeight(1.0, end=3),
    reconstruction=LossWeight(1.0, begin=3),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return a module and its data, set up as for a test."""
    folder = tmp_path_factory.mktemp("built")
    module, data = lens(losses=JOINT), documents(folder)
    trainer(folder / "run", limit_test_batches=1).test(module, data, verbose=False)
    data.setup("fit")
    return module, data


def test_a_sample_draws_the_same_words_whatever_is_beside_it(built):
    module, data = built
    dataset = data.datasets["train"]

    def words(numbers: list[int]) -> torch.Tensor:
        batch = dataset.collate([dataset.example(number, 0) for number in numbers])
        activation = module.lens.activation(batch)
        with torch.no_grad():
            return module.lens.verbalizer.explain(activation, batch["noise_key"], 0.7).token_ids

    together = words([5, 2, 9, 7, 11, 3])
    assert torch.equal(words([9]), together[2:3])
    assert torch.equal(words([3, 7]), together[[5, 3]])
    assert not torch.equal(words([9]), words([7]))


def test_another_epoch_draws_other_noise(built):
    dataset = built[1].datasets["train"]
    keys = [dataset.collate([dataset.example(4, epoch)])["noise_key"] for epoch in (0, 0, 1)]
    assert torch.equal(keys[0], keys[1])
    assert not torch.equal(keys[0], keys[2])


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


@pytest.mark.parametrize(
    ("losses", "expected"),
    [(WARM, False), (JOINT, False), (BOTH, False), (WAITS, True)],
)
def test_a_recipe_says_whether_a_network_ever_waits(losses, expected):
    assert leaves_one_idle(losses) is expected
    assert lens(losses=losses).reaches_all_parameters is not expected


def test_the_fluency_alone_leaves_the_reconstructor_idle():
    assert leaves_one_idle(LensLosses(fluency=LossWeight(1.0)))
    assert leaves_one_idle(LensLosses(teacher_reconstruction=LossWeight(1.0)))
    assert not leaves_one_idle(LensLosses(effect=LossWeight(1.0)))


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
