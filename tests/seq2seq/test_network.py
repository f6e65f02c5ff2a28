"""Networks encode and decode alike, alone or in batches, with and without cache."""

import pytest
import torch
import torch.nn.functional as F

from lit_models.seq2seq.network import network_of, read_recipe
from tests.causal_lm.test_pretrained import changed
from tests.seq2seq.tiny import (
    KINDS,
    SIZES,
    SOURCES,
    START,
    batch_of,
    model_of_transformers,
    network,
    saved,
)

BEFORE = torch.tensor([[START, 4, 9, 2], [START, 6, 6, 3], [START, 1, 2, 5]])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_steps_with_a_cache_see_what_one_pass_sees(kind):
    net, batch = network(kind), batch_of(SOURCES)
    sources = batch["input_ids"], batch["attention_mask"]
    whole = net(*sources, BEFORE)
    cache = net.start(*sources, 2)
    rows = [0, 1, 0, 0, 1, 1]  # two hypotheses of each record, which then swap or fork
    for step, tokens in enumerate(BEFORE.unbind(1)):
        hidden = net.step(tokens.repeat_interleave(2), cache).view(3, 2, -1)
        torch.testing.assert_close(hidden[:, 0], whole[:, step], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(hidden[:, 1], whole[:, step], atol=1e-5, rtol=1e-4)
        cache.reorder(torch.tensor(rows) + torch.tensor([0, 0, 2, 2, 4, 4]))
    cache.keep_records(torch.tensor([2]), 2)
    tokens = torch.tensor([7, 7])
    longer = torch.cat([BEFORE[2], tokens[:1]])[None]
    expected = net(*(x[2:] for x in sources), longer)[:, -1]
    found = net.step(tokens, cache)
    torch.testing.assert_close(found, expected.expand(2, -1), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padding_and_neighbours_change_nothing(kind):
    net, batch = network(kind), batch_of(SOURCES)
    together = net(batch["input_ids"], batch["attention_mask"], BEFORE)
    for number, ids in enumerate(SOURCES):
        one = batch_of([ids])
        alone = net(one["input_ids"], one["attention_mask"], BEFORE[number : number + 1])
        torch.testing.assert_close(alone[0], together[number], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_a_target_does_not_see_what_follows_and_sees_its_order():
    net, batch = network("own"), batch_of(SOURCES)
    sources = batch["input_ids"], batch["attention_mask"]
    first, changed = net(*sources, BEFORE), BEFORE.clone()
    changed[:, 2:] = 8
    torch.testing.assert_close(net(*sources, changed)[:, :2], first[:, :2])
    swapped = net(*sources, BEFORE[:, [0, 2, 1, 3]])
    assert not torch.allclose(swapped[:, 3], first[:, 3], atol=1e-3)


@pytest.mark.parametrize("kind", SIZES)
@torch.no_grad()
def test_the_loss_is_that_of_transformers(kind):
    model, net = model_of_transformers(kind), network(kind)
    batch, labels = batch_of(SOURCES), torch.tensor([[4, 9, 1], [6, 1, -100], [2, 3, 1]])
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"].long()}
    expected = model(**inputs, labels=labels).loss
    start = torch.full((3, 1), START)
    before = torch.cat([start, labels.clamp(min=0)[:, :-1]], 1)
    hidden = net(batch["input_ids"], batch["attention_mask"], before)
    logits = F.linear(hidden, net.head.weight)
    found = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(found, expected)


def test_a_folder_is_read_with_its_weights(tmp_path):
    folder = saved(tmp_path / "model")
    net, model = network_of(read_recipe(folder), folder), model_of_transformers("T5", 257, 256)
    torch.testing.assert_close(net.model.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_model_of_another_kind_or_of_sizes_that_do_not_fit_is_refused(tmp_path):
    from tests.causal_lm.folders import saved as saved_decoder

    changed(saved(tmp_path, "Bart"), encoder_attention_heads=3)
    with pytest.raises(ValueError, match="refuses config.json of .*must be divisible by num_heads"):
        read_recipe(tmp_path)
    saved_decoder(tmp_path, "GPT2")
    with pytest.raises(ValueError, match='model_type "gpt2"; an encoder with a decoder is one'):
        read_recipe(tmp_path)
