"""Decoding finds what a slow search by the definition finds."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from lit_models.seq2seq.decoding import Seq2SeqDecoding, write
from lit_models.seq2seq.network import PretrainedSeq2Seq
from tests.seq2seq.tiny import (
    END,
    KINDS,
    SIZES,
    SOURCES,
    START,
    VOCAB,
    batch_of,
    model_of_transformers,
    network,
)


def written(net, sources, vocab_size=VOCAB, end_id=END, **options):
    batch = batch_of(sources)
    names = ("input_ids", "attention_mask", "sample_id")
    options = Seq2SeqDecoding(**{"max_new_tokens": 5, **options})
    done = write(net, *(batch[name] for name in names), options, end_id, vocab_size)
    return [ids[ids >= 0].tolist() for ids in done.token_ids], done.log_probability.tolist()


@torch.no_grad()
def log_probabilities(net, source, target, vocab_size=VOCAB):
    """Return log-probabilities of each next token after the first tokens of a target [n + 1, V]."""
    batch = batch_of([source])
    before = torch.tensor([[START, *target]])
    hidden = net(batch["input_ids"], batch["attention_mask"], before)[0]
    return F.linear(hidden, net.head.weight)[:, :vocab_size].double().log_softmax(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_takes_the_most_probable_token_each_time(kind):
    net = network(kind)
    found, logs = written(net, SOURCES)
    for source, ids, log in zip(SOURCES, found, logs, strict=True):
        target, total = [], 0.0
        for _ in range(6):
            nats = log_probabilities(net, source, target)[-1]
            token = int(nats.argmax())
            if token == END or len(target) == 5:
                total += float(nats[END]) if token == END else 0.0
                break
            total += float(nats[token])
            target.append(token)
        assert ids == target
        assert log == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beams_enough_for_all_find_the_best_of_all_targets(penalty):
    net, size, most = network("own"), 4, 3
    found, logs = written(
        net, SOURCES, size, num_beams=size**most, length_penalty=penalty, max_new_tokens=most
    )
    for source, ids, log in zip(SOURCES, found, logs, strict=True):
        best = -torch.inf
        for length in range(most + 1):
            for target in product([t for t in range(size) if t != END], repeat=length):
                nats = log_probabilities(net, source, target, size)
                tokens = [*target, END]
                total = float(sum(nats[place, token] for place, token in enumerate(tokens)))
                if total / len(tokens) ** penalty > best:
                    best, expected, sums = total / len(tokens) ** penalty, [*target], total
        assert ids == expected
        assert log == pytest.approx(sums, abs=1e-4)


@pytest.mark.parametrize("kind", SIZES)
def test_beam_search_agrees_with_that_of_transformers(kind):
    model, net = model_of_transformers(kind), network(kind)
    generator = torch.Generator().manual_seed(0)
    sources = torch.randint(2, VOCAB, (9, 5), generator=generator).tolist()
    batch = batch_of(sources)
    options = {"max_new_tokens": 6, "num_beams": 3, "early_stopping": "never", "do_sample": False}
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"].long()}
    num_compared = 0
    for end_id in range(1, VOCAB):  # random weights prefer some tokens, and do not know the end
        found, _ = written(net, sources, end_id=end_id, num_beams=3, max_new_tokens=6)
        answers = model.generate(**inputs, **options, eos_token_id=end_id)[:, 1:].tolist()
        for ids, target in zip(found, answers, strict=True):
            if end_id in target:  # cut targets follow another rule there
                assert ids == target[: target.index(end_id)]
                num_compared += 1
    assert num_compared > 5


GATED = {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}  # ByT5's


@pytest.mark.parametrize(("kind", "config"), [("T5", {}), ("T5", GATED), ("Bart", {})])
def test_greedy_decoding_agrees_with_generate(kind, config):
    model = model_of_transformers(kind, **config)
    net = PretrainedSeq2Seq(model, model.config.to_dict()).eval()
    most, generator = 40, torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (12,), generator=generator).tolist()
    sources = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    batch, ends = batch_of(sources), set()
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"].long()}
    options = {"max_new_tokens": most, "do_sample": False, "eos_token_id": VOCAB}
    answers = model.generate(**inputs, **options)[:, 1:].tolist()  # none ends by itself
    for end_id in range(1, VOCAB):  # some targets end early and leave the batch, others are cut
        found, _ = written(net, sources, end_id=end_id, max_new_tokens=most)
        for ids, target in zip(found, answers, strict=True):
            ends.add(end_id in target)
            assert ids == (target[: target.index(end_id)] if end_id in target else target)
    assert ends == {True, False}


@pytest.mark.parametrize("kind", ["own", "T5"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 1.5}])
def test_a_target_does_not_depend_on_its_neighbours(kind, options):
    net = network(kind)
    together, logs = written(net, SOURCES * 3, **options)
    for number in range(3):
        ids, log = written(net, [SOURCES[number]], **options)
        if "temperature" not in options or number == 0:  # sampling depends on the sample's number
            assert ids[0] == together[number]
            assert log[0] == pytest.approx(logs[number], abs=1e-5)


def test_draws_follow_the_probabilities():
    net, number = network("own"), 4000
    found, _ = written(net, [SOURCES[0]] * number, temperature=1.0, max_new_tokens=1)
    shares = torch.zeros(VOCAB)
    for ids in found:
        shares[ids[0] if ids else END] += 1 / number
    expected = log_probabilities(net, SOURCES[0], [])[0].exp().float()
    assert (shares - expected).abs().max() < 0.03


def test_logits_that_are_not_finite_are_an_error():
    net = network("own")
    with torch.no_grad():
        net.decoder_norm.weight[0] = torch.nan
    for beams in (1, 2):
        with pytest.raises(RuntimeError, match="logits that are not finite"):
            written(net, SOURCES, num_beams=beams)
