"""Text to tokens and back: one class around a `tokenizers` pipeline, whichever way it was made."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from tokenizers import Encoding, Tokenizer

from datamodules.core.store import cache_root, digest_of, file_digest
from datamodules.tokenizers.chat_template import Message, Renderer, named_template
from datamodules.tokenizers.hugging_face import files_of
from datamodules.tokenizers.spelling import (
    anchor,
    byte_lengths,
    may_drop,
    spells,
    whole_words,
    without_first_space,
    words_of,
)

Kind = Literal["characters", "words", "bytes", "bpe", "folder"]
DEFAULT_VOCAB_SIZE = 8000
# What must have room, of each kind whose vocabulary can be larger or smaller.
SMALLEST = {"bpe": (257, "256 bytes and end-of-text"), "words": (2, "a word and end-of-text")}


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """A tokenizer with the special tokens that language models need.

    A special token that stands in a text counts as that token.

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

    @cached_property
    def special_ids(self) -> np.ndarray:
        """Ids of the special tokens, ascending int64; a text is decoded without them."""
        added = self.backend.get_added_tokens_decoder().items()
        return np.array(sorted(i for i, token in added if token.special), np.int64)

    def encode_batch(self, texts: Sequence[str], continues: bool = False) -> list[np.ndarray]:
        """Return the token ids of each text, [n] int64, without special tokens around it.

        Args:
            texts: to tokenise.
            continues: the texts go on in the middle of others, so that they get no space before
                their first word where the tokenizer puts one.

        Raises:
            ValueError: a text holds a character or a word that the vocabulary cannot spell.
        """
        self._check_spelling(texts)
        backend = self._without_first_space if continues else self.backend
        encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of one text, [n] int64, as `encode_batch`."""
        return self.encode_batch([text])[0]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[Encoding]:
        """Return `ids` of each text and `offsets`, the characters from which each token comes."""
        self._check_spelling(texts)
        return self._with_exact_offsets.encode_batch(list(texts), add_special_tokens=False)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def decode_continuation(
        self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of token ids that follow others.

        Some decoders take the space before the first word of a text away; here it stays.
        """
        anchor = self._anchor
        if anchor is None:
            return self.decode(ids, skip_special_tokens)
        return self.decode([anchor, *ids], skip_special_tokens)[len(self.decode([anchor])) :]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Return the text of a chat, special tokens included.

        Args:
            messages: each with a role and its content.
            add_generation_prompt: end where the assistant's answer begins.

        Raises:
            ValueError: there is no chat template, or it refuses these messages.
        """
        if self._renderer is None:
            raise ValueError(
                "the tokenizer has no chat template, which turns messages into text; name one "
                "with data.tokenizer.chat_template: a Jinja file, or plain."
            )
        return self._renderer(messages, add_generation_prompt)

    def byte_lengths(self) -> np.ndarray | None:
        """Return how many UTF-8 bytes each token spells, [V] int64; special tokens spell none.

        Over the tokens of a text they add up to the bytes of the text as the tokenizer normalises
        it, with the space that some put before its first word. None where tokens do not spell the
        text, such as pieces that hold no spaces.
        """
        return byte_lengths(self.backend)

    def hugging_face_files(self) -> dict[str, str]:
        """Return file name -> content of a folder that transformers' AutoTokenizer reads."""
        return files_of(self.backend, dict(self.special_tokens), self.chat_template)

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

    @cached_property
    def _anchor(self) -> int | None:
        return anchor(self.backend)

    @cached_property
    def _renderer(self) -> Renderer | None:
        if self.chat_template is None:
            return None
        return Renderer(self.chat_template, dict(self.special_tokens))

    @cached_property
    def _without_first_space(self) -> Tokenizer:
        return without_first_space(self.backend)

    @cached_property
    def _with_exact_offsets(self) -> Tokenizer:
        """A copy whose tokens keep their spaces: processors may trim these from the offsets."""
        copy = Tokenizer.from_str(self.backend.to_str())
        copy.post_processor = None  # type: ignore[assignment]
        return copy

    @cached_property
    def _known_characters(self) -> set[str] | None:
        """Those found to be spelled so far; none where every character is."""
        return set() if may_drop(self.backend) else None

    @cached_property
    def _known_words(self) -> frozenset[str] | None:
        """All of them; none where tokens are no whole words."""
        return whole_words(self.backend)

    def _check_spelling(self, texts: Sequence[str]) -> None:
        if self._known_words is not None:
            self._check_words(texts, self._known_words)
        elif self._known_characters is not None:
            self._check_characters(texts, self._known_characters)

    def _check_words(self, texts: Sequence[str], known: frozenset[str]) -> None:
        for text in texts:
            if known.issuperset(words_of(text)):
                continue
            for token in self.backend.get_added_tokens_decoder().values():
                text = text.replace(token.content, " ")
            words = words_of(text)
            for position, word in enumerate(words):
                if word not in known:
                    near = " ".join(words[max(0, position - 3) : position + 4])
                    raise ValueError(
                        f'the tokenizer does not know the word "{word}" in {near!r}; add a '
                        "training text that has it, or use data.tokenizer.kind bytes or bpe, which "
                        "spell every word."
                    )

    def _check_characters(self, texts: Sequence[str], known: set[str]) -> None:
        for text in texts:
            for character in set(text) - known:
                if spells(self.backend, character):
                    known.add(character)
            if known.issuperset(text):
                continue
            for token in self.backend.get_added_tokens_decoder().values():
                text = text.replace(token.content, "")
            for position, character in enumerate(text):
                if character not in known:
                    near = text[max(0, position - 15) : position + 15]
                    raise ValueError(
                        f'the tokenizer does not know the character "{character}" '
                        f"(U+{ord(character):04X}) in {near!r}, and would drop it; add a training "
                        "text that has it, or use data.tokenizer.kind bytes or bpe, which spell "
                        "every character."
                    )


