"""Rows that depend on what the lens was trained with: its mean, its teacher."""

import torch

from tests.consistency_lens.cases import D, case_of
from tests.consistency_lens.test_controls import fve, rows_of


@torch.no_grad()
def test_the_mean_is_that_of_the_lens_whatever_the_data_say():
    case = case_of()
    case.lens.mean += 1
    assert torch.equal(case.rows()["mean"](), case.lens.mean.expand(6, D))
    assert fve(case, case.rows()["mean"]()) == 0


@torch.no_grad()
def test_the_teachers_text_is_read_by_the_reader_of_now_and_by_the_reference():
    case = case_of(rare=2)
    found, ids = rows_of(case), case.batch["input_ids"]
    for row, position in enumerate(case.position.tolist()):
        recent = [int(ids[row, position]), int(ids[row, position - 1])]
        others = {i for i in ids[row, :position].tolist() if i and i not in recent}
        rare = sorted(others)[:2]  # the number of a word is how often it occurs
        text = torch.tensor([[*recent, *rare, *[recent[0]] * (2 - len(rare))]])
        words, current = case.lens.words(text), case.current[row : row + 1]
        for name, part in (("teacher_text", case.lens), ("_separate", case.lens.reference)):
            read = part.reconstructor(words, current)[0]
            name = name if name[0] == "t" else f"teacher_text{name}"
            torch.testing.assert_close(found[name][row], read, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found["teacher_text"], found["true_text"])
    plain = rows_of(case_of())
    assert torch.equal(plain["teacher_text"], plain["true_text"])
