"""Each control is what its name says, and changes only its own part; the subject's own words."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from datamodules.activations.datamodule import partners
from lit_models.consistency_lens.controls import CONTROLS, Case, tuned_map, unembedded_words
from lit_models.consistency_lens.lens import Explanation
from lit_models.consistency_lens.subject import outputs_of, read
from tests.consistency_lens.tiny import (
    D,
    activations,
    batch_of,
    case_of,
    documents,
    lens_of,
    part_of,
    statistics,
)


@torch.no_grad()
def rows_of(case):
    return {name: rebuild() for name, rebuild in case.rows().items()}


def fve(case, rebuilt):
    found = case.fidelity(rebuilt)
    return float(1 - found.error.sum() / found.spread.sum())


@pytest.fixture(scope="module")
def case():
    return case_of()


@pytest.fixture(scope="module")
def found(case):
    """Return the activations that each row rebuilds."""
    return rows_of(case)


def test_baselines_are_those_of_the_training_part(case, found):
    (known,) = statistics(case.lens.subject)
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


def test_components_say_more_the_more_they_are(case, found):
    shares = [fve(case, found[f"components_{number}"]) for number in (1, 4, 16)]
    assert shares[0] < shares[1] < shares[2] == pytest.approx(1, abs=1e-5)  # all D of them
    assert D == 16
    left = found["components_4"] - case.activation
    assert (left @ case.baselines[0].components[:4].T).abs().max() < 1e-4


def test_the_best_of_more_draws_is_never_worse(case, found):
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
def test_salience_is_what_one_other_word_costs(case):
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
def test_the_teachers_text_is_read_by_the_reader_of_now_and_by_the_reference(found):
    case, plain = case_of(told=2), found
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
    assert torch.equal(plain["teacher_text"], plain["true_text"])


FINAL_NORM = {"own GPT-2": "norm", "GPT-2": "model.transformer.ln_f", "Llama": "model.model.norm"}


def outputs(subject, ids):
    """Return the outputs of the layer and of the last block at each token."""
    both = (subject.layer_blocks[0], subject.network.blocks()[-1])
    return tuple(outputs_of(both, lambda: read(subject.network, ids)))


def batch_of_documents():
    ids, lengths = documents((9, 12, 7, 11, 12, 12, 10, 12))
    return {"input_ids": ids, "lengths": lengths}


@torch.no_grad()
@pytest.mark.parametrize("kind", FINAL_NORM)
def test_the_logit_lens_is_the_final_norm_and_the_head(kind):
    lens, given = lens_of(kind), activations(5)
    network = lens.subject.network
    logits = network.head(network.get_submodule(FINAL_NORM[kind])(given))
    logits[:, ~lens.verbalizer.is_word] = -torch.inf
    assert torch.equal(unembedded_words(lens, given), logits.argsort(-1, descending=True)[:, :4])


@torch.no_grad()
def test_the_map_is_the_least_squares_fit_over_all_tokens_and_no_padding():
    subject, batch = lens_of(layer=0).subject, batch_of_documents()
    found = tuned_map(subject, [batch])
    below, above = [], []
    for ids, length in zip(batch["input_ids"], batch["lengths"], strict=True):
        layer, last = outputs(subject, ids[None, :length])
        below.append(layer[0].numpy())
        above.append(last[0].numpy())
    inputs = np.concatenate(below)
    inputs = np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)
    squares = inputs.T @ inputs
    ridge = 1e-4 * np.diag(np.diag(squares))
    expected = np.linalg.solve(squares + ridge, inputs.T @ np.concatenate(above) + ridge[:, :16])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-9)
    pieces = [{n: v[at] for n, v in batch.items()} for at in (slice(3), slice(3, 8))]
    torch.testing.assert_close(tuned_map(subject, pieces), found, rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_the_tuned_lens_comes_nearer_to_the_subjects_own_words_than_the_logit_lens():
    lens, batch = lens_of(layer=0), batch_of_documents()
    norm = lens.subject.network.norm
    norm.weight.fill_(1.0)
    norm.bias.zero_()
    layer, last = (x.flatten(0, 1) for x in outputs(lens.subject, batch["input_ids"]))
    true = unembedded_words(lens, last)[:, 0]
    tuned = tuned_map(lens.subject, [batch])
    named = [unembedded_words(lens, layer, x)[:, 0] for x in (tuned, None)]
    shares = [float((words == true).double().mean()) for words in named]
    assert shares[0] > shares[1] + 0.1
    identity = torch.eye(17, 16, dtype=layer.dtype)
    assert torch.equal(unembedded_words(lens, layer, identity), unembedded_words(lens, layer))
    at_last = lens_of(layer=2).subject  # no block follows, so there is no map
    torch.testing.assert_close(tuned_map(at_last, [batch]), identity, rtol=0, atol=1e-6)


@torch.no_grad()
def test_rows_of_the_table_read_these_words_and_those_of_the_current_token_alone(case, found):
    lens = case.lens
    for name, tuned in (("logit_lens", None), ("tuned_lens", case.baselines[0].tuned)):
        words = lens.words(unembedded_words(lens, case.activation, tuned))
        assert torch.equal(found[name], lens.reconstructor(words))
    ids = case.batch["input_ids"]
    for row, place in enumerate(case.position.tolist()):
        mean = case.baselines[0].of_token(ids[row, place][None], lens.mean)
        said = lens.verbalizer.explain(mean)
        torch.testing.assert_close(found["text_only"][row], lens.reconstructor(said.embeddings)[0])
