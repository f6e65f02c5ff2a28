"""Each control is what its name says, and changes only its own part."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datamodules.activations.datamodule import partners
from lit_models.consistency_lens.controls import CONTROLS, Case
from lit_models.consistency_lens.lens import Explanation
from tests.consistency_lens.tiny import D, batch_of, case_of, part_of, statistics


@torch.no_grad()
def rows_of(case):
    return {name: rebuild() for name, rebuild in case.rows().items()}


def fve(case, rebuilt):
    found = case.fidelity(rebuilt)
    return float(1 - found.error.sum() / found.spread.sum())


def test_baselines_are_those_of_the_training_part():
    case = case_of()
    (known,) = statistics(case.lens.subject)
    found = rows_of(case)
    ids, position = case.batch["input_ids"], case.position
    for row in range(len(ids)):
        place = np.flatnonzero(known.token_ids == int(ids[row, position[row]]))
        expected = known.token_means[place[0]] if len(place) else known.mean
        np.testing.assert_allclose(found["token_mean"][row], expected, rtol=1e-5)
        expected = known.position_means[position[row]]
        np.testing.assert_allclose(found["position_mean"][row], expected, rtol=1e-5)
    assert 3 not in known.token_ids
    mean = torch.arange(D).float()  # the lens's mean, whatever the data
    assert torch.equal(case.baselines[0].of_token(torch.tensor([3]), mean), mean[None])
    assert torch.equal(case.baselines[0].of_position(torch.tensor([999]), mean), mean[None])
    assert fve(case, found["mean"]) == pytest.approx(0, abs=1e-6)
    assert not found["zero"].any()


def test_components_say_more_the_more_they_are():
    case = case_of()
    found = rows_of(case)
    shares = [fve(case, found[f"components_{number}"]) for number in (1, 4, 16)]
    assert shares[0] < shares[1] < shares[2] == pytest.approx(1, abs=1e-5)  # all D of them
    assert D == 16
    left = found["components_4"] - case.activation
    assert (left @ case.baselines[0].components[:4].T).abs().max() < 1e-4


def test_the_best_of_more_draws_is_never_worse():
    case = case_of()
    found = rows_of(case)
    names = ("sampled", "best_of_2", "best_of_4", "best_of_8")
    errors = [case.error(found[name]) for name in names]
    for fewer, more in pairwise(errors):
        assert (fewer >= more).all()
    torch.testing.assert_close(errors[3], torch.stack([case.error(d) for d in case.draws]).amin(0))


def test_shuffled_words_are_the_same_words_in_another_order():
    case = case_of(batch_of(40))
    own, other = case.greedy.embeddings, case.words_in_other_order()
    torch.testing.assert_close(own.sort(1).values, other.sort(1).values)
    distinct = [len(set(ids.tolist())) == ids.shape[0] for ids in case.greedy.token_ids]
    assert all((a != b).any() for a, b, d in zip(own, other, distinct, strict=True) if d)


@torch.no_grad()
def test_neither_the_batch_nor_its_order_nor_padding_changes_a_value():
    batch = batch_of()
    other = case_of(batch).other
    whole = case_of(batch).fidelities()
    for rows in ([4, 1], [0], [5, 3, 2]):
        some = part_of(batch, rows)
        case = case_of(some | {"input_ids": some["input_ids"][:, : int(some["lengths"].max())]})
        case.other = other[rows]
        for name, found in case.fidelities().items():
            for values, expected in zip(found, whole[name], strict=True):
                torch.testing.assert_close(values, expected[rows], rtol=1e-4, atol=1e-5)


class Leaking(Case):
    """Puts the true current token in the place of an explanation that should not know it."""

    def rows(self):
        current = self.batch["input_ids"].gather(1, self.position[:, None])
        words = self.lens.words(current.expand(-1, self.lens.verbalizer.num_words))
        return super().rows() | {"no_activation": lambda: self.lens.reconstructor(words)}


@torch.no_grad()
def test_a_planted_leak_moves_its_row_and_no_other():
    honest, leaking = (case_of(batch_of(60), kind, is_moved=False) for kind in (Case, Leaking))
    one, other = rows_of(honest), rows_of(leaking)
    assert fve(leaking, other["no_activation"]) > fve(honest, one["no_activation"]) + 0.3
    assert all(torch.equal(one[name], other[name]) for name in one if name != "no_activation")
    assert CONTROLS[-1] == "no_activation"
    errors = [case.predictions()["control_errors"][:, -1].mean() for case in (leaking, honest)]
    assert errors[0] < errors[1]


@torch.no_grad()
def test_salience_is_what_one_other_word_costs():
    case = case_of()
    own, other = case.greedy.embeddings, case.shuffled.embeddings
    for place in range(own.shape[1]):
        words = own.clone()
        words[:, place] = other[:, place]
        changed = case.rebuilt(Explanation(case.greedy.token_ids, words, case.greedy.logits))
        cost = case.error(changed) - case.error(case.rebuilt(case.greedy))
        torch.testing.assert_close(case.salience[:, place], cost)
    is_same = case.greedy.token_ids == case.shuffled.token_ids
    assert case.salience[is_same].abs().max() < 1e-5 if is_same.any() else True


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_partners_are_of_another_document_and_a_permutation_where_one_exists(document):
    document = np.array(document)
    found = partners(document)
    counts = np.bincount(document)
    if counts.max() < len(document):
        assert (document[found] != document).all()
    if counts.max() <= len(document) / 2:
        assert sorted(found) == list(range(len(document)))
    assert (partners(document) == found).all()


@torch.no_grad()
def test_the_teachers_text_is_read_by_the_reader_of_now_and_by_the_reference():
    case = case_of(told=2)
    found, ids = rows_of(case), case.batch["input_ids"]
    for row, position in enumerate(case.position.tolist()):
        recent = [int(ids[row, position]), int(ids[row, position - 1])]
        others = {i for i in ids[row, :position].tolist() if i and i not in recent}
        told = sorted(others)[:2]  # the activation predicts words of low numbers
        text = torch.tensor([[*recent, *told, *[recent[0]] * (2 - len(told))]])
        words = case.lens.words(text)
        for name, part in (("teacher_text", case.lens), ("_separate", case.lens.reference)):
            read = part.reconstructor(words)[0]
            name = name if name[0] == "t" else f"teacher_text{name}"
            torch.testing.assert_close(found[name][row], read, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found["teacher_text"], found["true_text"])
    plain = rows_of(case_of())
    assert torch.equal(plain["teacher_text"], plain["true_text"])
