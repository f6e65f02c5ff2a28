"""Text tokenizers: bytes, characters, words or byte pairs of the training text, or a model's own.

Pipelines of the tokenizers library are inspected as the JSON of their tokenizer.json. Chats are
rendered by transformers with Jinja templates of the Hugging Face kind.
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
Message = Mapping[str, Any]  # role, content and other keys that a template reads
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
SPACE_MARK = "▁"  # space in SentencePiece tokens
SEQUENCES = ("normalizers", "pretokenizers", "decoders")
# \x1c to \x1f are white space in Python, but not in `tokenizers`.
WORD = re.compile(r"(?:\S|[\x1c-\x1f])+")
BYT5_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}  # 0, 1, 2
BYT5_EXTRA = 125  # sentinel tokens of pretraining, last in the vocabulary
BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, eq=False)
class TextTokenizer:
    """A tokenizer with the special tokens that language models need.

    The name of a special token in a text is read as that token.
    """

    backend: Tokenizer  # pipeline, which adds no special tokens itself
    end_id: int  # token that ends a document or an answer
    # Token that begins a document; `None` if the vocabulary has none.
    begin_id: int | None = None
    chat_template: str | None = None  # Jinja template that turns messages into text
    # Hugging Face name, such as pad_token -> token.
    special_tokens: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids, including special tokens."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def special_ids(self) -> np.ndarray:
        """Ids of the special tokens, ascending int64; `decode` skips them by default."""
        added = self.backend.get_added_tokens_decoder().items()
        return np.array(sorted(i for i, token in added if token.special), np.int64)

    @cached_property
    def end_ids(self) -> list[int]:
        """Tokens that end a text: end-of-text, and the one that the template puts after answers."""
        chat = [{"role": role, "content": "a turn"} for role in ("user", "assistant")]
        ends = [self.end_id]
        with suppress(ValueError):  # no template, or it refuses such a chat
            _, behind = self.render(chat).rsplit("a turn", 1)
            ends += self.encode(behind.strip())[:1].tolist()
        return [i for i in dict.fromkeys(ends) if i == self.end_id or i in self.special_ids]

    def encode_batch(
        self, texts: Sequence[str], places: Sequence[str] = (), continues: bool = False
    ) -> list[np.ndarray]:
        """Return the token ids of each text, [n] int64, without added special tokens.

        Args:
            places: file and line of each text, for errors.
            continues: the texts continue others, so a tokenizer that puts a space before the first
                word of a text does not do so.

        Raises:
            ValueError: a text holds a character or a word that the vocabulary cannot encode.
        """
        encoder = self._without_first_space if continues else self._encoder
        encodings = self._encoded(encoder.encode_batch_fast, texts, places)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def encode(self, text: str) -> np.ndarray:
        """Return the token ids of one text, [n] int64, see `encode_batch`."""
        return self.encode_batch([text])[0]

    def encode_with_offsets(
        self, texts: Sequence[str], places: Sequence[str] = ()
    ) -> list[Encoding]:
        """Return encodings with `ids` and `offsets`, the characters of each token; arguments and
        errors as in `encode_batch`."""
        return self._encoded(self._encoder.encode_batch, texts, places)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def decode_continuation(
        self, ids: Sequence[int] | np.ndarray, skip_special_tokens: bool = True
    ) -> str:
        """Return the text of token ids that follow others, with the space before the first word
        that some decoders strip."""
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
        """Return the text of a chat with special tokens; with `add_generation_prompt` it ends where
        the assistant's answer begins.

        Args:
            tools: tools that the assistant may call, in the form that the template reads.

        Raises:
            ValueError: there is no chat template, it refuses these messages, or it omits a tool or
                a tool call.
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
        """Return how many UTF-8 bytes each token stands for, [V] int64; 0 for special tokens.

        Summed over a text's tokens they are the bytes of the text as normalised by the tokenizer,
        with the space that some put before the first word. `None` if tokens do not add up to the
        text, such as pieces without spaces.
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
            if is_of_bytes and alphabet.issuperset(token):  # other tokens are plain text
                lengths[i] = len(token)
            elif is_marked and BYTE_PIECE.fullmatch(token):
                lengths[i] = 1
            else:
                lengths[i] = len((token.replace(SPACE_MARK, " ") if is_marked else token).encode())
        for i, added in self.backend.get_added_tokens_decoder().items():
            lengths[i] = 0 if added.special else len(added.content.encode())
        return lengths

    def hugging_face_files(self, **options: Any) -> dict[str, str]:
        """Return file name -> content of a folder for transformers' AutoTokenizer, with further
        options of its configuration."""
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
            **options,
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
        """Hex digest of all that determines the tokens of a text."""
        return digest_of(self.to_dict())

    @cached_property
    def _anchor(self) -> int | None:
        """A token whose text does not depend on the tokens decoded after it, or `None`."""
        special = self.backend.get_added_tokens_decoder()
        for token, i in sorted(self.backend.get_vocab().items(), key=lambda pair: pair[1]):
            if i in special or BYTE_PIECE.fullmatch(token):  # bytes merge with the next ones
                continue
            text = self.backend.decode([i])
            is_word = text.isprintable() and text.strip() == text and "\ufffd" not in text
            if text and is_word and self.backend.decode([i, i]).startswith(text):
                return i
        return None

    @cached_property
    def _renderer(self) -> Any:
        """A transformers tokenizer, whose sandbox runs templates, as they are untrusted code. It
        has no vocabulary, since rendering needs only the special tokens."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.BPE()),
            chat_template=self.chat_template,
            **self.special_tokens,
        )

    @cached_property
    def _encoder(self) -> Tokenizer:
        """The pipeline, changed so that characters without a token raise an error (BPE would drop
        them silently), and that tokens' offsets include their spaces."""
        encoder = Tokenizer.from_str(self.backend.to_str())
        encoder.post_processor = None  # type: ignore[assignment]
        if isinstance(encoder.model, models.BPE) and encoder.model.unk_token is None:
            encoder.model.unk_token = ""  # which is in no vocabulary
        return encoder

    @cached_property
    def _without_first_space(self) -> Tokenizer:
        """`_encoder` without the space that it may put before a text's first word."""
        pipeline = json.loads(self._encoder.to_str())
        normalizer = pipeline["normalizer"]
        steps = [step for step in _steps(normalizer) if step["type"] != "Prepend"]
        if len(steps) < len(_steps(normalizer)):
            pipeline["normalizer"] = {"type": "Sequence", "normalizers": steps}
        for step in _steps(pipeline["pre_tokenizer"]):
            if step["type"] == "Metaspace":
                step["prepend_scheme"] = "never"
            elif "add_prefix_space" in step:  # of ByteLevel
                step["add_prefix_space"] = False
        return Tokenizer.from_str(json.dumps(pipeline))

    def _encoded(self, encode: Any, texts: Sequence[str], places: Sequence[str]) -> Any:
        """Call a pipeline's `encode` method on texts; ValueError names the first word or character
        that the vocabulary cannot encode."""
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
        kind: `bytes`, the `characters` or the `words` (between white space) of the training text,
            byte pairs learnt from it (`bpe`), or the tokenizer of a Hugging Face folder (`folder`).
        vocab_size: maximum number of tokens of `bpe` (256 are bytes) or `words` (which must all
            fit), end-of-text included; a short text gives fewer. `None` is 8000.
        min_count: for `words`: words in fewer texts, and unknown words, become one special token;
            `None` keeps all words and rejects unknown ones.
        path: folder of the tokenizer, for `folder`.
        chat_template: a Jinja file that turns messages into text, or the built-in `plain`; `None`
            keeps the folder's template.
    """

    kind: Kind = "bytes"
    vocab_size: int | None = None
    path: str | None = None
    chat_template: str | None = None
    min_count: int | None = None

    def __post_init__(self) -> None:
        names = ("vocab_size", "min_count", "path")
        named = {name for name in names if getattr(self, name) is not None}
        own = OPTIONS_OF.get(self.kind, set())
        if named - own or (self.kind == "folder" and not named):
            raise ValueError(
                f"tokenizer.kind {self.kind} takes {' and '.join(sorted(own)) or 'no size'}, got "
                f"{', '.join(sorted(named)) or 'none'}; name another kind, or leave out the rest."
            )

    def facts(self) -> dict[str, Any]:
        """Return plain values that, with the texts, determine the tokenizer.

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


