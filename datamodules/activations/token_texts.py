"""Texts of single tokens, and of the tokens around one: no character is ever shown in pieces."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from datamodules.tokenizers.text_tokenizer import TextTokenizer

AROUND = 8  # tokens before and after the one that is shown
MARGIN = 4  # more that are decoded: no character has more bytes, and so none has more tokens

Ids = Sequence[int] | np.ndarray


class Context(NamedTuple):
    """The text around a token. Joined, they are the text as it stands in the document."""

    before: str
    token: str
    after: str


def token_texts(tokenizer: TextTokenizer, ids: Ids) -> list[str]:
    """Return the text of each token of a text; joined they are the whole text.

    A character of several tokens is that of the last of them, and the others are empty.

    Args:
        tokenizer: of the tokens.
        ids: [n], of a text that may go on from another.
    """

    def text(some: Ids) -> str:
        return tokenizer.decode_continuation(some, skip_special_tokens=False)

    whole, alone = text(ids), [text([i]) for i in ids]
    if "".join(alone) == whole:
        return alone
    found, done = [], ""
    for end in range(1, len(ids) + 1):
        start = text(ids[:end])
        if start + text(ids[end:]) == whole:  # else a character is cut here
            found.append(start[len(done) :])
            done = start
        else:
            found.append("")
    return found


def context_of(tokenizer: TextTokenizer, ids: np.ndarray, position: int) -> Context:
    """Return the text around a position of a document.

    Args:
        tokenizer: of the tokens.
        ids: [n] int64, the document.
        position: of the token in the middle; where it is a part of a character, the whole
            character is shown.
    """
    first = max(0, position - AROUND - MARGIN)
    texts = token_texts(tokenizer, ids[first : position + 1 + AROUND + MARGIN])
    place = position - first
    end = place + 1
    while end < len(texts) and not any(texts[place:end]):
        end += 1
    before, after = texts[max(0, place - AROUND) : place], texts[end : end + AROUND]
    return Context("".join(before), "".join(texts[place:end]), "".join(after))
