"""Codes without training texts are found by their descriptions; the others stay unchanged."""

import numpy as np
import pytest
import torch

from datamodules import Columns, OccupationDataModule
from datamodules.occupations.store import CodeBookOptions
from datamodules.tokenizers.codes import TextOptions
from lit_models.occupation_coder import linear
from lit_models.occupation_coder.loss import OccupationLossOptions
from tests.occupation_coder.test_module import small_coder, trainer_of
from tests.occupation_coder.tiny import padded
from tests.text_corpora import table


def test_the_margin_is_the_cosine_less_what_it_costs_to_have_no_text():
    options = linear.LinearOptions(ngram_sizes=(2,), num_features=1 << 14)
    head = linear.LinearHead(4, options)
    head.weight.data[0], head.bias.data[0] = 0.5, 0.25  # a code that has texts
    recipe = TextOptions(max_length=9).to_recipe()
    recipe["code_book"] = {"descriptions": ["abab", "abab", "", "xy"]}
    linear.describe(head, recipe, np.array([True, False, False, False]))
    assert head.bias.tolist() == [0.25, -1.5, -1.0, -1.5]
    assert (head.weight[0] == 0.5).all()
    assert head.weight[2].norm() == 0  # without a description
    margins = head(*padded(["ab"], 2))[0] / linear.LOGIT_PER_MARGIN
    # <a ab ba ab b> against <a ab b>: 1 + 2 + 1 over the lengths
    assert float(margins[1]) == pytest.approx(4 / (7 * 3) ** 0.5 - 1.5)
    assert float(margins[3]) == pytest.approx(-1.5)


def test_a_code_without_rows_is_found_and_rows_of_others_are_coded_as_before(tmp_path, own_cache):
    trades = {"smith": "83110", "tailor": "79100", "weaver": "75400", "joiner": "95415"}
    trades |= {"mason": "95120", "baker": "77610", "glover": "79475", "hatter": "79310"}
    rows = [(f"{place} {trade}", code) for place in "abcdef" for trade, code in trades.items()]
    files = {"train_files": table(tmp_path / "rows.csv", rows, ("text", "code_1"))}
    book = [(code, trade) for trade, code in trades.items()] + [("55240", "Chimney Sweep")]
    path = table(tmp_path / "book.csv", book, ("code", "description"))
    found = {}
    for is_on in (False, True):
        options = linear.LinearOptions(num_features=4096, descriptions=is_on)
        coder = small_coder(loss=OccupationLossOptions(linear=options))
        trainer = trainer_of(tmp_path / str(is_on), epochs=1, limit_val_batches=0)
        torch.manual_seed(0)
        data = {"columns": Columns(), "code_book": CodeBookOptions(path), "global_batch_size": 48}
        trainer.fit(coder, OccupationDataModule(**files, **data))
        texts = ["chimney sweep", *(text for text, _ in rows)]
        found[is_on] = [one.codes for one in coder.code(texts, method="flat")]
    assert found[True][0] == ["55240"] != found[False][0]
    assert found[True][1:] == found[False][1:] == [[code] for _, code in rows]
