"""The teacher's text: the words that it chooses, and what an activation says about them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lit_models.consistency_lens import loss
from lit_models.consistency_lens.loss import TeacherText, text_nats, told_map, word_counts
from tests.causal_lm.folders import VOCAB
from tests.consistency_lens.tiny import activations, batch_of, documents, lens_of, moved

#                      0  1  2  3  4  5  6  7
COUNTS = torch.tensor([0, 9, 9, 5, 3, 3, 1, 7])  # in the training part; 0 is not a word
IDS = torch.tensor([[0, 6, 4, 1, 5, 3, 4, 2, 1, 7], [0, 4, 4, 1, 4, 0, 6, 6, 6, 6]])
PLACES = torch.tensor([8, 4])


# Scores by word: the rarest first, and of 4 and 5 the former.
SCORES = torch.tensor([0.0, -9.0, -9.5, -5.0, -3.0, -3.1, -1.0, -7.0])


def words(num_words: int, told: int = 0, ids: Any = IDS, places: Any = PLACES) -> list[list[int]]:
    verbalizer = SimpleNamespace(is_word=COUNTS > 0, num_words=num_words)
    table = torch.stack([torch.zeros(8), SCORES], dim=1)
    lens: Any = SimpleNamespace(verbalizer=verbalizer, token_counts=COUNTS, told_map=table)
    batch: Any = {"input_ids": ids, "position": places}
    return TeacherText(told).of(lens, batch, torch.ones(len(ids), 1)).tolist()


def test_recent_words_go_back_from_the_position_and_stop_at_the_first_word():
    assert words(3) == [[1, 2, 4], [4, 1, 4]]
    assert words(7)[1] == [4, 1, 4, 4, 4, 4, 4]


def test_told_words_are_distinct_unlike_the_recent_ones_and_the_surest_come_first():
    assert words(6, told=4) == [[1, 2, 6, 4, 5, 3], [4, 1, 4, 4, 4, 4]]


def test_words_after_the_position_and_tokens_that_are_no_words_are_never_taken():
    # 7 and the later 6 come after the position, 0 is not a word: the current token fills the place.
    assert words(3, told=3) == [[6, 4, 5], [4, 1, 4]]
    assert words(8, told=7)[0] == [1, 6, 4, 5, 3, 2, 1, 1]


def test_tokens_that_separate_documents_are_skipped():
    given = (torch.tensor([[0, 5, 3, 0, 4, 0]] * 3), torch.tensor([4, 5, 0]))
    # Up to 4 there are the words 4, 3, 5; the token at 5 is not a word; up to 0 there is none.
    assert words(4, 0, *given) == [[4, 3, 5, 5], [4, 3, 5, 5], [1, 1, 1, 1]]
    assert words(4, 2, *given) == [[4, 3, 5, 4], [4, 3, 5, 4], [1, 1, 1, 1]]
    assert words(4, 4, *given)[1] == [4, 5, 3, 4]


def test_an_untrained_verbalizer_can_say_every_word_of_a_teachers_text_after_a_special_token():
    lens, (ids, _) = lens_of(), documents()
    ids[:, 0] = VOCAB - 1  # not a word, see tiny.Tokenizer
    batch: Any = {"input_ids": ids, "position": torch.tensor([0, 1, 3])}
    text = TeacherText().of(lens, batch, activations())
    assert lens.verbalizer.is_word[text].all()
    assert text_nats(lens.verbalizer(activations(), text), text).max() < 100  # not 1e4


def test_padding_changes_no_text():
    longer = torch.cat([IDS, torch.full((2, 5), 6)], dim=1)
    assert words(5, 3, longer) == words(5, 3)


def test_words_are_counted_over_the_training_part_in_pieces(monkeypatch):
    monkeypatch.setattr(loss, "COUNTED_AT_ONCE", 4)
    tokens = np.array([3, 1, 1, 0, 3, 3, 5, 1, 3], np.uint16)
    store = SimpleNamespace(stream=lambda part: SimpleNamespace(tokens=tokens[: 9 * (part == 0)]))
    data: Any = SimpleNamespace(store=store)
    is_word = torch.tensor([False, *[True] * 6])
    assert word_counts(data, is_word).tolist() == [0, 3, 0, 4, 0, 1, 0]


def test_the_map_says_how_likely_a_word_is_for_how_few_documents_hold_it():
    """Beside a numpy regression, and for words that a feature indicates or excludes."""
    lens, batch = lens_of(layer=0), batch_of(400, seed=3)
    before = torch.arange(batch["input_ids"].shape[1]) <= batch["position"][:, None]
    is_there = ((batch["input_ids"] == 5) & before).any(1)
    batch["activation"] = torch.randn(400, 16, generator=torch.manual_seed(0)).double()
    batch["activation"][:, 2] = is_there.double()
    pieces = [{n: v[at] for n, v in batch.items()} for at in (slice(150), slice(150, 400))]
    found = told_map(lens, iter(pieces))  # type: ignore[arg-type]
    inputs = np.concatenate([batch["activation"].numpy(), np.ones((400, 1))], 1)
    squares = inputs.T @ inputs
    weights = np.linalg.solve(
        squares + 1e-3 * np.diag(np.diag(squares)), inputs.T @ is_there.numpy()
    )
    whole = torch.arange(batch["input_ids"].shape[1]) < batch["lengths"][:, None]
    share = ((batch["input_ids"] == 5) & whole).any(1).double().mean()
    assert share > is_there.double().mean()
    np.testing.assert_allclose(found[5].numpy(), weights / share.item() ** 1.5, rtol=1e-5)
    assert found.shape == (VOCAB, 17)
    shares = batch["activation"] @ found[5, :-1].double() + found[5, -1]
    assert shares[is_there].min() > 1 > 0.1 > shares[~is_there].abs().max()


def test_the_text_of_told_words_follows_the_activation_and_no_other_row():
    lens, batch = moved(lens_of()), batch_of(6)
    lens.token_counts.fill_(1)
    lens.told_map = torch.randn(VOCAB, 17, generator=torch.manual_seed(4))
    given, teacher = activations(6), TeacherText(told=3)
    found = teacher.of(lens, batch, given)
    for row in range(6):
        one = {name: value[[row]] for name, value in batch.items()}
        assert torch.equal(teacher.of(lens, one, given[[row]])[0], found[row])
        place, word = int(batch["position"][row]), int(found[row, 0])
        others = set(batch["input_ids"][row, : place + 1].tolist()) - {word}
        score = {
            i: float(lens.told_map[i, :-1].double() @ given[row] + lens.told_map[i, -1])
            for i in others
        }
        ranked = sorted(others, key=score.__getitem__, reverse=True)[:3]
        assert found[row, 1 : 1 + len(ranked)].tolist() == ranked
    assert not torch.equal(teacher.of(lens, batch, -given), found)
