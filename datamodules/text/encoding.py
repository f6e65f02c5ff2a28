"""Input of text encoders: words, terms, rows of tokens with marks, and the base datamodule."""

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules.core.batches import padded_texts
from datamodules.core.plan import check_range
from datamodules.core.planned import PlannedDataModule, PlannedDataset, Stage
from datamodules.core.store import ArrayFile, ArrayFolder, cache_folder, digest_of, made_once
from datamodules.text.store import token_dtype
from datamodules.tokenizers.text import (
    TextTokenizer,
    TokenizerOptions,
    make_tokenizer,
    options_of_model,
)

ROWS_VERSION = 2  # version of the cached tokens of texts
TEXTS_AT_ONCE = 1024
RECIPE_KEY = "text_encoder_recipe"
PROMPTS_FILE = "config_sentence_transformers.json"
# Names under which model folders store the words to put before a query or a document.
PROMPTS = {"query": ("query",), "document": ("document", "passage", "corpus")}

# Numbers such as 3.5 and 1,000 are one word.
WORD = re.compile(r"\d+(?:[.,]\d+)+|[^\W_]+(?:['’\-][^\W_]+)*")
# End of a sentence: marks, then closing quotes or brackets, then a space or the line's end.
END = re.compile(r"(?<![.!?…])([.!?…]+)[\"'”’»)\]]*(?=\s|$)")
LAST_WORD = re.compile(r"[^\s(\[\"'“‘«]+$")
FOLLOWS = re.compile(r"\s*[\"'“‘«(\[\s]*(.?)", re.DOTALL)
LONGEST_ABBREVIATION = 12  # characters; longer than any, so that longer words do not match
_ABBREVIATIONS = """
mr mrs ms dr prof sr jr st rev hon gen col sgt capt lt vs etc al cf ca approx no nos vol vols pp p
fig figs eq sec ch ed eds inc ltd co corp dept est jan feb mar apr jun jul aug sep sept oct nov dec
mon tue wed thu fri e.g i.e u.s u.k a.m p.m ph.d b.a m.a d.c
"""
ABBREVIATIONS = frozenset(_ABBREVIATIONS.split())
# Abbreviations that often end a sentence; they do so if a capital follows.
MAY_END = frozenset({"etc", "al", "inc", "ltd", "co", "corp", "u.s", "u.k", "a.m", "p.m", "no"})
KEPT_STEMS = 1 << 17
# Question words and connectives, without which a query means the same.
ENGLISH = """
a an and are as at be but by for from had has have he her his i if in into is it its it no not of on
or our she so such that the their then there these they this to was we were what when where which
who will with you your
"""
STOPWORDS = frozenset(ENGLISH.split())


def words_of(text: str) -> list[str]:
    """Return the words of a text; it's and well-known are one word each."""
    return WORD.findall(text)


def sentences_of(lines: Iterable[str]) -> list[str]:
    """Return the sentences of lines; none continues over the end of a line, such as a heading.

    `?!` and `...` are one end. A small letter behind an end continues the sentence, except behind a
    free-standing mark such as ` .`, or behind a single mark in a line without capitals.
    """
    sentences = []
    for line in lines:
        start, has_capitals = 0, line != line.lower()
        for end in END.finditer(line):
            if _is_end(line, start, end, has_capitals):
                sentences.append(line[start : end.end()].strip())
                start = end.end()
        sentences.append(line[start:].strip())
    return [sentence for sentence in sentences if WORD.search(sentence)]


def _is_end(line: str, start: int, end: re.Match[str], has_capitals: bool) -> bool:
    behind = FOLLOWS.match(line, end.end())
    assert behind is not None  # it may be empty
    follows = behind[1]
    is_lone = len(end[1]) == 1 and line[end.start() - 1 : end.start()].isspace()
    goes_on = follows.islower() and not is_lone and (has_capitals or len(end[1]) > 1)
    if end[1] != ".":
        return not goes_on
    if not behind[0].strip():
        return True
    word = LAST_WORD.search(line, max(start, end.start() - LONGEST_ABBREVIATION), end.start())
    last = word[0].lower() if word else ""
    if len(last) == 1 and last.isalpha() and word is not None and word[0].isupper():
        return last == "i" and not goes_on  # an initial: J. Smith; "than I." ends
    if last in ABBREVIATIONS:
        # "No. 5" and "fig. 2" go on; "etc. The" and "Inc. It" end.
        return last in MAY_END and follows.isupper()
    return not goes_on


