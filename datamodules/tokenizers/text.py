"""Tokenizers of texts: bytes, words, trained on a run's texts, or a model's own.

A pipeline of the tokenizers library is read as the JSON that its tokenizer.json holds. Chats are
rendered by Jinja templates of the Hugging Face kind, as transformers does it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import AddedToken, Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from datamodules.core.store import digest_of, file_digest

Kind = Literal["characters", "words", "bytes", "bpe", "folder"]
Message = Mapping[str, Any]  # role and content, and what else a template reads
TEXT_RECIPE_KEY = "text_recipe"
DEFAULT_VOCAB_SIZE = 8000
END_OF_TEXT = "<|endoftext|>"
UNKNOWN_WORD = "<|unknown|>"
PIPELINE_FILE, CONFIG_FILE = "tokenizer.json", "tokenizer_config.json"
SPECIAL_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
OPTIONS_OF = {"bpe": {"vocab_size"}, "words": {"vocab_size", "min_count"}, "folder": {"path"}}
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TEMPLATES = {
    "plain": (
        "{% for message in messages %}"
        "{{ message.role + ':\\n' + message.content }}"
        "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
        "{{ '\\n\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
    )
}
SPACE_MARK = "▁"  # of SentencePiece
SEQUENCES = ("normalizers", "pretokenizers", "decoders")
# Four characters are white space to Python, and not to `tokenizers`.
WORD = re.compile(r"(?:\S|[\x1c-\x1f])+")
BYT5_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}  # 0, 1, 2
BYT5_EXTRA = 125  # sentinels of pretraining, the last tokens
BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """A tokenizer with the special tokens that language models need.

    A special token that stands in a text counts as that token.
    """

    backend: Tokenizer  # the pipeline; it adds no special token of its own
    end_id: int  # token that ends a document or an answer
    # Token that begins a document; `None` where the vocabulary has none.
    begin_id: int | None = None
    chat_template: str | None = None  # Jinja template that turns messages into text
    # Name -> token of the Hugging Face layout, such as pad_token.
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def special_ids(self) -> np.ndarray:
        """Ids of the special tokens, ascending int64; a text is decoded without them."""
        added = self.backend.get_added_tokens_decoder().items()
        return np.array(sorted(i for i, token in added if token.special), np.int64)

    @cached_property
    def end_ids(self) -> list[int]:
        """Tokens that end a text: end-of-text, and what the chat template ends an answer with."""
        chat = [{"role": role, "content": "a turn"} for role in ("user", "assistant")]
        ends = [self.end_id]
        with suppress(ValueError):  # without a template, or with one that refuses such a chat
            _, behind = self.render(chat).rsplit("a turn", 1)
            ends += self.encode(behind.strip())[:1].tolist()
        return [i for i in dict.fromkeys(ends) if i == self.end_id or i in self.special_ids]

    def encode_batch(
        self, texts: Sequence[str], places: Sequence[str] = (), continues: bool = False
    ) -> list[np.ndarray]:
        """Return the token ids of each text, [n] int64, without special tokens around it.

        Args:
            places: file and line of each, for an error.
            continues: the texts go on in the middle of others, so that they get no space before
                their first word where the tokenizer puts one.

        Raises:
            ValueError: a text holds a character or a word that the vocabulary cannot spell.
        """
        encoder = self._without_first_space if continues else self._encoder
        encodings = self._encoded(encoder.encode_batch_fast, texts, places)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of one text, [n] int64, as `encode_batch`."""
        return self.encode_batch([text])[0]

    def encode_with_offsets(
        self, texts: Sequence[str], places: Sequence[str] = ()
    ) -> list[Encoding]:
        """Return `ids` of each text and `offsets`, the characters from which each token comes;
        arguments and errors as of `encode_batch`."""
        return self._encoded(self._encoder.encode_batch, texts, places)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def decode_continuation(
        self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of token ids that follow others, with the space before its first word,
        which some decoders take away."""
        if self._anchor is None:
            return self.decode(ids, skip_special_tokens)
        text = self.decode([self._anchor, *ids], skip_special_tokens)
        return text[len(self.decode([self._anchor])) :]

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[Message] = (),
    ) -> str:
        """Return the text of a chat, special tokens included; with `add_generation_prompt` it ends
        where the assistant's answer begins.

        Args:
            tools: what the assistant may call, as the template reads it.

        Raises:
            ValueError: there is no chat template, it refuses these messages, or it leaves out a
                tool or the call of one.
        """
        if self.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template, which turns messages into text; name one "
                "with data.tokenizer.chat_template: a Jinja file, or plain."
            )
        from jinja2 import TemplateError

        try:
            text = self._renderer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"the chat template refuses these messages ({error}); correct them, or name "
                "another template with data.tokenizer.chat_template."
            ) from error
        calls = chain.from_iterable(message.get("tool_calls") or () for message in messages)
        for tool in (*tools, *calls):
            name = str(tool.get("function", tool).get("name") or "")
            if name not in text:
                raise ValueError(
                    f'the chat template leaves the tool "{name}" out; name one that writes tools '
                    "with data.tokenizer.chat_template, or take tools and tool_calls out."
                )
        return text

    def byte_lengths(self) -> np.ndarray | None:
        """Return how many UTF-8 bytes each token spells, [V] int64; special tokens spell none.

        Over the tokens of a text they add up to the bytes of the text as the tokenizer normalises
        it, with the space that some put before its first word. `None` where tokens do not spell
        the text, such as pieces that hold no spaces.
        """
        pipeline = json.loads(self.backend.to_str())
        model, steps = pipeline["model"], _steps(pipeline["decoder"])
        kinds = {step["type"] for step in steps}
        is_of_bytes = "ByteLevel" in kinds
        is_marked = "Metaspace" in kinds or any(
            step["type"] == "Replace" and step["pattern"] == {"String": SPACE_MARK}
            for step in steps
        )
        spells = is_of_bytes or is_marked or (kinds == {"Fuse"} and not pipeline["pre_tokenizer"])
        has_pieces = model["type"] in ("BPE", "Unigram") and not model.get("end_of_word_suffix")
        if not (spells and has_pieces):
            return None
        alphabet = frozenset(pre_tokenizers.ByteLevel.alphabet())
        lengths = np.zeros(self.vocab_size, np.int64)
        for token, i in self.backend.get_vocab(with_added_tokens=True).items():
            if is_of_bytes and alphabet.issuperset(token):  # another piece spells itself
                lengths[i] = len(token)
            elif is_marked and BYTE_PIECE.fullmatch(token):
                lengths[i] = 1
            else:
                lengths[i] = len((token.replace(SPACE_MARK, " ") if is_marked else token).encode())
        for i, added in self.backend.get_added_tokens_decoder().items():
            lengths[i] = 0 if added.special else len(added.content.encode())
        return lengths

    def hugging_face_files(self) -> dict[str, str]:
        """Return file name -> content of a folder that transformers' AutoTokenizer reads."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        return {
            PIPELINE_FILE: self.backend.to_str(pretty=True) + "\n",
            CONFIG_FILE: json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain values from which `from_dict` makes the same tokenizer."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        own = {"backend": self.backend.to_str(), "special_tokens": dict(self.special_tokens)}
        return values | own

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TextTokenizer":
        """Return the tokenizer that `to_dict` described."""
        return cls(**{**values, "backend": Tokenizer.from_str(values["backend"])})

    @cached_property
    def digest(self) -> str:
        """Hex digest of all that decides the tokens of a text."""
        return digest_of(self.to_dict())

    @cached_property
    def _anchor(self) -> int | None:
        """A token whose text stays as it is, whatever is decoded behind it, if there is one."""
        special = self.backend.get_added_tokens_decoder()
        for token, i in sorted(self.backend.get_vocab().items(), key=lambda pair: pair[1]):
            if i in special or BYTE_PIECE.fullmatch(token):  # bytes join with those behind them
                continue
            text = self.backend.decode([i])
            is_word = text.isprintable() and text.strip() == text and "\ufffd" not in text
            if text and is_word and self.backend.decode([i, i]).startswith(text):
                return i
        return None

    @cached_property
    def _renderer(self) -> Any:
        """A tokenizer of transformers, in whose sandbox templates run: they come from strangers.
        Rendering reads the special tokens and no vocabulary."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE()),
            chat_template=self.chat_template,
            **self.special_tokens,
        )

    @cached_property
    def _encoder(self) -> Tokenizer:
        """The pipeline, which refuses what no token stands for, where byte pairs would drop it
        without a word, and keeps spaces within the offsets of tokens."""
        encoder = Tokenizer.from_str(self.backend.to_str())
        encoder.post_processor = None  # type: ignore[assignment]
        if isinstance(encoder.model, models.BPE) and encoder.model.unk_token is None:
            encoder.model.unk_token = ""  # which is in no vocabulary
        return encoder

    @cached_property
    def _without_first_space(self) -> Tokenizer:
        """The same without the space that it may put before a text's first word."""
        pipeline = json.loads(self._encoder.to_str())
        normalizer = pipeline["normalizer"]
        kept = [step for step in _steps(normalizer) if step["type"] != "Prepend"]
        if len(kept) < len(_steps(normalizer)):
            pipeline["normalizer"] = {"type": "Sequence", "normalizers": kept}
        for step in _steps(pipeline["pre_tokenizer"]):
            if step["type"] == "Metaspace":
                step["prepend_scheme"] = "never"
            elif "add_prefix_space" in step:  # of ByteLevel
                step["add_prefix_space"] = False
        return Tokenizer.from_str(json.dumps(pipeline))

    def _encoded(self, encode: Any, texts: Sequence[str], places: Sequence[str]) -> Any:
        """Return what a method of a pipeline makes of texts; a ValueError names the first word or
        character that the vocabulary cannot spell."""
        try:
            return encode(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises plain Exception
            kind = "word" if isinstance(self.backend.model, models.WordLevel) else "character"
            added = self.backend.get_added_tokens_decoder().values()
            special = re.compile("|".join(re.escape(token.content) for token in added) or "(?!)")
            for number, text in enumerate(texts):
                parts = special.split(text)
                place = f"{places[number]}: " if places else ""
                for piece in WORD.findall(" ".join(parts)) if kind == "word" else "".join(parts):
                    try:
                        self._encoder.encode(piece)
                    except Exception:  # as above
                        raise ValueError(
                            f'{place}the tokenizer does not know the {kind} "{piece}"; write the '
                            "text without it, or train on a text that has it, or with "
                            "data.tokenizer.kind bytes or bpe, which spell all."
                        ) from error
            raise


def _steps(step: dict[str, Any] | None) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    inner = next(step[name] for name in SEQUENCES if name in step)
    return [part for each in inner for part in _steps(each)]


@dataclass(frozen=True)
class TokenizerOptions:
    """Which tokenizer turns text into tokens.

    Args:
        kind: `characters` of the training text, its `words` between white space, `bytes`, byte
            pairs trained on the training text (`bpe`), or that of a Hugging Face folder
            (`folder`).
        vocab_size: the most tokens of `bpe` (256 of them are bytes) or `words` (all of which must
            have room), end-of-text included; a short text gives fewer. `None` is 8000.
        min_count: of `words`: those of fewer texts, and those that are unknown, become one token;
            `None` keeps all words and refuses unknown ones.
        path: of `folder`.
        chat_template: a Jinja file that turns messages into text, or the built-in `plain`; `None`
            keeps that of the folder.
    """

    kind: Kind = "bytes"
    vocab_size: int | None = None
    path: str | None = None
    chat_template: str | None = None
    min_count: int | None = None

    def __post_init__(self) -> None:
        names = ("vocab_size", "min_count", "path")
        given = {name for name in names if getattr(self, name) is not None}
        own = OPTIONS_OF.get(self.kind, set())
        if given - own or (self.kind == "folder" and not given):
            raise ValueError(
                f"tokenizer.kind {self.kind} takes {' and '.join(sorted(own)) or 'no size'}, got "
                f"{', '.join(sorted(given)) or 'none'}; name another kind, or leave out the rest."
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
            facts["path"] = [[f.name, file_digest(f)] for f in _folder_files(self.path)]
        if self.chat_template is not None:
            facts["chat_template"] = _named_template(self.chat_template)
        return facts


def _named_template(name: str) -> str:
    path = Path(name).expanduser()
    if name not in TEMPLATES and not path.is_file():
        raise FileNotFoundError(
            f'tokenizer.chat_template: "{name}" is no file and none of the built-in templates '
            f"({', '.join(TEMPLATES)}); name a Jinja file."
        )
    return TEMPLATES.get(name) or path.read_text("utf-8")


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


def make_tokenizer(options: TokenizerOptions, texts: Iterator[str]) -> TextTokenizer:
    """Return the tokenizer that the options describe.

    Args:
        texts: of training; read where the vocabulary comes from them (characters, words, bpe).

    Raises:
        FileNotFoundError: the folder or the template does not exist.
        ValueError: there is no text to take the vocabulary from, or the folder is incomplete.
    """
    template = options.chat_template and _named_template(options.chat_template)
    vocab_size = options.vocab_size or DEFAULT_VOCAB_SIZE
    if options.path is not None:
        made = _folder_tokenizer(Path(options.path).expanduser())
    elif options.kind == "characters":
        made = character_tokenizer(texts)
    elif options.kind == "words":
        made = word_tokenizer(texts, vocab_size, options.min_count)
    elif options.kind == "bpe":
        made = bpe_tokenizer(texts, vocab_size)
    else:
        made = byte_tokenizer()
    return replace(made, chat_template=template or made.chat_template)


def _folder_files(path: str) -> list[Path]:
    """Return the files of a folder on which its tokenizer depends; one of ByT5 has but a
    configuration."""
    folder = Path(path).expanduser()
    config = folder / CONFIG_FILE
    is_byt5 = config.is_file() and '"ByT5Tokenizer"' in config.read_text("utf-8")
    if not (is_byt5 or (folder / PIPELINE_FILE).is_file()):
        raise FileNotFoundError(
            f"tokenizer.path: {folder} holds no {PIPELINE_FILE}; name the local folder of a "
            "Hugging Face tokenizer, or make that file of an older one with AutoTokenizer."
            "from_pretrained(FOLDER).save_pretrained(FOLDER). Nothing is downloaded."
        )
    names = (PIPELINE_FILE, CONFIG_FILE, SPECIAL_FILE, TEMPLATE_FILE)
    return [folder / name for name in names if (folder / name).is_file()]


def _folder_tokenizer(folder: Path) -> TextTokenizer:
    """Return the tokenizer of a folder with tokenizer.json, or of ByT5."""
    files, config = _folder_files(str(folder)), dict[str, Any]()
    if folder / PIPELINE_FILE not in files:
        return byt5_tokenizer()
    try:
        backend = Tokenizer.from_file(str(folder / PIPELINE_FILE))
        for name in (SPECIAL_FILE, CONFIG_FILE):  # the second has all options
            if folder / name in files:
                config |= json.loads((folder / name).read_text("utf-8"))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ValueError(
            f"the tokenizer in {folder} cannot be read ({error}); copy the folder again."
        ) from error
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
    tokens = {name: token for name, token in special.items() if ids[name] is not None}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    # A template writes them into the text, where they must be found.
    backend.add_special_tokens([token for token in tokens.values() if token not in known])
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if (folder / TEMPLATE_FILE).is_file():
        template = (folder / TEMPLATE_FILE).read_text("utf-8")
    return TextTokenizer(backend, end_id, ids.get("bos_token"), template, tokens)


def byte_tokenizer() -> TextTokenizer:
    """Return the tokenizer whose tokens are the 256 bytes of UTF-8, and end-of-text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _with_end(backend)


def character_tokenizer(texts: Iterable[str]) -> TextTokenizer:
    """Return the tokenizer whose tokens are the characters of these texts, and end-of-text."""
    alphabet: set[str] = set()
    for text in texts:
        alphabet.update(text)
    _check_vocabulary("characters", alphabet)
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(sorted(alphabet))}, []))
    backend.decoder = decoders.Fuse()
    return _with_end(backend)


def word_tokenizer(
    texts: Iterable[str], vocab_size: int, min_count: int | None = None
) -> TextTokenizer:
    """Return the tokenizer whose tokens are the words of these texts, and end-of-text.

    A word is what stands between white space; a decoded text has one space between two words.
    See `TokenizerOptions`.

    Raises:
        ValueError: there is no word, or there are more than vocab_size.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(set(WORD.findall(text.replace(END_OF_TEXT, " "))))
    words = sorted(word for word, count in counts.items() if count >= (min_count or 1))
    _check_vocabulary("words", words)
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
    return _with_end(backend, unknown)


def bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> TextTokenizer:
    """Return the tokenizer of the most frequent byte pairs of these texts, and end-of-text.

    Texts are cut into words as GPT-2 does it; the same texts in any order give the same tokens.

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
    rest = filter(None, texts)
    first = next(rest, "")
    _check_vocabulary("bpe", first)
    backend.train_from_iterator(chain([first], rest), trainer)
    return _with_end(backend)


def byt5_tokenizer() -> TextTokenizer:
    """Return the tokenizer of ByT5: bytes of UTF-8 behind three special tokens.

    Source: Xue et al. 2022, section 3.1.
    """
    tokens = [*BYT5_SPECIAL.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    # Blanks beside the first three belong to them.
    special = [AddedToken(token, lstrip=True, rstrip=True) for token in BYT5_SPECIAL.values()]
    backend.add_special_tokens([*special, *(f"<extra_id_{n}>" for n in range(BYT5_EXTRA))])
    return TextTokenizer(backend, vocabulary["</s>"], None, None, BYT5_SPECIAL)


def _with_end(backend: Tokenizer, unknown: str = "") -> TextTokenizer:
    backend.add_special_tokens([END_OF_TEXT, *([unknown] if unknown else [])])
    end_id = backend.token_to_id(END_OF_TEXT)
    assert end_id is not None
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    special |= {"unk_token": unknown} if unknown else {}
    return TextTokenizer(backend, end_id, end_id, None, special)


def _check_vocabulary(kind: str, found: Any) -> None:
    if not found:
        raise ValueError(
            f"tokenizer.kind {kind} takes its vocabulary from the training text, and there is "
            "none; name files with data.train_files, or use tokenizer.kind bytes."
        )
