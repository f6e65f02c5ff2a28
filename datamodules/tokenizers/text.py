"""Tokenizers of texts: bytes, words, trained on a run's texts, or a model's own."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from datamodules.core.store import cache_root, digest_of, file_digest
from datamodules.tokenizers.pipelines import (
    Message,
    anchor,
    byte_lengths,
    may_drop,
    named_template,
    spells,
    whole_words,
    without_first_space,
    words_of,
)

Kind = Literal["characters", "words", "bytes", "bpe", "folder"]
DEFAULT_VOCAB_SIZE = 8000


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
        if self.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template, which turns messages into text; name one "
                "with data.tokenizer.chat_template: a Jinja file, or plain."
            )
        from jinja2 import TemplateError

        try:
            return self._renderer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template refuses these messages ({error}); correct them, or name "
                "another template with data.tokenizer.chat_template."
            ) from error

    def byte_lengths(self) -> np.ndarray | None:
        """Return how many UTF-8 bytes each token spells, [V] int64; special tokens spell none.

        Over the tokens of a text they add up to the bytes of the text as the tokenizer normalises
        it, with the space that some put before its first word. None where tokens do not spell the
        text, such as pieces that hold no spaces.
        """
        return byte_lengths(self.backend)

    def hugging_face_files(self) -> dict[str, str]:
        """Return file name -> content of a folder that transformers' AutoTokenizer reads."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **dict(self.special_tokens),
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        return {
            PIPELINE_FILE: self.backend.to_str(pretty=True) + "\n",
            CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        }

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
    def _renderer(self) -> Any:
        """A tokenizer of transformers, in whose sandbox templates run: they come from strangers.
        Rendering reads the special tokens and no vocabulary."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE()),
            chat_template=self.chat_template,
            **dict(self.special_tokens),
        )

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
    def _known_words(self) -> frozenset[str] | None:
        """All words of a pipeline that has no token for others; `None` of another kind."""
        return whole_words(self.backend)

    @cached_property
    def _known_characters(self) -> set[str] | None:
        """Those that are spelled, as far as they were asked for; `None` where every one is."""
        return set() if may_drop(self.backend) else None

    def _unknown(self, text: str) -> str | None:
        """Return the first word or character of a text that the vocabulary cannot spell."""
        if self._known_words is not None:
            return next((word for word in words_of(text) if word not in self._known_words), None)
        known = self._known_characters
        if known is None or known.issuperset(text):
            return None
        known.update(c for c in set(text) - known if spells(self.backend, c))
        return next((character for character in text if character not in known), None)

    def _check_spelling(self, texts: Sequence[str]) -> None:
        for text in texts:
            if self._unknown(text) is None:
                continue
            # A special token is found as a whole.
            for token in self.backend.get_added_tokens_decoder().values():
                text = text.replace(token.content, "" if self._known_words is None else " ")
            unknown = self._unknown(text)
            if unknown is not None:
                kind = "character" if self._known_words is None else "word"
                place = text.index(unknown)
                raise ValueError(
                    f'the tokenizer does not know the {kind} "{unknown}" in '
                    f"{text[max(0, place - 15) : place + len(unknown) + 15]!r}; add a training "
                    "text that has it, or use data.tokenizer.kind bytes or bpe, which spell all."
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
        smallest = {"bpe": 257, "words": 2}.get(self.kind)
        if self.vocab_size is not None and (smallest is None or self.vocab_size < smallest):
            raise ValueError(
                f"tokenizer.vocab_size {self.vocab_size} does not fit kind {self.kind}: it is at "
                "least 257 for bpe (256 bytes and end-of-text), 2 for words, and else left out."
            )
        if self.min_count is not None and (self.kind != "words" or self.min_count < 1):
            raise ValueError(
                f"tokenizer.min_count belongs to kind words and is at least 1, got "
                f"{self.min_count} with kind {self.kind}; leave it out."
            )
        if (self.path is not None) != (self.kind == "folder"):
            raise ValueError(
                f"tokenizer.path is {self.path} and tokenizer.kind {self.kind}; a folder with a "
                "tokenizer.json needs both the path and kind folder, other kinds no path."
            )

    def facts(self) -> dict[str, Any]:
        """Return plain values on which the tokenizer depends, besides the texts.

        Raises:
            FileNotFoundError: the folder or the template does not exist.
        """
        facts = asdict(self)
        if self.kind in ("bpe", "words"):
            facts["vocab_size"] = self.vocab_size or DEFAULT_VOCAB_SIZE
        if self.path is not None:
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
        return folder_tokenizer(Path(options.path).expanduser(), template)
    if options.kind == "characters":
        return character_tokenizer(texts, template)
    vocab_size = options.vocab_size or DEFAULT_VOCAB_SIZE
    if options.kind == "words":
        return word_tokenizer(texts, vocab_size, template, options.min_count)
    if options.kind == "bpe":
        return bpe_tokenizer(texts, vocab_size, template)
    return byte_tokenizer(template)


PIPELINE_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
SPECIAL_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
MODEL_FILES = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model")
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def folder_tokenizer(folder: Path, chat_template: str | None = None) -> TextTokenizer:
    """Return the tokenizer of a folder.

    Args:
        folder: with tokenizer.json, or files from which transformers builds it.
        chat_template: wins over that of the folder.

    Raises:
        FileNotFoundError: there is no such folder, or no tokenizer in it.
        ValueError: its files are damaged, or name no end-of-text token.
    """
    tokenizer_files(str(folder))
    config = {**_json(folder / SPECIAL_FILE), **_json(folder / CONFIG_FILE)}
    backend = _backend(folder)
    backend.no_truncation()  # tokenizer.json may hold both, and would cut texts in silence
    backend.no_padding()
    special = {name: config[name] for name in NAMES if config.get(name)}
    special = {n: t["content"] if isinstance(t, dict) else t for n, t in special.items()}
    end = "eos_token" if "eos_token" in special else "sep_token"  # BERT has the latter alone
    ids = {name: backend.token_to_id(token) for name, token in special.items()}
    end_id = ids.get(end)
    if end_id is None:
        raise ValueError(
            f"{folder} names no end-of-text token of its vocabulary, which ends documents and "
            f'answers; it names {special.get(end)}. Set "eos_token" in its {CONFIG_FILE}.'
        )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    # A template writes them into the text, where they must be found.
    backend.add_special_tokens(
        [t for n, t in special.items() if ids[n] is not None and t not in known]
    )
    return TextTokenizer(
        backend,
        end_id,
        ids.get("bos_token"),
        chat_template or _template(folder, config),
        tuple((name, token) for name, token in special.items() if ids[name] is not None),
    )


def tokenizer_files(path: str) -> list[Path]:
    """Return the files of a folder on which its tokenizer depends.

    Raises:
        FileNotFoundError: there is no such folder, or no tokenizer in it.
    """
    folder = Path(path).expanduser()
    if not any((folder / name).is_file() for name in (PIPELINE_FILE, *MODEL_FILES)):
        lack = "holds no tokenizer" if folder.is_dir() else "is no folder"
        raise FileNotFoundError(
            f"tokenizer.path: {folder} {lack} "
            f"({PIPELINE_FILE}, {', '.join(MODEL_FILES)}); name the local folder of a Hugging Face "
            "tokenizer. Nothing is downloaded."
        )
    names = (PIPELINE_FILE, *MODEL_FILES, CONFIG_FILE, SPECIAL_FILE, TEMPLATE_FILE)
    return [folder / name for name in names if (folder / name).is_file()]


def _backend(folder: Path) -> Tokenizer:
    path = folder / PIPELINE_FILE
    if path.is_file():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(
                f"{path} cannot be read by the tokenizers library ({error}); copy it again."
            ) from error
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not hasattr(made, "backend_tokenizer"):
        raise ValueError(
            f"{folder}: transformers reads it as a {type(made).__name__} without a fast pipeline; "
            f"save one with a {PIPELINE_FILE}."
        )
    return made.backend_tokenizer


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON in UTF-8 ({error}); copy it again.") from error


END_OF_TEXT = "<|endoftext|>"
UNKNOWN_WORD = "<|unknown|>"


def byte_tokenizer(chat_template: str | None = None) -> TextTokenizer:
    """Return the tokenizer whose tokens are the 256 bytes of UTF-8, and end-of-text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _with_end(backend, chat_template)