def stemmer_version(stemmer: str | None) -> list[str]:
    """Return the version of the stemmer library if one is used, since versions may differ."""
    return [] if stemmer is None else [version("snowballstemmer")]


@lru_cache(maxsize=8)
def terms_by(stemmer: str | None, stopwords: str | None) -> Callable[[str], list[str]]:
    """Return a function that cuts a text into terms: runs of letters and digits in lower case.

    Args:
        stemmer: language of a Snowball stemmer, such as english; `None` keeps whole words.
        stopwords: language whose most common words are dropped; `None` keeps all.

    Raises:
        ValueError: the language has no stopword list or no stemmer.
        ImportError: the stemmer is not installed.
    """
    if stopwords not in (None, "english"):
        raise ValueError(f'stopwords must be none or english, got "{stopwords}".')
    stem, stop = None, STOPWORDS if stopwords else frozenset()
    if stemmer is not None:
        import snowballstemmer  # needed for stems only

        if stemmer not in snowballstemmer.algorithms():
            known = ", ".join(sorted(snowballstemmer.algorithms()))
            raise ValueError(f'there is no stemmer of "{stemmer}"; there are: {known}.')
        stem = lru_cache(KEPT_STEMS)(snowballstemmer.stemmer(stemmer).stemWord)

    def terms(text: str) -> list[str]:
        words = [word for word in re.findall(r"\w+", text.lower()) if word not in stop]
        return [stem(word) for word in words] if stem else words

    return terms


@dataclass(frozen=True)
class TextLimits:
    """Length limits and normalisation of an encoder's texts.

    Args:
        max_length: maximum number of tokens per row, marks included; longer texts lose their end.
        max_query_length: maximum number of tokens per query.
        lower_case: whether texts are lowercased before they are tokenised.
        stemmer: language of a Snowball stemmer, such as english; texts are then reduced to stemmed
            words without punctuation before they are tokenised.
        stopwords: language whose most common words are left out; texts then also lose punctuation.

    Raises:
        ValueError: a query leaves no room for a document, or the language is unknown.
    """

    max_length: int = 256
    max_query_length: int = 64
    lower_case: bool = True
    stemmer: str | None = None
    stopwords: str | None = None

    def __post_init__(self) -> None:
        terms_by(self.stemmer, self.stopwords)
        # Query and document share max_length with three marks.
        check_range("text", 1, self.max_length - 3, max_query_length=self.max_query_length)

    def normalised(self, text: str) -> str:
        """Return the text that is tokenised."""
        if self.stemmer or self.stopwords:
            return " ".join(terms_by(self.stemmer, self.stopwords)(text))
        return text.lower() if self.lower_case else text