def options_of_model(folder: str | None, options: TokenizerOptions | None) -> TokenizerOptions:
    """Return the options of the tokenizer for training.

    Args:
        folder: folder of the model's own tokenizer, if it has one.
        options: the user's; `None` takes the model's tokenizer, else bytes. Options with only a
            chat template add it to the model's tokenizer.

    Raises:
        ValueError: the user's tokenizer differs from the model's.
    """
    if folder is None:
        return options or TokenizerOptions()
    if options is None:
        return TokenizerOptions(kind="folder", path=str(folder))
    if options == TokenizerOptions(chat_template=options.chat_template) != TokenizerOptions():
        return replace(options, kind="folder", path=str(folder))
    if options.path is None or Path(options.path).resolve() != Path(folder).resolve():
        other = options.path or f"kind {options.kind}"
        raise ValueError(
            f"data.tokenizer is {other}, and the pretrained model in {folder} was trained with "
            "its own; leave data.tokenizer out (null), but for its chat_template."
        )
    return options


def make_tokenizer(options: TokenizerOptions, texts: Iterator[str]) -> TextTokenizer:
    """Return the tokenizer that the options describe.

    Args:
        texts: training texts; read only for a vocabulary (characters, words, bpe).

    Raises:
        FileNotFoundError: the folder or the template does not exist.
        ValueError: there is no text for the vocabulary, or the folder is incomplete.
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
    """Return the files that determine a folder's tokenizer; for ByT5 only a configuration is
    needed."""
    folder = Path(path).expanduser()
    config = folder / CONFIG_FILE
    is_byt5 = config.is_file() and '"ByT5Tokenizer"' in config.read_text("utf-8")
    if not (is_byt5 or (folder / PIPELINE_FILE).is_file()):
        if (folder / "source.spm").is_file():
            raise ValueError(
                f"tokenizer.path: {folder} is of OPUS-MT, whose two tokenizers (source.spm and "
                "target.spm) and bias on the logits are not read; take a T5 or BART model."
            )
        raise FileNotFoundError(
            f"tokenizer.path: {folder} holds no {PIPELINE_FILE}; name the local folder of a "
            "Hugging Face tokenizer, or make that file of an older one with AutoTokenizer."
            "from_pretrained(FOLDER).save_pretrained(FOLDER). Nothing is downloaded."
        )
    names = (PIPELINE_FILE, CONFIG_FILE, SPECIAL_FILE, TEMPLATE_FILE)
    return [folder / name for name in names if (folder / name).is_file()]


def _folder_tokenizer(folder: Path) -> TextTokenizer:
    """Return the tokenizer of a folder with tokenizer.json, or ByT5's."""
    files, config = _folder_files(str(folder)), dict[str, Any]()
    if folder / PIPELINE_FILE not in files:
        return byt5_tokenizer()
    try:
        backend = Tokenizer.from_file(str(folder / PIPELINE_FILE))
        for name in (SPECIAL_FILE, CONFIG_FILE):  # the later one wins
            if folder / name in files:
                config |= json.loads((folder / name).read_text("utf-8"))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ValueError(
            f"the tokenizer in {folder} cannot be read ({error}); copy the folder again."
        ) from error
    backend.no_truncation()  # a setting of tokenizer.json would cut texts silently
    backend.no_padding()
    special = {name: config[name] for name in NAMES if config.get(name)}
    special = {n: t["content"] if isinstance(t, dict) else t for n, t in special.items()}
    end = "eos_token" if "eos_token" in special else "sep_token"  # BERT has only the latter
    ids = {name: backend.token_to_id(token) for name, token in special.items()}
    end_id = ids.get(end)
    if end_id is None:
        raise ValueError(
            f"{folder} names no end-of-text token of its vocabulary, which ends documents and "
            f'answers; it names {special.get(end)}. Set "eos_token" in its {CONFIG_FILE}.'
        )
    tokens = {name: token for name, token in special.items() if ids[name] is not None}
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    # Templates write special tokens as text, so the pipeline must recognise them.
    backend.add_special_tokens([token for token in tokens.values() if token not in known])
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if (folder / TEMPLATE_FILE).is_file():
        template = (folder / TEMPLATE_FILE).read_text("utf-8")
    return TextTokenizer(backend, end_id, ids.get("bos_token"), template, tokens)