def character_tokenizer(texts: Iterable[str], chat_template: str | None = None) -> TextTokenizer:
    """Return the tokenizer whose tokens are the characters of these texts, and end-of-text.

    Raises:
        ValueError: there is no text.
    """
    alphabet: set[str] = set()
    for text in texts:
        alphabet.update(text)
    if not alphabet:
        raise ValueError(_no_text("characters"))
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(sorted(alphabet))}, []))
    backend.decoder = decoders.Fuse()
    return _with_end(backend, chat_template)


def word_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    chat_template: str | None = None,
    min_count: int | None = None,
) -> TextTokenizer:
    """Return the tokenizer whose tokens are the words of these texts, and end-of-text.

    A word is what stands between white space; a decoded text has one space between two words.

    Args:
        texts: any number, read once.
        vocab_size: the most tokens, end-of-text included.
        chat_template: see `TextTokenizer`.
        min_count: words of fewer texts, and unknown ones, become one token of their own; none
            keeps all words and refuses unknown ones.

    Raises:
        ValueError: there is no word, or there are more than vocab_size.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(set(words_of(text.replace(END_OF_TEXT, " "))))
    words = sorted(word for word, count in counts.items() if count >= (min_count or 1))
    if not words:
        raise ValueError(_no_text("words"))
    # No word is empty: without a token for the unknown, such a word is refused.
    unknown = "" if min_count is None else UNKNOWN_WORD
    vocabulary = {word: i for i, word in enumerate([*words, *([unknown] if unknown else [])])}
    if len(vocabulary) >= vocab_size:
        raise ValueError(
            "the training text has more different words than there is room for beside the special "
            f"tokens in tokenizer.vocab_size {vocab_size}; raise it, or data.tokenizer.min_count, "
            "which makes rare words unknown, or use data.tokenizer.kind bpe, which spells them."
        )
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _with_end(backend, chat_template, unknown)


def bpe_tokenizer(
    texts: Iterable[str], vocab_size: int, chat_template: str | None = None
) -> TextTokenizer:
    """Return the tokenizer of the most frequent byte pairs of these texts, and end-of-text.

    Texts are cut into words as GPT-2 does it; the same texts in any order give the same tokens.

    Args:
        texts: any number, read once.
        vocab_size: end-of-text included; fewer tokens where the texts have no more pairs.
        chat_template: see `TextTokenizer`.

    Raises:
        ValueError: there is no text.

    Source: Sennrich, Haddow, Birch 2016; bytes as in Radford et al. 2019, section 2.2.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    num_characters = 0

    def counted() -> Iterable[str]:
        nonlocal num_characters
        for text in texts:
            num_characters += len(text)
            yield text

    backend.train_from_iterator(counted(), trainer)
    if not num_characters:
        raise ValueError(_no_text("bpe"))
    return _with_end(backend, chat_template)


