"""The loss: its terms by hand, their schedules, and the networks that they train; the contrastive
reward, its wrong activations and its policy gradient."""

from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datamodules import ActivationDataModule
from datamodules.activations.datamodule import WrongOnes
from lit_models.consistency_lens import loss
from lit_models.consistency_lens.lens import IMPOSSIBLE
from lit_models.consistency_lens.loss import (
    LensLosses,
    LossWeight,
    TeacherText,
    check_phases,
    contrast,
    effect,
    leaves_one_idle,
    lens_terms,
    reward,
)
from lit_models.run_files import read_checkpoint
from tests.activation_dumps import dumped, stories, subject
from tests.consistency_lens.small_lens import BOTH, JOINT, WARM, fitted, lens_module, story_data
from tests.consistency_lens.tiny import activations, documents, effects, lens_of, moved
from tests.toy import ledger_lines

HALF, FOURTH = [log(0.5), log(0.5)], [log(0.25), log(0.75)]


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)[None]  # [1, t, V]


def test_text_nats_are_means_over_words():
    found = loss.text_nats(logits(HALF, FOURTH), torch.tensor([[0, 1]]))
    assert float(found) == pytest.approx(-(log(0.5) + log(0.75)) / 2)


def test_divergence_is_a_mean_over_words_from_the_first_to_the_second():
    found = loss.divergence(logits(HALF, FOURTH), logits(FOURTH, FOURTH))
    first = 0.5 * log(0.5 / 0.25) + 0.5 * log(0.5 / 0.75)
    assert float(found) == pytest.approx(first / 2)
    sure, other = logits([0.0, IMPOSSIBLE]), logits([IMPOSSIBLE, 0.0])
    assert float(loss.divergence(sure, other)) == loss.MAX_NATS


def test_the_gradient_of_a_divergence_is_there_where_a_word_is_impossible():
    own = logits([log(0.25), log(0.75)]).requires_grad_()
    found = loss.divergence(own, logits([0.0, -1000.0]))
    away = (log(0.25), log(0.75) + loss.MAX_NATS)  # of each word; the second word is cut off
    nats = 0.25 * away[0] + 0.75 * away[1]
    assert found.tolist() == pytest.approx([nats])
    (gradient,) = torch.autograd.grad(found.sum(), own)
    expected = [0.25 * (away[0] - nats), 0.75 * (away[1] - nats)]  # p (away - mean away)
    assert gradient[0, 0].tolist() == pytest.approx(expected)
    assert expected[1] > 9


def test_effect_ends_before_the_documents_last_word_and_8_places_behind_the_position():
    lens = moved(lens_of())
    ids, lengths = documents((14, 14, 6))
    position = torch.tensor([1, 9, 4])  # places 1 to 9, 9 to 12, and 4 alone
    batch = {"input_ids": ids, "lengths": lengths, "position": position}
    rebuilt = activations().requires_grad_()
    found = effect(lens, {**batch, "noise_key": position}, rebuilt)
    nats = effects(lens.subject, ids, position, rebuilt)
    expected = [nats[0, 1:10].mean(), nats[1, 9:13].mean(), nats[2, 4]]
    torch.testing.assert_close(found, torch.stack(expected))
    (gradient,) = torch.autograd.grad(found.sum(), rebuilt)
    (whole,) = torch.autograd.grad(torch.stack(expected).sum(), rebuilt)
    torch.testing.assert_close(gradient, whole)
    assert (gradient.abs().amax(1) > 0).all()


def batch_on(lens):
    ids, lengths = documents()
    batch = {"input_ids": ids, "lengths": lengths, "position": torch.tensor([3, 9, 2])}
    wrong = torch.randn(3, 5, 16, dtype=torch.float64, generator=torch.manual_seed(6))
    return {**batch, "noise_key": torch.tensor([1, 2, 3]), "wrong": wrong}


def terms(lens, names, batch=None):
    batch = batch or batch_on(lens)
    return lens_terms(lens, batch, activations(), set(names), 0.8, TeacherText())


def test_the_term_of_each_name_is_what_its_definition_says():
    lens = moved(lens_of())
    found, batch = terms(lens, loss.TERMS), batch_on(lens)
    assert tuple(found) == loss.TERMS
    own = lens.verbalizer.explain(activations(), batch["noise_key"], 0.8)
    rebuilt = lens.reconstructor(own.embeddings)
    expected = {
        "reconstruction": (rebuilt - activations()).square().mean(-1) / lens.variance,
        "fluency": loss.divergence(own.logits, lens.language_logits(own.token_ids)),
    }
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    nats = effects(lens.subject, batch["input_ids"], batch["position"], rebuilt)
    means = [nats[0, 3:8].mean(), nats[1, 9:11].mean(), nats[2, 2:6].mean()]  # of 9, 12 and 7 words
    torch.testing.assert_close(found["effect"], torch.stack(means))


