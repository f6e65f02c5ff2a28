"""How texts become token ids, and rows of them that are kept in the cache."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.store import cache_root, digest_of, made_once
from datamodules.text.framing import Framing, TextLimits
from datamodules.text.token_rows import TokenRows, TokenRowsWriter
from datamodules.tokenizers.text_tokenizer import TextTokenizer

KEPT_TEXTS = 200_000
ROWS_VERSION = 1  # of how texts become rows of tokens
TEXTS_AT_ONCE = 1024


class TextEncoding:
    """Turns texts into token ids as a recipe says; each process remembers those it has seen.

    Args:
        recipe: `tokenizer` of `TextTokenizer.to_dict`, and `text`, fields of `TextLimits`.
    """

    def __init__(self, recipe: dict[str, Any]) -> None:
        self.tokenizer = TextTokenizer.from_dict(recipe["tokenizer"])
        self.limits = TextLimits(**recipe["text"])
        self.framing = Framing.of(self.tokenizer, self.limits)
        self._known: dict[str, np.ndarray] = {}

    def ids(self, text: str) -> np.ndarray:
        """Return the token ids of a text, [n] int64, whole and without marks."""
        ids = self._known.get(text)
        if ids is None:
            ids = self.ids_once(text)
            if len(self._known) < KEPT_TEXTS:
                self._known[text] = ids
        return ids

    def ids_once(self, text: str) -> np.ndarray:
        """Return the same as `ids`, of a text that does not come again: nothing is kept."""
        return self.tokenizer.encode(self.limits.normalised(text))

    def ids_of(self, texts: Sequence[str], continues: bool = False) -> list[np.ndarray]:
        """Return the same as `ids_once` of several texts.

        Args:
            texts: any.
            continues: they go on behind another text and a blank, which their tokens begin with.
        """
        known = [self.limits.normalised(text) for text in texts]
        if continues:
            known = [f" {text}" if text else "" for text in known]
        return self.tokenizer.encode_batch(known, continues)

    @cached_property
    def digest(self) -> str:
        """Hex digest of all that decides the ids of a text."""
        return digest_of([self.tokenizer.digest, asdict(self.limits)])


def kept_tokens(
    facts: Sequence[object],
    encoding: TextEncoding,
    texts: Callable[[], Iterable[str]],
    most: int | None,
) -> TokenRows:
    """Return the tokens of texts, kept in the cache.

    Args:
        facts: plain JSON that tells these texts from all others.
        encoding: of the texts.
        texts: yields them, where they are not kept yet.
        most: tokens of one text that are kept, its first; none keeps all.
    """
    key = digest_of([ROWS_VERSION, *facts, encoding.digest, most])

    def make(folder: Path) -> None:
        with TokenRowsWriter(folder, "texts", encoding.tokenizer.vocab_size) as writer:
            left = iter(texts())
            while some := list(islice(left, TEXTS_AT_ONCE)):
                writer.add(ids[:most] for ids in encoding.ids_of(some))

    return TokenRows(made_once(cache_root() / "token_rows" / key, make), "texts")
