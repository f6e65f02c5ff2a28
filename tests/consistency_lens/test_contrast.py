"""The contrastive reward: its wrong activations, its values, and its policy gradient."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datamodules import ActivationDataModule
from datamodules.activations.datamodule import WrongOnes
from lit_models.consistency_lens.loss import LensLosses, LossWeight, check_phases, contrast, reward
from tests.activation_dumps import dumped, stories, subject
from tests.consistency_lens.small_lens import fitted, lens_module, story_data
from tests.consistency_lens.tiny import activations, lens_of, moved
from tests.toy import ledger_lines

LOSSES = LensLosses(
    teacher_text=LossWeight(1.0, end=2),
    teacher_reconstruction=LossWeight(1.0, end=2),
    reconstruction=LossWeight(1.0, begin=2),
    contrast=LossWeight(1.0, begin=3),
)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60))
def test_wrong_ones_are_other_samples_at_the_same_token(tokens):
    tokens, numbers = np.array(tokens), np.arange(len(tokens))
    wrong, keys = WrongOnes(tokens, 6), numbers.astype(np.uint64) * 77
    found = wrong.of(numbers, keys)
    assert (tokens[found] == tokens[:, None]).all()
    alone = np.bincount(tokens)[tokens] == 1
    assert ((found == numbers[:, None]).any(1) == alone).all()
    some = numbers[::-2]
    assert (wrong.of(some, keys[some]) == found[some]).all()


def test_every_other_sample_is_drawn_equally_often():
    wrong = WrongOnes(np.array([7, 3, 7, 7, 3, 7]), 2)
    found = wrong.of(np.full(3000, 2), np.arange(3000, dtype=np.uint64) << np.uint64(20))
    counts = np.bincount(found.ravel(), minlength=6)
    assert counts[[1, 2, 4]].tolist() == [0, 0, 0]
    assert abs(counts[[0, 3, 5]] - 2000).max() < 150  # 4 deviations


@torch.no_grad()
def test_a_reward_is_the_right_cosine_less_those_of_wrong_ones():
    lens = moved(lens_of())
    lens.mean.copy_(activations(9)[8])
    words = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8]])
    wrong = torch.randn(3, 2, 16, generator=torch.manual_seed(3)).double()
    found = reward(lens, words, activations(), wrong)

    def cosine(a, b):
        return float(a @ b / (a.norm() * b.norm()))

    for row in range(3):
        made = lens.reference["reconstructor"](lens.words(words[[row]]))[0] - lens.mean
        right = cosine(made, activations()[row] - lens.mean)
        others = [cosine(made, one - lens.mean) for one in wrong[row]]
        assert float(found[row]) == pytest.approx(right - sum(others) / 2)


def test_the_policy_gradient_is_that_of_the_expected_reward():
    """With texts of one word, the expectation is a sum over the vocabulary."""
    lens = moved(lens_of(num_words=1), 0.3)
    activation, number = activations(1), 1500
    wrong = torch.randn(1, 3, 16, generator=torch.manual_seed(3)).double()
    learner = lens.requires_grad_(False).verbalizer.map_bias.requires_grad_()
    batch = {"noise_key": torch.arange(number) * 1001, "wrong": wrong.expand(number, -1, -1)}
    found = contrast(lens, batch, activation.expand(number, -1))  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(found.mean(), learner)

    every = torch.arange(lens.verbalizer.is_word.shape[0])[:, None]
    chances = lens.verbalizer(activation, every[:1])[0, 0].softmax(-1)
    rewards = reward(
        lens, every, activation.expand(len(every), -1), wrong.expand(len(every), -1, -1)
    )
    expected = (chances * rewards.detach()).sum()
    (exact,) = torch.autograd.grad(-expected, learner)
    assert found.mean().item() == pytest.approx(-expected.item(), abs=0.02)
    assert (gradient - exact).norm() < 0.2 * exact.norm()


@pytest.mark.slow
def test_the_wrong_ones_of_a_step_do_not_depend_on_how_it_is_cut(tmp_path):
    of = subject()
    dumped(tmp_path / "store", stories(tmp_path, 60), of)
    pieces = ({"micro_batch_size": 16}, {"micro_batch_size": 4})
    runs = []
    for number, options in enumerate(pieces):
        data = ActivationDataModule(str(tmp_path / "store"), global_batch_size=16, **options)
        fitted(tmp_path / str(number), lens_module(of, LOSSES), data, max_steps=5)
        runs.append([line["terms"] for line in ledger_lines(tmp_path / str(number))])
        assert data.datasets["train"].batch(np.arange(2), 0)["wrong"].shape == (2, 7, 16)
    assert [set(one) for one in runs[0]][2:] == [{"reconstruction"}] + [
        {"reconstruction", "contrast"}
    ] * 2
    for one, other in zip(*runs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_a_contrast_without_a_store_or_before_the_reference_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"losses.contrast takes wrong activations from a store"):
        fitted(tmp_path / "run", lens_module(losses=LOSSES), story_data(tmp_path), max_steps=1)
    early = LensLosses(reconstruction=LossWeight(1.0, begin=2), contrast=LossWeight(1.0, begin=1))
    with pytest.raises(ValueError, match=r"losses.contrast begins at step 1, but the reference"):
        check_phases(LensLosses(**{**vars(early), "teacher_text": LossWeight(1.0, end=2)}), 9)