def test_a_term_of_one_sample_is_the_same_alone_and_only_what_is_asked_for_is_computed():
    lens = moved(lens_of())
    batch = batch_on(lens)
    together = terms(lens, loss.TERMS)
    one = {name: values[[1]] for name, values in batch.items()}
    alone = lens_terms(lens, one, activations()[[1]], set(loss.TERMS), 0.8, TeacherText())
    for name, values in together.items():
        torch.testing.assert_close(alone[name][0], values[1], rtol=1e-9, atol=1e-9)
    assert set(terms(lens, ["fluency"])) == {"fluency"}


def test_the_reference_is_free_until_the_networks_move():
    lens = moved(lens_of())
    lens.keep_reference()
    torch.testing.assert_close(terms(lens, ["reference"])["reference"], torch.zeros(3).double())
    assert (terms(moved(lens), ["reference"])["reference"] > 1e-4).all()


def test_no_term_gives_the_subject_a_gradient_and_each_reaches_its_network():
    lens = moved(lens_of())
    for name, values in terms(lens, loss.TERMS).items():
        lens.zero_grad()
        values.sum().backward(retain_graph=True)
        reached = {part for part in ("verbalizer", "reconstructor") if _has_gradient(lens, part)}
        both = name in ("reconstruction", "effect")
        wanted = {"verbalizer", "reconstructor"} if both else {"verbalizer"}
        assert reached == ({"reconstructor"} if name == "teacher_reconstruction" else wanted), name
        assert not any(_has_gradient(lens, part) for part in ("subject", "reference"))


def _has_gradient(lens, part):
    own = getattr(lens, part).parameters()
    return any(p.grad is not None and bool(p.grad.abs().max() > 0) for p in own)


def test_a_weight_counts_from_its_first_step_to_before_its_last():
    weight = LossWeight(2.0, begin=3, end=6)
    assert [weight.at(step) for step in range(8)] == [0, 0, 0, 2, 2, 2, 0, 0]
    assert [LossWeight(0.5).at(step) for step in (0, 10**6)] == [0.5, 0.5]


def test_joint_learning_starts_with_the_first_weighted_term_of_both_networks():
    warm = {"teacher_text": LossWeight(1.0)}
    early, late = LossWeight(0.5, begin=2), LossWeight(1.0, begin=5)
    assert LensLosses(**warm, effect=early).joint_start == 2
    assert LensLosses(**warm, reconstruction=late, effect=early).joint_start == 2
    without = LossWeight(0.0, begin=1)
    assert LensLosses(**warm, reconstruction=without, effect=late).joint_start == 5
    assert LensLosses(**warm, fluency=early).joint_start is None


WAITS = LensLosses(
    teacher_reconstruction=LossWeight(1.0, end=1),
    teacher_text=LossWeight(1.0, end=3),
    reconstruction=LossWeight(1.0, begin=3),
)


def test_a_network_without_a_term_stands_still_in_spite_of_momentum(tmp_path):
    states = []
    for steps in (1, 3):
        path = fitted(
            tmp_path / str(steps), lens_module(losses=WAITS), story_data(tmp_path), max_steps=steps
        )
        states.append(read_checkpoint(path)["state_dict"])
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]) == ("lens.verbalizer." not in name), name


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
    assert lens_module(losses=losses).reaches_all_parameters is not expected


def test_a_run_with_nothing_to_learn_at_some_step_is_refused(tmp_path):
    ends = LensLosses(reconstruction=LossWeight(1.0, end=2))
    check_phases(ends, 2)
    with pytest.raises(ValueError, match="no term of losses counts from step 0 on"):
        check_phases(LensLosses(), 1)
    with pytest.raises(ValueError, match=r"no term of losses counts from step 2 on, and .* 3 st"):
        check_phases(ends, 3)
    with pytest.raises(ValueError, match="no end"):
        check_phases(ends, None)
    with pytest.raises(ValueError, match="counts from step 2 on"):
        fitted(tmp_path / "run", lens_module(losses=ends), story_data(tmp_path), max_steps=3)


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


CONTRAST = replace(BOTH, reference=LossWeight(), contrast=LossWeight(1.0, begin=3))


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
        fitted(tmp_path / str(number), lens_module(of, CONTRAST), data, max_steps=5)
        runs.append([line["terms"] for line in ledger_lines(tmp_path / str(number))])
        assert data.datasets["train"].batch(np.arange(2), 0)["wrong"].shape == (2, 7, 16)
    assert [set(one) for one in runs[0]][2:] == [{"reconstruction"}] + [
        {"reconstruction", "contrast"}
    ] * 2
    for one, other in zip(*runs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_a_contrast_without_a_store_or_before_the_reference_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"losses.contrast takes wrong activations from a store"):
        fitted(tmp_path / "run", lens_module(losses=CONTRAST), story_data(tmp_path), max_steps=1)
    early = LensLosses(reconstruction=LossWeight(1.0, begin=2), contrast=LossWeight(1.0, begin=1))
    with pytest.raises(ValueError, match=r"losses.contrast begins at step 1, but the reference"):
        check_phases(LensLosses(**{**vars(early), "teacher_text": LossWeight(1.0, end=2)}), 9)