def byte_tokenizer() -> TextTokenizer:
    """Return the tokenizer of the 256 bytes and end-of-text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _with_end(backend)


def character_tokenizer(texts: Iterable[str]) -> TextTokenizer:
    """Return the tokenizer of these texts' characters and end-of-text."""
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
    """Return the tokenizer of these texts' words and end-of-text.

    Words are separated by white space; decoding puts one space between them. See
    `TokenizerOptions`.

    Raises:
        ValueError: there are no words, or more than fit into vocab_size.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(set(WORD.findall(text.replace(END_OF_TEXT, " "))))
    words = sorted(word for word, count in counts.items() if count >= (min_count or 1))
    _check_vocabulary("words", words)
    # "" is in no vocabulary, so that an unknown word without a token for it raises an error.
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
    """Return the tokenizer of these texts' most frequent byte pairs and end-of-text.

    Texts are cut into words as in GPT-2; the order of texts does not change the tokenizer.

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
    """Return the tokenizer of ByT5: the 256 bytes after three special tokens.

    Source: Xue et al. 2022, section 3.1.
    """
    tokens = [*BYT5_SPECIAL.values(), *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    # The first three special tokens absorb adjacent blanks.
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


def _check_vocabulary(kind: str, units: Any) -> None:
    if not units:
        raise ValueError(
            f"tokenizer.kind {kind} takes its vocabulary from the training text, and there is "
            "none; name files with data.train_files, or use tokenizer.kind bytes."
        )