def prompts_of(folder: str | None) -> dict[str, Any]:
    """Return `prompts` for a recipe ("query" and "document") from a sentence-transformers folder;
    {} if it has none.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(folder or "") / PROMPTS_FILE
    if folder is None or not path.is_file():
        return {}
    try:
        stored = {**(json.loads(path.read_text("utf-8")).get("prompts") or {})}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}); copy the folder again.") from error
    prompts = {
        name: next((stored[theirs] for theirs in names if stored.get(theirs)), "")
        for name, names in PROMPTS.items()
    }
    return {"prompts": prompts} if any(prompts.values()) else {}


class TextEncoding:
    """Turns texts into token ids and rows of tokens, as configured by a recipe.

    Args:
        recipe: `tokenizer` of `TextTokenizer.to_dict`, and `text`, fields of `TextLimits`.

    Attributes:
        begin_id: token before a text; `None` if there is none.
        separator_id: token after each text.
        num_marks: number of these marks for a single text.
        room: maximum number of tokens of a single text.
        prompts: words to put before a "query" and a "document".
    """

    def __init__(self, recipe: dict[str, Any]) -> None:
        tokenizer = self.tokenizer = TextTokenizer.from_dict(recipe["tokenizer"])
        self.limits = TextLimits(**recipe["text"])
        self.prompts: dict[str, str] = recipe.get("prompts", {"query": "", "document": ""})
        ids = {
            name: tokenizer.backend.token_to_id(t) for name, t in tokenizer.special_tokens.items()
        }
        begin, separator = ids.get("cls_token"), ids.get("sep_token")
        self.begin_id = tokenizer.begin_id if begin is None else begin
        self.separator_id = tokenizer.end_id if separator is None else separator
        self.num_marks = 1 + (self.begin_id is not None)
        self.room = self.limits.max_length - self.num_marks

    def positions(self, sizes: np.ndarray) -> np.ndarray:
        """Return the positions of single texts with these numbers of tokens."""
        return np.minimum(sizes + self.num_marks, self.limits.max_length)

    def ids(self, text: str) -> np.ndarray:
        """Return the token ids of a text, [n] int64, uncut and without marks."""
        return self.tokenizer.encode(self.limits.normalised(text))

    def ids_of(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, as `ids`."""
        return self.tokenizer.encode_batch([self.limits.normalised(text) for text in texts])

    def ids_behind(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text as it follows another one, after a blank."""
        behind = [f" {one}" if one else "" for one in map(self.limits.normalised, texts)]
        return self.tokenizer.encode_batch(behind, continues=True)

    def rows(
        self, texts: Sequence[np.ndarray], queries: Sequence[np.ndarray] | None = None
    ) -> dict[str, torch.Tensor]:
        """Return texts with their marks, cut to the limits: input_ids [R, T] int64, attention_mask
        [R, T] bool and, if there are queries, segment_ids [R, T] int64, 0 for a query and 1 for a
        text.

        Args:
            texts: token ids of R texts.
            queries: token ids of R queries that precede the texts; `None` for single texts.
        """
        begin = np.array([] if self.begin_id is None else [self.begin_id], np.int64)
        heads, end = [begin] * len(texts), np.array([self.separator_id])
        if queries is not None:
            most = self.limits.max_query_length
            heads = [np.concatenate([begin, ids[:most], end]) for ids in queries]
        longest = self.limits.max_length - 1  # the end mark follows
        rows = [
            np.concatenate([head, ids[: longest - len(head)], end])
            for head, ids in zip(heads, texts, strict=True)
        ]
        batch = padded_texts(rows)
        if queries is not None:
            places = torch.arange(batch["input_ids"].shape[1])
            is_text = places >= torch.tensor([[len(head)] for head in heads])
            batch["segment_ids"] = (batch["attention_mask"] & is_text).long()
        return batch

    def chunk_rows(
        self, texts: Sequence[np.ndarray], stride: int | None, most: int
    ) -> dict[str, torch.Tensor]:
        """Return texts in chunks, each a row: input_ids [C, T] int64, attention_mask [C, T] bool,
        and chunk_of [C] int64, the index of each chunk's text. A short text is one chunk.

        Args:
            stride: tokens from the start of one chunk to that of the next; `None` is `room`.
            most: maximum number of chunks per text; the rest is cut off.
        """
        room, step = self.room, stride or self.room
        starts = [range(0, max(0, len(ids) - room) + step, step)[:most] for ids in texts]
        pairs = zip(texts, starts, strict=True)
        rows = self.rows([ids[start : start + room] for ids, own in pairs for start in own])
        chunk_of = np.repeat(np.arange(len(texts)), [len(own) for own in starts])
        return {**rows, "chunk_of": torch.from_numpy(chunk_of)}

    @cached_property
    def digest(self) -> str:
        """Hex digest of all that determines the ids of a text."""
        limits = self.limits
        facts = [self.tokenizer.digest, asdict(limits), *stemmer_version(limits.stemmer)]
        return digest_of([*facts, self.prompts] if any(self.prompts.values()) else facts)


class TokenRows(ArrayFolder):
    """The tokens of N texts; those of text i are tokens[starts[i]:starts[i + 1]]."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tokens, self.starts = self.arrays["tokens"], self.arrays["starts"]

    @property
    def sizes(self) -> np.ndarray:
        """Number of tokens of each text, [N] int64."""
        return np.diff(self.starts)

    def __getitem__(self, number: int) -> np.ndarray:
        return self.tokens[self.starts[number] : self.starts[number + 1]]


def write_token_rows(folder: Path, vocab_size: int, rows: Iterable[np.ndarray]) -> None:
    """Write the token ids of texts into a folder for `TokenRows`."""
    dtype = token_dtype(vocab_size)
    with (
        ArrayFile(folder / "tokens.npy", dtype) as tokens,
        ArrayFile(folder / "starts.npy", np.int64) as starts,
    ):
        starts.add(np.zeros(1))
        for ids in rows:
            tokens.add(ids)
            starts.add(np.array([tokens.length]))


def kept_tokens(
    facts: Sequence[object], encoding: TextEncoding, texts: Iterator[str], most: int | None
) -> TokenRows:
    """Return the tokens of texts, cached at first use.

    Args:
        facts: plain JSON that identifies these texts.
        texts: read only if they are not cached.
        most: how many leading tokens of a text are kept; `None` keeps all.
    """

    def rows() -> Iterator[np.ndarray]:
        while some := list(islice(texts, TEXTS_AT_ONCE)):
            yield from (ids[:most] for ids in encoding.ids_of(some))

    folder = cache_folder("token_rows", [ROWS_VERSION, *facts, encoding.digest, most])
    size = encoding.tokenizer.vocab_size
    return TokenRows(made_once(folder, lambda new: write_token_rows(new, size, rows())))


class EncodedTextDataModule(PlannedDataModule):
    """Base of the datamodules of text encoders; subclasses add their texts and datasets.

    After `setup`, `recipe` holds what a checkpoint must keep to encode texts in the same way.

    Args:
        tokenizer: how text becomes tokens; `None` takes the pretrained encoder's, else bytes.
        text: length limits and normalisation of texts; a trained model keeps its own.
        planned: batch sizes, plan and loader, see `PlannedDataModule`.
    """

    def __init__(
        self,
        tokenizer: TokenizerOptions | None = None,
        text: TextLimits = TextLimits(),
        **planned: Any,
    ) -> None:
        super().__init__(**planned)
        self.tokenizer_options, self.text = tokenizer, text
        self.encoding: TextEncoding | None = None

    @abstractmethod
    def training_texts(self) -> Iterator[str]:
        """Yield the texts from which a tokenizer's vocabulary is made."""

    @abstractmethod
    def texts_digest(self) -> str:
        """Return the hex digest of the training texts."""

    def check_stage(self, stage: Stage) -> None:
        """Raise errors of `build` that need no tokens, before hours of tokenising."""

    @abstractmethod
    def make_dataset(
        self, stage: Stage, encoding: TextEncoding, recipe: dict[str, Any]
    ) -> PlannedDataset:
        """Return the dataset of one stage; the files that it reads are made in the cache."""

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage."""
        assert self.encoding is not None
        assert self.recipe is not None
        return self.make_dataset(stage, self.encoding, self.recipe)

    def recipe_facts(self) -> dict[str, Any]:
        """Return further facts for the recipe, such as the names of classes."""
        return {}

    def token_counts(self) -> tuple[torch.Tensor, int]:
        """Return how many training texts contain each token, [V] int64 (0 for special tokens), and
        the number of texts."""
        assert self.encoding is not None
        tokenizer = self.encoding.tokenizer
        counts, number = np.zeros(tokenizer.vocab_size, np.int64), 0
        for text in self.training_texts():
            number += 1
            counts[np.unique(self.encoding.ids(text))] += 1
        counts[tokenizer.special_ids] = 0
        return torch.from_numpy(counts), number

    def prepare_data(self) -> None:
        """Cache the tokenizer and the tokens of all texts, once per machine."""
        stages = self.wanted_stages(self._trainer_stage())
        for stage in stages:
            self.check_stage(stage)
        recipe = self._recipe(self._trainer_stage())
        encoding = TextEncoding(recipe)
        for stage in stages:
            self.make_dataset(stage, encoding, recipe)

    def setup(self, stage: str) -> None:
        """Set the recipe and build the stage's datasets."""
        self.recipe = self._recipe(stage)
        encoding = TextEncoding(self.recipe)
        if self.encoding is None or self.encoding.digest != encoding.digest:
            self.encoding = encoding
            self.datasets.clear()
        super().setup(stage)

    def _recipe(self, stage: str) -> dict[str, Any]:
        """Return a trained model's recipe, or a new one for training."""
        recipe = self.trained_recipe(stage)
        if recipe is not None:
            return recipe
        text = asdict(self.text)
        options = options_of_model(self.model.tokenizer, self.tokenizer_options)
        if options.kind in ("bytes", "folder"):  # needs no training text
            tokenizer = make_tokenizer(options, iter(())).to_dict()
        else:
            changes = {name: value for name, value in text.items() if not name.startswith("max_")}

            def make(folder: Path) -> None:
                texts = (self.text.normalised(text) for text in self.training_texts())
                values = make_tokenizer(options, texts).to_dict()
                (folder / "tokenizer.json").write_text(json.dumps(values), "utf-8")

            facts = [options.facts(), self.texts_digest(), changes]
            folder = made_once(cache_folder("tokenizers", facts), make)
            tokenizer = json.loads((folder / "tokenizer.json").read_text("utf-8"))
        return {"tokenizer": tokenizer, "text": text, **self.recipe_facts()}
