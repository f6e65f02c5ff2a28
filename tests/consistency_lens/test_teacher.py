"""The teacher's text, worked by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lit_models.consistency_lens import module
from lit_models.consistency_lens.loss import TeacherText, text_nats
from tests.causal_lm.folders import VOCAB
from tests.consistency_lens.tiny import activations, documents, lens_of

#                      0  1  2  3  4  5  6  7
COUNTS = torch.tensor([0, 9, 9, 5, 3, 3, 1, 7])  # in the training part; 0 is no word
IDS = torch.tensor([[0, 6, 4, 1, 5, 3, 4, 2, 1, 7], [0, 4, 4, 1, 4, 0, 6, 6, 6, 6]])
POSITION = torch.tensor([8, 4])


def words(num_words: int, **options: object) -> list[list[int]]:
    teacher = TeacherText(**options)  # type: ignore[arg-type]
    return teacher.words(IDS, POSITION, num_words, COUNTS, COUNTS > 0).tolist()


def test_recent_words_go_back_from_the_position_and_stop_at_the_first_word() -> None:
    assert words(3) == [[1, 2, 4], [4, 1, 4]]
    assert words(7)[1] == [4, 1, 4, 4, 4, 4, 4]


def test_rare_words_are_distinct_unlike_the_recent_ones_and_the_rarest_come_first() -> None:
    # The first text holds 6 once, 4 and 5 three times each with 4 more recent, 3 five times.
    assert words(6, rare=4) == [[1, 2, 6, 4, 5, 3], [4, 1, 4, 4, 4, 4]]


def test_words_after_the_position_and_tokens_that_are_no_words_are_never_taken() -> None:
    # 7 and the later 6 come after the positions, 0 is no word: the current token fills up.
    assert words(3, rare=3) == [[6, 4, 5], [4, 1, 4]]
    assert words(8, rare=7)[0] == [1, 6, 4, 5, 3, 2, 1, 1]


def test_tokens_that_begin_or_part_documents_are_passed_over() -> None:
    ids = torch.tensor([[0, 5, 3, 0, 4, 0], [0, 5, 3, 0, 4, 0], [0, 5, 3, 0, 4, 0]])
    given = (ids, torch.tensor([4, 5, 0]), 4, COUNTS, COUNTS > 0)
    # Up to 4 there are the words 4, 3, 5; the token at 5 is no word; up to 0 there is no word.
    assert TeacherText().words(*given).tolist() == [[4, 3, 5, 5], [4, 3, 5, 5], [1, 1, 1, 1]]
    assert TeacherText(rare=2).words(*given).tolist() == [[4, 3, 5, 4], [4, 3, 5, 4], [1, 1, 1, 1]]
    assert TeacherText(rare=4).words(*given)[1].tolist() == [4, 5, 3, 4]


def test_an_untrained_verbalizer_can_say_every_word_of_a_teachers_text_after_a_special_token() -> (
    None
):
    lens, (ids, _) = lens_of(), documents()
    ids[:, 0] = VOCAB - 1  # no word, see tiny.Tokenizer
    is_word = lens.verbalizer.is_word
    text = TeacherText().words(ids, torch.tensor([0, 1, 3]), 4, lens.token_counts, is_word)
    assert is_word[text].all()
    assert text_nats(lens.verbalizer(activations(), text), text).max() < 100  # not 1e4


def test_padding_and_neighbours_change_no_text() -> None:
    longer = torch.cat([IDS, torch.full((2, 5), 6)], dim=1)
    teacher = TeacherText(rare=3)
    alone = [teacher.words(longer[[i]], POSITION[[i]], 5, COUNTS, COUNTS > 0) for i in range(2)]
    assert torch.equal(torch.cat(alone), teacher.words(IDS, POSITION, 5, COUNTS, COUNTS > 0))


def test_words_are_counted_over_the_training_part_in_pieces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COUNTED_AT_ONCE", 4)
    tokens = np.array([3, 1, 1, 0, 3, 3, 5, 1, 3], np.uint16)
    store = SimpleNamespace(stream=lambda part: SimpleNamespace(tokens=tokens[: 9 * (part == 0)]))
    data: Any = SimpleNamespace(store=store)
    is_word = torch.tensor([False, *[True] * 6])
    assert module.word_counts(data, is_word).tolist() == [0, 3, 0, 4, 0, 1, 0]


@pytest.mark.parametrize("rare", [-1, 7])
def test_impossible_numbers_of_rare_words_are_refused(rare: int) -> None:
    with pytest.raises(ValueError, match=r"0 or more, and no more than the 6 words .* or raise"):
        TeacherText(rare).check(6)
