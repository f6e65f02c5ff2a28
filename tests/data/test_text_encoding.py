"""Texts as encoder inputs, and as search terms."""

import numpy as np
import pytest
import torch

from datamodules.text.encoding import TextEncoding, TextLimits
from datamodules.tokenizers.text import TokenizerOptions, make_tokenizer


@pytest.mark.parametrize("begin_id", [None, 9])
def test_rows_are_padded_as_one_by_one(begin_id: int | None) -> None:
    tokenizer = make_tokenizer(TokenizerOptions(), iter(())).to_dict()
    tokenizer |= {"begin_id": begin_id, "end_id": 8, "special_tokens": {}}
    limits = {"max_length": 7, "max_query_length": 2}
    encoding = TextEncoding({"tokenizer": tokenizer, "text": limits})
    begin = [] if begin_id is None else [begin_id]
    query, text, nothing = np.array([1, 2, 3]), np.array([4, 5, 6], np.uint16), np.zeros(0, int)
    room = 7 - len(begin) - 4
    pair = [*begin, 1, 2, 8, *[4, 5, 6][:room], 8]
    singles = [[*begin, 4, 5, 6, 8], [*begin, 8]]
    first = len(begin) + 3
    for batch, rows in (
        (encoding.rows([text], [query]), [pair]),
        (encoding.rows([text, nothing]), singles),
    ):
        width = max(map(len, rows))
        assert batch["input_ids"].tolist() == [row + [0] * (width - len(row)) for row in rows]
        lengths = torch.tensor([[len(row)] for row in rows])
        assert torch.equal(batch["attention_mask"], torch.arange(width) < lengths)
        if rows == [pair]:
            segments = torch.tensor([[int(place >= first) for place in range(len(pair))]])
            assert torch.equal(batch["segment_ids"], segments)
        else:
            assert "segment_ids" not in batch


def test_a_text_becomes_its_terms_before_it_is_tokenised():
    assert TextLimits(stemmer="english").normalised("Flows, of AIR.") == "flow of air"
    assert TextLimits(lower_case=False).normalised("Flows, of AIR.") == "Flows, of AIR."
