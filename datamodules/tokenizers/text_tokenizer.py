"""Text to tokens and back: one class around a `tokenizers` pipeline, whichever way it was made."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from datamodules.cache import digest_of

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """A tokenizer with the special tokens that language models need.

    Args:
        backend: the pipeline; it adds no special token of its own.
        end_id: token that ends a document or an answer.
        begin_id: token that begins a document; none where the vocabulary has none.
        chat_template: Jinja template that turns messages into text.
        special_tokens: name -> token of the Hugging Face layout, such as pad_token.
    """

    backend: Tokenizer
    end_id: int
    begin_id: int | None = None
    chat_template: str | None = None
    special_tokens: tuple[tuple[str, str], ...] = ()

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, [n] int64, without special tokens."""
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of one text, [n] int64, without special tokens."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values from which `from_dict` makes the same tokenizer."""
        return {
            "backend": self.backend.to_str(),
            "end_id": self.end_id,
            "begin_id": self.begin_id,
            "chat_template": self.chat_template,
            "special_tokens": dict(self.special_tokens),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TextTokenizer":
        """Return the tokenizer that `to_dict` described."""
        return cls(
            Tokenizer.from_str(values["backend"]),
            values["end_id"],
            values["begin_id"],
            values["chat_template"],
            tuple(values["special_tokens"].items()),
        )

    @cached_property
    def digest(self) -> str:
        """Hex digest of all that decides the tokens of a text."""
        return digest_of(self.to_dict())


@dataclass(frozen=True)
class TokenizerOptions:
    """Which tokenizer turns text into tokens.

    Args:
        kind: `characters` of the training text, `bytes`, byte pairs trained on the training text
            (`bpe`), or that of a Hugging Face folder (`folder`).
        vocab_size: of `bpe`, end-of-text included.
        path: of `folder`.
    """

    kind: str = "bytes"
    vocab_size: int = 8000
    path: str | None = None

    def __post_init__(self) -> None:
        kinds = ("characters", "bytes", "bpe", "folder")
        if self.kind not in kinds:
            raise ValueError(f'tokenizer.kind must be one of {", ".join(kinds)}, got "{self.kind}".')


def byte_tokenizer() -> TextTokenizer:
    """Return the tokenizer whose tokens are the 256 bytes of UTF-8, and end-of-text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _with_end(backend)


def character_tokenizer(texts: Sequence[str]) -> TextTokenizer:
    """Return the tokenizer whose tokens are the characters of these texts, and end-of-text."""
    alphabet = sorted(set().union(*map(set, texts)))
    vocabulary = {symbol: i for i, symbol in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.Fuse()
    return _with_end(backend)


def _with_end(backend: Tokenizer) -> TextTokenizer:
    backend.add_special_tokens([END_OF_TEXT])
    end_id = backend.token_to_id(END_OF_TEXT)
    special = (("bos_token", END_OF_TEXT), ("eos_token", END_OF_TEXT), ("pad_token", END_OF_TEXT))
    return TextTokenizer(backend, end_id, end_id, None, special)
