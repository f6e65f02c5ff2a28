"""Words by the subject's own unembedding, and the affine map of the tuned lens."""

import numpy as np
import pytest
import torch

from lit_models.consistency_lens.controls import tuned_map, unembedded_words
from lit_models.consistency_lens.subject import outputs_of, read
from tests.consistency_lens.tiny import activations, case_of, documents, lens_of

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
def test_rows_of_the_table_read_these_words_and_those_of_the_current_token_alone():
    case = case_of()
    rows, lens = {name: rebuild() for name, rebuild in case.rows().items()}, case.lens
    for name, tuned in (("logit_lens", None), ("tuned_lens", case.baselines[0].tuned)):
        words = lens.words(unembedded_words(lens, case.activation, tuned))
        assert torch.equal(rows[name], lens.reconstructor(words))
    ids = case.batch["input_ids"]
    for row, place in enumerate(case.position.tolist()):
        mean = case.baselines[0].of_token(ids[row, place][None], lens.mean)
        said = lens.verbalizer.explain(mean)
        torch.testing.assert_close(rows["text_only"][row], lens.reconstructor(said.embeddings)[0])