@dataclass(frozen=True)
class TokenizerOptions:
    """Which tokenizer turns text into tokens.

    Args:
        kind: `characters` of the training text, its `words` between white space, `bytes`, byte
            pairs trained on the training text (`bpe`), or that of a Hugging Face folder
            (`folder`).
        vocab_size: the most tokens of `bpe` (at least 257) or `words` (all of which must have
            room), end-of-text included; a short text gives fewer. None is 8000.
        min_count: of `words`: those of fewer texts, and those that are unknown, become one token;
            none keeps all words and refuses unknown ones.
        path: of `folder`.
        chat_template: a Jinja file that turns messages into text, or the built-in `plain`; none
            keeps that of the folder.
    """

    kind: Kind = "bytes"
    vocab_size: int | None = None
    path: str | None = None
    chat_template: str | None = None
    min_count: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(
                f'tokenizer.kind must be one of {", ".join(get_args(Kind))}, got "{self.kind}".'
            )
        if self.vocab_size is not None:
            self._check_vocab_size(self.vocab_size)
        if self.min_count is not None and (self.kind != "words" or self.min_count < 1):
            raise ValueError(
                f"tokenizer.min_count belongs to kind words and is at least 1, got "
                f"{self.min_count} with kind {self.kind}; leave it out."
            )
        if self.path is not None and self.kind != "folder":
            raise ValueError(
                f'tokenizer.path "{self.path}" has no effect on tokenizer.kind {self.kind}; leave '
                "it out, or choose folder."
            )
        if self.path is None and self.kind == "folder":
            raise ValueError(
                "tokenizer.kind folder needs tokenizer.path, a folder with a tokenizer.json."
            )

    def _check_vocab_size(self, size: int) -> None:
        if self.kind not in SMALLEST:
            raise ValueError(
                f"tokenizer.vocab_size {size} has no effect on tokenizer.kind {self.kind}, whose "
                f"vocabulary is what it is; leave it out, or choose {' or '.join(SMALLEST)}."
            )
        smallest, content = SMALLEST[self.kind]
        if size < smallest:
            raise ValueError(
                f"tokenizer.vocab_size must be at least {smallest} ({content}), got {size}; raise "
                "it, or choose tokenizer.kind bytes."
            )

    def facts(self) -> dict[str, Any]:
        """Return plain values on which the tokenizer depends, besides the texts.

        Raises:
            FileNotFoundError: the folder or the template does not exist.
        """
        facts = asdict(self)
        if self.min_count is None:
            del facts["min_count"]  # stores of older versions stay where they are
        if self.kind in SMALLEST:
            facts["vocab_size"] = self.vocab_size or DEFAULT_VOCAB_SIZE
        if self.path is not None:
            from datamodules.tokenizers.pretrained import tokenizer_files

            root = cache_root()
            facts["path"] = [[f.name, file_digest(f, root)] for f in tokenizer_files(self.path)]
        if self.chat_template is not None:
            facts["chat_template"] = named_template(self.chat_template)
        return facts


def make_tokenizer(options: TokenizerOptions, texts: Iterator[str]) -> TextTokenizer:
    """Return the tokenizer that the options describe.

    Args:
        options: which one.
        texts: of training; read where the vocabulary comes from them (characters, words, bpe).

    Raises:
        FileNotFoundError: the folder or the template does not exist.
        ValueError: there is no text to take the vocabulary from, or the folder is incomplete.
    """
    template = None if options.chat_template is None else named_template(options.chat_template)
    if options.path is not None:
        from datamodules.tokenizers.pretrained import folder_tokenizer  # it needs this class

        return folder_tokenizer(Path(options.path).expanduser(), template)
    from datamodules.tokenizers import trained

    if options.kind == "characters":
        return trained.character_tokenizer(texts, template)
    vocab_size = options.vocab_size or DEFAULT_VOCAB_SIZE
    if options.kind == "words":
        return trained.word_tokenizer(texts, vocab_size, template, options.min_count)
    if options.kind == "bpe":
        return trained.bpe_tokenizer(texts, vocab_size, template)
    return trained.byte_tokenizer(template)