def _with_end(backend: Tokenizer, chat_template: str | None, unknown: str = "") -> TextTokenizer:
    backend.add_special_tokens([END_OF_TEXT, *([unknown] if unknown else [])])
    end_id = backend.token_to_id(END_OF_TEXT)
    assert end_id is not None
    special = [(name, END_OF_TEXT) for name in ("bos_token", "eos_token", "pad_token")]
    special += [("unk_token", unknown)] if unknown else []
    return TextTokenizer(backend, end_id, end_id, chat_template, tuple(special))


def _no_text(kind: str) -> str:
    return (
        f"tokenizer.kind {kind} takes its vocabulary from the training text, and there is none; "
        "name files with data.train_files, or use tokenizer.kind bytes."
    )


TEXT_RECIPE_KEY = "text_recipe"


def options_of_model(folder: str | None, given: TokenizerOptions | None) -> TokenizerOptions:
    """Return the options of the tokenizer for training.

    Args:
        folder: of the model's tokenizer, if it brings one.
        given: by the user; `None` takes the model's, else bytes. A chat template alone joins the
            model's tokenizer.

    Raises:
        ValueError: the user's tokenizer is not the model's.
    """
    if folder is None:
        return given or TokenizerOptions()
    if given is None:
        return TokenizerOptions(kind="folder", path=str(folder))
    if given == TokenizerOptions(chat_template=given.chat_template) != TokenizerOptions():
        return replace(given, kind="folder", path=str(folder))
    if given.path is None or Path(given.path).resolve() != Path(folder).resolve():
        named = given.path or f"kind {given.kind}"
        raise ValueError(
            f"data.tokenizer is {named}, and the pretrained model in {folder} was trained with "
            "its own; leave data.tokenizer out (null), but for its chat_template."
        )
    return given
