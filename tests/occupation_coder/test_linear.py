"""The linear head: its features, heads of titles, its loss by hand, and weights of rows."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.core.batches import padded_texts
from datamodules.occupations.store import CodeBookOptions
from datamodules.tokenizers.codes import decode
from lit_models.occupation_coder import linear
from lit_models.occupation_coder.encoders import SPACE, ngram_keys, within_words
from lit_models.occupation_coder.loss import OccupationLossOptions, linear_examples, row_weights
from lit_models.occupation_coder.network import NONE
from tests.occupation_coder.test_loss import occupation_losses
from tests.occupation_coder.tiny import batch_of, network_of, padded
from tests.occupation_tables import module, table


def test_hashed_features_keep_the_likeness_of_texts():
    head = linear.LinearHead(4, linear.LinearOptions(ngram_sizes=(2,), num_features=1 << 16))
    one, two, other = head.features(*padded(["abab", "ab", "xy"], 4))
    # <a ab ba ab b> against <a ab b>: 1 + 2 + 1 over the lengths
    assert (one @ two).item() == pytest.approx(4 / (7 * 3) ** 0.5)
    assert (one @ other).item() == pytest.approx(0.0)


def test_the_solved_head_is_the_minimum_of_its_squared_hinge_loss():
    rng = np.random.default_rng(0)
    words = ["cooper", "hatter", "smith", "old smith", "weaver", "wool weaver"]
    texts = [np.array([ord(c) for c in word], np.uint32) for word in words]
    has_code = np.array([[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 1, 0], [1, 1, 0], [1, 0, 0]]) > 0
    weights = rng.uniform(0.5, 2.0, 6)
    head = linear.LinearHead(3, linear.LinearOptions(num_features=64, cost=2.0))
    linear.solve(head, texts, has_code, weights)
    assert not any(parameter.requires_grad for parameter in head.parameters())
    assert head.weight[2].norm() == 0  # a code without texts
    assert head.bias[2] == -1
    features = head.features(**padded_texts(texts)).double()

    def loss(weight, bias):
        signs = torch.from_numpy(has_code).double() * 2 - 1
        short = (1 - signs * (features @ weight.T + bias)).relu().square()
        factor = torch.from_numpy(weights)[:, None]
        norms = 0.5 * (weight.square().sum(1) + bias.square())
        return norms + 2.0 * (factor * short).sum(0)

    solution = head.weight.double().requires_grad_(), head.bias.double().requires_grad_()
    slope = torch.autograd.grad(loss(*solution)[:2].sum(), solution)
    assert max(part[:2].abs().max() for part in slope) < 2e-3
    near = [part + 0.01 * torch.from_numpy(rng.normal(size=part.shape)) for part in solution]
    assert (loss(*near) > loss(*solution)).all()


def test_a_code_that_every_text_has_is_likely_everywhere():
    head = linear.LinearHead(2, linear.LinearOptions(num_features=8))
    texts = [np.array([97], np.uint32), np.array([98], np.uint32)]
    linear.solve(head, texts, np.array([[True, False], [True, True]]), np.ones(2))
    assert head.bias[0] == 1
    margins = head(*padded(["z"], 1))[0] / linear.LOGIT_PER_MARGIN
    assert margins[0] == 1


def test_steps_train_the_encoder_and_the_decoder_and_leave_the_linear_head():
    network = network_of(linear.LinearOptions(num_features=32)).train()
    memory, logits = network(*padded(["cooper", "hatter"], 6), torch.tensor([1, 0]))
    batch = batch_of(torch.tensor([[0, 2], [1, NONE]]))
    losses = occupation_losses(memory, logits, network.decoder, batch)
    (losses["flat"].total + losses["seq2seq"].total).backward()
    without = {name for name, p in network.named_parameters() if p.grad is None}
    assert without == {"flat.weight", "flat.bias"}


def test_importance_weighs_the_losses_of_a_record_and_not_its_count():
    network = network_of(linear.LinearOptions(num_features=32))
    memory, logits = network(*padded(["cooper", "hatter"], 6), torch.tensor([1, 0]))
    codes = torch.tensor([[0, 2], [1, NONE]])

    def losses(importance=1.0, weight=(1.0, 1.0)):
        batch = batch_of(codes, torch.tensor(weight))
        return occupation_losses(memory, logits, network.decoder, batch, importance=importance)

    first, second = losses(weight=(1.0, 0.0)), losses(weight=(0.0, 1.0))
    weighted = losses(torch.tensor([0.5, 0.0]))
    for term in ("seq2seq", "flat"):
        torch.testing.assert_close(weighted[term].total, 0.5 * first[term].total)
        assert weighted[term].count == 2
        both = losses(torch.tensor([1.0, 2.0]))[term].total
        torch.testing.assert_close(both, first[term].total + 2 * second[term].total)


@pytest.fixture
def store(tmp_path, own_cache):
    texts = ["farmer", "Farmer (deceased)", "FARMER", "farmer", "bread baker"]
    codes = ["61110", "61110", "61110", "62120", "77610"]
    rows = [(text, "en", code, "") for text, code in zip(texts, codes, strict=True)]
    names = ["61110,Farmer", "62120,Farm servant", "77610,Baker", "83110,Blacksmith"]
    (tmp_path / "book.csv").write_text("\n".join(["code,description", *names]) + "\n")
    book = CodeBookOptions(str(tmp_path / "book.csv"), descriptions_as_examples=True)
    held = table(tmp_path / "held.csv", rows)
    data = module(tmp_path, rows, validation_files=held, code_book=book)
    data.setup("fit")
    return data.store


def test_rows_of_one_text_share_a_weight_that_grows_slower_than_their_number(store):
    # three rows and one description contain "farmer"; the other texts occur once
    once = row_weights(store, OccupationLossOptions(repeats=0.0))
    torch.testing.assert_close(once, torch.tensor([0.25, 1, 0.25, 0.25, 1, 0.25, 1, 1, 1]))
    root = row_weights(store, OccupationLossOptions(repeats=0.5))
    torch.testing.assert_close(root, torch.tensor([0.5, 1, 0.5, 0.5, 1, 0.5, 1, 1, 1]))


def test_descriptions_of_codes_that_no_row_has_weigh_nothing(store):
    weights = row_weights(store, OccupationLossOptions(unused_codes=False))
    assert weights.tolist() == [1.0] * 8 + [0.0]  # the blacksmith


def test_a_linear_head_sees_each_text_once_per_set_of_codes(store, caplog, monkeypatch):
    options = OccupationLossOptions(linear=linear.LinearOptions(), repeats=0.0, unused_codes=False)
    texts, has_code, weight = linear_examples(store, options)
    distinct_texts = [decode(text) for text in texts]
    assert distinct_texts.count("farmer") == 2  # a record of two codes
    assert "blacksmith" not in distinct_texts
    assert (has_code.sum(1) == 1).all()
    of_farmer = [w for text, w in zip(distinct_texts, weight, strict=True) if text == "farmer"]
    assert sorted(of_farmer) == [0.25, 0.75]
    monkeypatch.setattr("lit_models.occupation_coder.loss.MOST_TEXTS", 2)
    assert len(linear_examples(store, options)[0]) == 2
    assert "solved on 2 of" in caplog.text


ENDS = ["and", "of", "at", "from", "&", ",", "(", ")"]


def spaced(text: str, size: int = 0) -> torch.Tensor:
    ids = [SPACE, *map(ord, text), SPACE]
    return torch.tensor([ids + [SPACE] * (size - len(ids))])


def head_of(text: str, ends: list[str], size: int = 0) -> str:
    ids = spaced(text, size)
    return "".join(map(chr, ids[linear.TitleHeads(ends)(ids)].tolist()))


def plain_head(text: str, ends: list[str]) -> str:
    last = ""
    for word in re.findall(r"[&,()]|[^\s&,()]+", text):
        if word not in ends:
            last = word
        elif last:
            return last
    return last


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("solicitor's clerk of london", "clerk"),
        ("carpenter and joiner", "carpenter"),
        ("and boot maker", "maker"),
        ("fisherman ( )", "fisherman"),
        ("(clerk) at sea", "clerk"),
        ("professor,music", "professor"),
        ("sandman", "sandman"),
        ("of and", ""),
        ("", ""),
        ("smed på landet", "landet"),
        ("form a", "a"),  # "from" consists of the same letters
        ("boot and shoe maker", "boot"),  # the rule knows no grammar
    ],
)
def test_the_head_is_the_last_word_before_the_first_end(text, head):
    assert head_of(text, ENDS) == head
    assert head_of(text, ENDS, size=40) == head


@settings(deadline=None)
@given(st.text("aofnd &,(å", max_size=30))
def test_it_is_what_reading_word_by_word_finds(text):
    assert head_of(text, ENDS) == plain_head(text, ENDS)


def test_ngrams_within_words_are_those_of_padded_words():
    ids = spaced("ab c")  # " ab " and " c "
    inside = within_words(ids, [1, 2, 3])
    keys, _ = ngram_keys(ids, torch.tensor([ids.shape[1]]), [1, 2, 3])
    assert keys.shape == inside.shape
    text = " ab c "
    ngrams = {
        (text[start : start + size])
        for start in range(len(text))
        for place, size in enumerate([1, 2, 3])
        if inside[0, start, place] and start + size <= len(text)
    }
    assert ngrams == {"a", "b", "c", " a", "ab", "b ", " c", "c ", " ab", "ab ", " c "}


def features(texts: list[str], **options: object) -> torch.Tensor:
    head = linear.LinearHead(
        2, linear.LinearOptions(ngram_sizes=(2, 3), num_features=1 << 14, **options)
    )
    return head.features(*padded(texts, max(map(len, texts))))


def test_within_words_the_order_of_words_and_their_neighbours_say_nothing():
    one, other = features(["boot maker", "maker boot"], within_words=True)
    torch.testing.assert_close(one, other)
    one, other = features(["boot maker", "maker boot"])
    assert one @ other < 0.9


@pytest.mark.parametrize(
    ("part", "texts"),
    [
        ("head_weight", ["clerk of the docks", "clerk", "docks"]),
        ("core_weight", ["ship carpenter of London", "ship carpenter", "carpenter of London"]),
    ],
)
def test_a_title_is_nearer_to_one_of_its_head_or_core(part, texts):
    options = {"within_words": True, "head_ends": ("of",)}
    plain = features(texts, within_words=True)
    weighted = features(texts, **{part: 1.0}, **options)
    assert weighted[0] @ weighted[1] > plain[0] @ plain[1]
    assert weighted[0] @ weighted[2] < plain[0] @ plain[2]
    torch.testing.assert_close(weighted.norm(dim=1), torch.ones(3))
    of_part = features(texts, **{part: 1e4}, **options)  # so that other parts hardly count
    torch.testing.assert_close(of_part[0], of_part[1], atol=1e-3, rtol=0)


def test_the_heads_ngrams_count_once_more_by_their_weight():
    one, other = features(["ab", "ab"], head_weight=0.5, within_words=True)
    torch.testing.assert_close(one @ other, torch.tensor(1.0))
    # "b ab" has 7 n-grams, " b", "b ", " b ", " a", "ab", " ab" and "ab ", of them "b " twice;
    # those of its head "ab" are 5, each of them among the columns of heads.
    text, bare = features(["b ab", "ab"], head_weight=0.5, within_words=True)
    counts, of_head = torch.tensor([1, 2, 1, 1, 1, 1, 1]).float(), torch.ones(5)
    shared = torch.tensor([2, 1, 1, 1, 1]).float().sum() / counts.norm() / of_head.norm()
    torch.testing.assert_close(text @ bare, (shared + 0.25) / 1.25)


def test_a_text_without_words_has_no_features():
    assert features(["", "clerk"], within_words=True, head_weight=0.5)[0].norm() == 0
