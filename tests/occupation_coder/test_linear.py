"""The linear head: its features, its loss by hand, and what a training row weighs."""

import pytest
import torch

from datamodules.occupations.datamodule import OccupationDataModule
from datamodules.occupations.rows import Columns
from datamodules.occupations.store import CodeBookOptions
from lit_models.occupation_coder.encoders import CharacterEncoder
from lit_models.occupation_coder.linear import (
    LOGIT_PER_MARGIN,
    LinearHead,
    LinearOptions,
    hinge,
)
from lit_models.occupation_coder.loss import LossOptions, occupation_losses
from lit_models.occupation_coder.network import BlockDecoder, OccupationNetwork
from lit_models.occupation_coder.row_weights import row_weights
from lit_models.occupation_coder.trie import NONE, CodeTrie
from tests.occupation_coder.test_loss import batch_of

TABLE = [[4, 4], [4, 5], [5, 4], [5, 5]]


def padded(texts: list[str], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([[ord(c) for c in text] + [0] * (size - len(text)) for text in texts])
    return ids, ids > 0


def small_network(linear: LinearOptions) -> OccupationNetwork:
    torch.manual_seed(0)
    trie = CodeTrie.from_table(TABLE, vocab_size=6, max_codes=2)
    encoder = CharacterEncoder(2, width=16, num_layers=1, num_heads=2, num_buckets=64)
    decoder = BlockDecoder(16, trie, width=16, num_layers=1, num_heads=2, feed_forward=32)
    return OccupationNetwork(encoder, decoder, linear=linear)


def test_features_have_length_1_and_know_nothing_of_padding_and_neighbours():
    head = LinearHead(4, LinearOptions(num_features=64))
    texts = ["farm servant", "smed", "農夫", ""]
    together = head.features(*padded(texts, 30))
    torch.testing.assert_close(together.norm(dim=1), torch.ones(4))
    for row, text in enumerate(texts):
        alone = head.features(*padded([text], max(len(text), 1)))
        torch.testing.assert_close(together[row], alone[0], rtol=0, atol=0)


def test_garbage_under_the_mask_changes_no_feature():
    head = LinearHead(4, LinearOptions(num_features=64))
    ids, mask = padded(["farmer", "smith"], 9)
    torch.testing.assert_close(
        head.features(ids, mask), head.features(torch.where(mask, ids, 77), mask)
    )


def test_hashed_features_keep_the_likeness_of_texts():
    head = LinearHead(4, LinearOptions(ngram_sizes=(2,), num_features=1 << 16))
    one, two, other = head.features(*padded(["abab", "ab", "xy"], 4))
    # <a ab ba ab b> against <a ab b>: 1 + 2 + 1 over the lengths
    assert (one @ two).item() == pytest.approx(4 / (7 * 3) ** 0.5)
    assert (one @ other).item() == pytest.approx(0.0)


def test_the_hinge_is_the_squared_shortfall_of_each_margin():
    margins = torch.tensor([[2.0, -2.0, 0.5, -0.5], [0.0, -1.0, -1.0, 1.0]])
    has_code = torch.tensor([[True, False, True, False], [True, False, False, True]])
    losses = hinge(LOGIT_PER_MARGIN * margins, has_code)
    torch.testing.assert_close(losses, torch.tensor([0.25 + 0.25, 1.0]))
    weighted = hinge(LOGIT_PER_MARGIN * margins, has_code, torch.tensor([3.0, 1.0, 1.0, 1.0]))
    torch.testing.assert_close(weighted, torch.tensor([0.5, 3.0]))


def test_the_penalty_is_on_the_weights_that_act():
    head = LinearHead(2, LinearOptions(num_features=8, penalty=0.5))
    with torch.no_grad():
        head.weight[1, 3] = 2.0 / head.options.rate  # what multiplies the features is 2
    assert head.penalty().item() == pytest.approx(0.5 * 0.5 * 4.0)


def test_a_rate_moves_the_margins_and_not_where_they_begin():
    moved = []
    for rate in (1.0, 4.0):
        head = LinearHead(4, LinearOptions(num_features=64, rate=rate))
        given = padded(["cooper"], 6)
        before = head(*given)
        torch.testing.assert_close(before, torch.full((1, 4), -LOGIT_PER_MARGIN))
        optimizer = torch.optim.Adam(head.parameters(), lr=1e-3)  # a step of each weight is lr
        head(*given).sum().backward()
        optimizer.step()
        moved.append(head(*given) - before)
    torch.testing.assert_close(moved[1], 4 * moved[0], rtol=1e-4, atol=1e-6)


def test_the_flat_loss_trains_the_linear_head_and_not_the_encoder():
    network = small_network(LinearOptions(num_features=32))
    memory, logits = network(*padded(["cooper", "hatter"], 6), torch.tensor([1, 0]))
    batch = batch_of(torch.tensor([[0, 2], [1, NONE]]))
    losses = occupation_losses(memory, logits, network.decoder, batch, linear=network.flat)
    losses["flat"].total.backward(retain_graph=True)
    assert {n for n, p in network.named_parameters() if p.grad is not None} == {
        "flat.weight",
        "flat.bias",
    }
    losses["seq2seq"].total.backward()
    assert [n for n, p in network.named_parameters() if p.grad is None] == []


def test_importance_weighs_the_losses_of_a_record_and_not_its_count():
    network = small_network(LinearOptions(num_features=32)).eval()
    memory, logits = network(*padded(["cooper", "hatter"], 6), torch.tensor([1, 0]))
    codes = torch.tensor([[0, 2], [1, NONE]])

    def losses(importance=None, weight=(1.0, 1.0)):
        batch = batch_of(codes, torch.tensor(weight))
        return occupation_losses(
            memory, logits, network.decoder, batch, importance=importance, linear=network.flat
        )

    first, second = losses(weight=(1.0, 0.0)), losses(weight=(0.0, 1.0))
    weighted = losses(torch.tensor([0.5, 0.0]))
    for term in ("seq2seq", "flat"):
        torch.testing.assert_close(weighted[term].total, 0.5 * first[term].total)
        assert weighted[term].count == 2
        both = losses(torch.tensor([1.0, 2.0]))[term].total
        torch.testing.assert_close(both, first[term].total + 2 * second[term].total)


def test_a_linear_head_learns_in_mixed_precision():
    network = small_network(LinearOptions(num_features=256, penalty=1e-4))
    texts = padded(["cooper", "hatter", "smith", "weaver"], 6)
    batch = batch_of(torch.arange(4)[:, None])
    optimizer = torch.optim.Adam(network.flat.parameters(), lr=0.02)
    for _ in range(40):
        with torch.autocast("cpu", torch.bfloat16):
            memory, logits = network(*texts, torch.zeros(4, dtype=torch.long))
        assert logits.dtype == torch.float32
        losses = occupation_losses(memory, logits, network.decoder, batch, linear=network.flat)
        optimizer.zero_grad()
        losses["flat"].total.backward()
        optimizer.step()
    assert logits.argmax(1).tolist() == [0, 1, 2, 3]


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    rows = [
        "farmer,en,61110",
        "Farmer (deceased),en,61110",
        "FARMER,en,61110",
        "farmer,en,62120",
        "bread baker,en,77610",
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["occ1,lang,code", *rows]) + "\n")
    book = ["61110,Farmer", "62120,Farm servant", "77610,Baker", "83110,Blacksmith"]
    (tmp_path / "book.csv").write_text("\n".join(["code,description", *book]) + "\n")
    data = OccupationDataModule(
        train_files=str(tmp_path / "rows.csv"),
        validation_files=str(tmp_path / "rows.csv"),
        columns=Columns(text="occ1", language="lang", codes=["code"]),
        code_book=CodeBookOptions(str(tmp_path / "book.csv"), descriptions_as_examples=True),
    )
    data.prepare_data()
    data.setup("fit")
    return data.store


def test_rows_of_one_text_share_a_weight_that_grows_slower_than_their_number(store):
    # three rows and one description say "farmer"; the other texts stand once
    once = row_weights(store, LossOptions(repeats=0.0))
    torch.testing.assert_close(once, torch.tensor([0.25, 1, 0.25, 0.25, 1, 0.25, 1, 1, 1]))
    root = row_weights(store, LossOptions(repeats=0.5))
    torch.testing.assert_close(root, torch.tensor([0.5, 1, 0.5, 0.5, 1, 0.5, 1, 1, 1]))


def test_descriptions_of_codes_that_no_row_has_weigh_nothing(store):
    weights = row_weights(store, LossOptions(unused_codes=False))
    assert weights.tolist() == [1.0] * 8 + [0.0]  # the blacksmith


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ngram_sizes": ()}, "one or more numbers from 1"),
        ({"num_features": 0}, "num_features must be at least 1, got 0"),
        ({"penalty": -1.0}, "penalty must be 0 or more, got -1.0"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LinearOptions(**options)
