"""The loss: its terms by hand, their schedules, and the networks that they train."""

from math import log

import pytest
import torch

from lit_models.consistency_lens import loss
from lit_models.consistency_lens.lens import IMPOSSIBLE
from lit_models.consistency_lens.loss import (
    LensLosses,
    LossWeight,
    TeacherText,
    check_phases,
    effect,
    leaves_one_idle,
    lens_terms,
)
from lit_models.run_files import read_checkpoint
from tests.consistency_lens.small_lens import BOTH, JOINT, WARM, fitted, lens_module, story_data
from tests.consistency_lens.tiny import activations, documents, effects, lens_of, moved

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
