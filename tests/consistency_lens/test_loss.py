"""The terms of the loss, worked by hand."""

from math import log

import pytest
import torch

from lit_models.consistency_lens import loss
from lit_models.consistency_lens.lens import IMPOSSIBLE
from lit_models.consistency_lens.loss import TeacherText, effect, lens_terms
from tests.consistency_lens.tiny import activations, documents, effects, lens_of, moved

HALF, FOURTH = [log(0.5), log(0.5)], [log(0.25), log(0.75)]


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)[None]  # [1, t, V]


def test_squared_error_is_in_units_of_the_variance() -> None:
    rebuilt, true = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[0.0, 4.0], [3.0, 1.0]])
    found = loss.squared_error(rebuilt, true, torch.tensor(2.5))
    assert found.tolist() == pytest.approx([(1 + 4) / 2 / 2.5, (9 + 1) / 2 / 2.5])


def test_text_nats_are_means_over_words() -> None:
    found = loss.text_nats(logits(HALF, FOURTH), torch.tensor([[0, 1]]))
    assert float(found) == pytest.approx(-(log(0.5) + log(0.75)) / 2)


def test_divergence_is_a_mean_over_words_from_the_first_to_the_second() -> None:
    found = loss.divergence(logits(HALF, FOURTH), logits(FOURTH, FOURTH))
    first = 0.5 * log(0.5 / 0.25) + 0.5 * log(0.5 / 0.75)
    assert float(found) == pytest.approx(first / 2)
    sure, other = logits([0.0, IMPOSSIBLE]), logits([IMPOSSIBLE, 0.0])
    assert float(loss.divergence(sure, other)) == loss.MAX_NATS


def test_the_gradient_of_a_divergence_is_there_where_a_word_is_impossible() -> None:
    own = logits([log(0.25), log(0.75)]).requires_grad_()
    found = loss.divergence(own, logits([0.0, -1000.0]))
    away = (log(0.25), log(0.75) + loss.MAX_NATS)  # of each word, the second one cut off
    nats = 0.25 * away[0] + 0.75 * away[1]
    assert found.tolist() == pytest.approx([nats])
    (gradient,) = torch.autograd.grad(found.sum(), own)
    expected = [0.25 * (away[0] - nats), 0.75 * (away[1] - nats)]  # p (away - mean away)
    assert gradient[0, 0].tolist() == pytest.approx(expected)
    assert expected[1] > 9


def test_effect_ends_before_the_documents_last_word_and_8_places_behind_the_position() -> None:
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


def batch_of(lens):
    ids, lengths = documents()
    batch = {"input_ids": ids, "lengths": lengths, "position": torch.tensor([3, 9, 2])}
    return {**batch, "noise_key": torch.tensor([1, 2, 3])}


def terms(lens, names, batch=None):
    batch = batch or batch_of(lens)
    return lens_terms(lens, batch, activations(), set(names), 0.8, TeacherText())


def test_the_term_of_each_name_is_what_its_definition_says() -> None:
    lens = moved(lens_of())
    found, batch = terms(lens, loss.TERMS), batch_of(lens)
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
    means = [nats[0, 3:8].mean(), nats[1, 9:11].mean(), nats[2, 2:6].mean()]  # of 9, 12, 7 words
    torch.testing.assert_close(found["effect"], torch.stack(means))


def test_a_term_of_one_sample_is_the_same_alone_and_only_what_is_asked_for_is_computed() -> None:
    lens = moved(lens_of())
    batch = batch_of(lens)
    together = terms(lens, loss.TERMS)
    one = {name: values[[1]] for name, values in batch.items()}
    alone = lens_terms(lens, one, activations()[[1]], set(loss.TERMS), 0.8, TeacherText())
    for name, values in together.items():
        torch.testing.assert_close(alone[name][0], values[1], rtol=1e-9, atol=1e-9)
    assert set(terms(lens, ["fluency"])) == {"fluency"}


def test_the_reference_is_free_until_the_networks_move() -> None:
    lens = moved(lens_of())
    lens.keep_reference()
    torch.testing.assert_close(terms(lens, ["reference"])["reference"], torch.zeros(3).double())
    assert (terms(moved(lens), ["reference"])["reference"] > 1e-4).all()


def test_no_term_gives_the_subject_a_gradient_and_each_reaches_its_network() -> None:
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
