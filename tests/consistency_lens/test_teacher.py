"""The teacher's text: the words that it chooses, and what an activation says about them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lit_models.consistency_lens import teacher as teacher_text
from lit_models.consistency_lens.loss import text_nats
from lit_models.consistency_lens.teacher import TeacherText, told_map, word_counts
from tests.causal_lm.folders import VOCAB
from tests.consistency_lens.tiny import activations, batch_of, documents, lens_of, moved

#                      0  1  2  3  4  5  6  7
COUNTS = torch.tensor([0, 9, 9, 5, 3, 3, 1, 7])  # in the training part; 0 is not a word
IDS = torch.tensor([[0, 6, 4, 1, 5, 3, 4, 2, 1, 7], [0, 4, 4, 1, 4, 0, 6, 6, 6, 6]])
PLACES = torch.tensor([8, 4])


def rarity(ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return scores that are highest for the rarest words, and among equal ones for the latest."""
    age = places[:, None] - torch.arange(ids.shape[1])
    return -(COUNTS[ids] * ids.shape[1] + age).float()


def words(num_words: int, told: int = 0) -> list[list[int]]:
    given = (IDS, PLACES, num_words, COUNTS, COUNTS > 0, rarity(IDS, PLACES) if told else None)
    return TeacherText(told).words(*given).tolist()


def test_recent_words_go_back_from_the_position_and_stop_at_the_first_word():
    assert words(3) == [[1, 2, 4], [4, 1, 4]]
    assert words(7)[1] == [4, 1, 4, 4, 4, 4, 4]


def test_told_words_are_distinct_unlike_the_recent_ones_and_the_surest_come_first():
    # The first text has 6 once, 4 and 5 three times each (4 is more recent), 3 five times.
    assert words(6, told=4) == [[1, 2, 6, 4, 5, 3], [4, 1, 4, 4, 4, 4]]


def test_words_after_the_position_and_tokens_that_are_no_words_are_never_taken():
    # 7 and the later 6 come after the position, 0 is not a word: the current token fills the place.
    assert words(3, told=3) == [[6, 4, 5], [4, 1, 4]]
    assert words(8, told=7)[0] == [1, 6, 4, 5, 3, 2, 1, 1]


def test_tokens_that_separate_documents_are_skipped():
    ids = torch.tensor([[0, 5, 3, 0, 4, 0], [0, 5, 3, 0, 4, 0], [0, 5, 3, 0, 4, 0]])
    given = (ids, torch.tensor([4, 5, 0]), 4, COUNTS, COUNTS > 0)
    # Up to 4 there are the words 4, 3, 5; the token at 5 is not a word; up to 0 there is none.
    assert TeacherText().words(*given).tolist() == [[4, 3, 5, 5], [4, 3, 5, 5], [1, 1, 1, 1]]
    shares = rarity(ids, given[1])
    two, four = (TeacherText(told).words(*given, shares).tolist() for told in (2, 4))
    assert two == [[4, 3, 5, 4], [4, 3, 5, 4], [1, 1, 1, 1]]
    assert four[1] == [4, 5, 3, 4]


def test_an_untrained_verbalizer_can_say_every_word_of_a_teachers_text_after_a_special_token():
    lens, (ids, _) = lens_of(), documents()
    ids[:, 0] = VOCAB - 1  # not a word, see tiny.Tokenizer
    is_word = lens.verbalizer.is_word
    text = TeacherText().words(ids, torch.tensor([0, 1, 3]), 4, lens.token_counts, is_word)
    assert is_word[text].all()
    assert text_nats(lens.verbalizer(activations(), text), text).max() < 100  # not 1e4


def test_padding_and_neighbours_change_no_text():
    longer = torch.cat([IDS, torch.full((2, 5), 6)], dim=1)
    found = []
    for ids, places in ((longer[:1], PLACES[:1]), (longer[1:], PLACES[1:]), (IDS, PLACES)):
        given = (ids, places, 5, COUNTS, COUNTS > 0, rarity(ids, places))
        found.append(TeacherText(told=3).words(*given))
    assert torch.equal(torch.cat(found[:2]), found[2])


def test_words_are_counted_over_the_training_part_in_pieces(monkeypatch):
    monkeypatch.setattr(teacher_text, "COUNTED_AT_ONCE", 4)
    tokens = np.array([3, 1, 1, 0, 3, 3, 5, 1, 3], np.uint16)
    store = SimpleNamespace(stream=lambda part: SimpleNamespace(tokens=tokens[: 9 * (part == 0)]))
    data: Any = SimpleNamespace(store=store)
    is_word = torch.tensor([False, *[True] * 6])
    assert word_counts(data, is_word).tolist() == [0, 3, 0, 4, 0, 1, 0]


def test_told_words_stand_behind_the_recent_ones_the_surest_first():
    shares = torch.tensor([[9.0, 1, 2, 9, 8, 3, 1, 9, 9, 9], [9.0, 1, 7, 8, 2, 9, 9, 9, 9, 9]])
    given = (IDS, PLACES, 5, COUNTS, COUNTS > 0, shares)
    # The recent words 1, 2 and 4, 1 are left out. Of 5 (8), 3 (3) and 4 (2) the first is 5; the
    # second text has no other words.
    assert TeacherText(told=3).words(*given).tolist() == [[1, 2, 5, 3, 4], [4, 1, 4, 4, 4]]


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
