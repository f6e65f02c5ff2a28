"""Texts as input of an encoder: token ids, frames around them, their cache and datamodule."""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from datamodules.core.planned import PlannedDataModule, Stage
from datamodules.core.store import ArrayFile, cache_root, digest_of, made_once, mapped_array
from datamodules.text.store import token_dtype
from datamodules.text.terms import check_languages, terms_by
from datamodules.tokenizers.text import (
    TextTokenizer,
    TokenizerOptions,
    make_tokenizer,
    options_of_model,
)

DOCUMENT = 1  # segment; that of a query or an only text is 0
KEPT_BYTES = 128 << 20  # of the texts that a process remembers
ROWS_VERSION = 2  # of how texts become rows of tokens
TEXTS_AT_ONCE = 1024
RECIPE_KEY = "text_encoder_recipe"
MODULES = "LitTextScorer, LitRanker or LitRetriever"


@dataclass(frozen=True)
class TextLimits:
    """How much of a text an encoder sees.

    Args:
        max_length: most positions of a row, marks included; the end of a text is cut.
        max_query_length: most tokens of a query.
        lower_case: whether letters are made small before they become tokens.
        stemmer: language of a Snowball stemmer, such as english; a text then becomes its terms,
            words without punctuation, before they become tokens.
        stopwords: language whose commonest words are left out; a text then becomes its terms.

    Raises:
        ValueError: a length below 4, a query that leaves no room for a document, or an unknown
            language.
    """

    max_length: int = 256
    max_query_length: int = 64
    lower_case: bool = True
    stemmer: str | None = None
    stopwords: str | None = None

    def __post_init__(self) -> None:
        check_languages(self.stemmer, self.stopwords)
        if self.max_length < 4:
            raise ValueError(f"text.max_length must be at least 4, got {self.max_length}.")
        if not 1 <= self.max_query_length <= self.max_length - 3:
            raise ValueError(
                f"text.max_query_length must be 1 to {self.max_length - 3} (text.max_length less "
                f"its marks), got {self.max_query_length}."
            )

    def normalised(self, text: str) -> str:
        """Return a text as it is tokenised."""
        if self.stemmer or self.stopwords:
            return " ".join(terms_by(self.stemmer, self.stopwords)(text))
        return text.lower() if self.lower_case else text


@dataclass(frozen=True)
class Framing:
    """Marks around texts, and their lengths.

    Args:
        begin_id: token before a text; `None` where the tokenizer has no such mark.
        separator_id: token behind each text.
        limits: how much of a text is seen.
    """

    begin_id: int | None
    separator_id: int
    limits: TextLimits

    @classmethod
    def of(cls, tokenizer: TextTokenizer, limits: TextLimits) -> "Framing":
        """Return the framing of a tokenizer."""
        named = dict(tokenizer.special_tokens)
        ids = {name: tokenizer.backend.token_to_id(token) for name, token in named.items()}
        begin, separator = ids.get("cls_token"), ids.get("sep_token")
        if begin is None:
            begin = tokenizer.begin_id
        return cls(begin, tokenizer.end_id if separator is None else separator, limits)

    @property
    def num_marks(self) -> int:
        """Marks around a single text."""
        return 1 + (self.begin_id is not None)

    def single(self, ids: np.ndarray) -> "Framed":
        """Return one text between its marks; its end is cut."""
        return self._row(ids[: self.limits.max_length - self.num_marks])

    def query(self, ids: np.ndarray) -> "Framed":
        """Return a query between its marks."""
        return self._row(ids[: self.limits.max_query_length])

    def pair(self, query: np.ndarray, document: np.ndarray) -> "Framed":
        """Return a query and a document in one row; the document's end is cut."""
        (row,) = self.pairs(query, [document])
        return row

    def pairs(self, query: np.ndarray, documents: Iterable[np.ndarray]) -> list["Framed"]:
        """Return the rows of a query and each of several documents."""
        query = query[: self.limits.max_query_length]
        room = self.limits.max_length - self.num_marks - 1 - len(query)
        return [self._row(query, document[:room]) for document in documents]

    def chunks(self, ids: np.ndarray, stride: int, most: int) -> list["Framed"]:
        """Return a long text in overlapping rows; a short one is one row.

        Args:
            ids: of the text.
            stride: tokens from the beginning of one chunk to that of the next, at most the room
                of a chunk.
            most: chunks that are kept; what follows is cut.
        """
        room = self.limits.max_length - self.num_marks
        last = max(0, len(ids) - room)
        starts = range(0, last + stride, stride)[:most]
        return [self._row(ids[start : start + room]) for start in starts]

    def _row(self, *texts: np.ndarray) -> "Framed":
        parts: list[Any] = [] if self.begin_id is None else [[self.begin_id]]
        for text in texts:
            parts += [text, [self.separator_id]]
        size = len(texts[0]) + self.num_marks
        return Framed(np.concatenate(parts).astype(np.int64), size)


class Framed(NamedTuple):
    """One row: the token ids [T] int64 with their marks, and the positions of its first text."""

    ids: np.ndarray
    num_first: int


def padded(rows: Sequence[Framed]) -> dict[str, torch.Tensor]:
    """Return input_ids and segment_ids [R, T] int64, and attention_mask [R, T] bool."""
    lengths = np.array([len(row.ids) for row in rows])
    num_first = np.array([row.num_first for row in rows])
    place = np.arange(lengths.max())
    mask = place < lengths[:, None]
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = np.concatenate([row.ids for row in rows])
    segments = np.where(mask & (place >= num_first[:, None]), DOCUMENT, 0)
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(mask),
        "segment_ids": torch.from_numpy(segments),
    }


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
        self._num_bytes = 0

    def ids(self, text: str) -> np.ndarray:
        """Return the token ids of a text, [n] int64, whole and without marks."""
        ids = self._known.get(text)
        if ids is None:
            ids = self.ids_once(text)
            self._num_bytes += len(text) + ids.nbytes
            if self._num_bytes < KEPT_BYTES:
                self._known[text] = ids
        return ids

    def ids_once(self, text: str) -> np.ndarray:
        """Return the same as `ids`, of a text that does not come again: nothing is kept."""
        return self.tokenizer.encode(self.limits.normalised(text))

    def ids_of(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the same as `ids_once` of several texts."""
        return self.tokenizer.encode_batch([self.limits.normalised(text) for text in texts])

    @cached_property
    def digest(self) -> str:
        """Hex digest of all that decides the ids of a text."""
        return digest_of([self.tokenizer.digest, asdict(self.limits)])


class TokenRows:
    """The tokens of N texts, memory-mapped; pickled is their place alone.

    Args:
        folder: in which `kept_tokens` wrote tokens [n] of all texts and starts [N + 1] int64, the
            first token of each text and the end of the last.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokens = mapped_array(folder / "tokens.npy")
        self.starts = mapped_array(folder / "starts.npy")

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenRows, (self.folder,)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        return self.tokens[self.starts[number] : self.starts[number + 1]]


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
        most: tokens of one text that are kept, its first; `None` keeps all.
    """
    key = digest_of([ROWS_VERSION, *facts, encoding.digest, most])

    def make(folder: Path) -> None:
        left, dtype = iter(texts()), token_dtype(encoding.tokenizer.vocab_size)
        with (
            ArrayFile(folder / "tokens.npy", dtype) as tokens,
            ArrayFile(folder / "starts.npy", np.int64) as starts,
        ):
            starts.add(np.zeros(1))
            while some := list(islice(left, TEXTS_AT_ONCE)):
                for ids in encoding.ids_of(some):
                    tokens.add(ids[:most])
                    starts.add(np.array([tokens.length]))

    return TokenRows(made_once(cache_root() / "token_rows" / key, make))


class EncodedTextDataModule(PlannedDataModule):
    """Knows which tokenizer the texts are read with; a family says which texts, and its datasets.

    After `setup`, `recipe` holds what a checkpoint must keep to read a text in the same way.

    Args:
        tokenizer: of the texts; `None` takes that of a pretrained encoder, else bytes.
        text: how much of a text is seen; a checkpoint's own win over these.
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
        self.recipe: dict[str, Any] | None = None
        self.encoding: TextEncoding | None = None

    @abstractmethod
    def training_texts(self) -> Iterator[str]:
        """Yield the texts that a tokenizer's vocabulary is made of."""

    @abstractmethod
    def texts_digest(self) -> str:
        """Return the hex digest of those texts."""

    def token_counts(self) -> tuple[torch.Tensor, int]:
        """Return how many training texts hold each token [V] int64, special ones aside, and how
        many texts there are."""
        assert self.encoding is not None
        tokenizer = self.encoding.tokenizer
        counts, number = np.zeros(tokenizer.vocab_size, np.int64), 0
        for text in self.training_texts():
            number += 1
            counts[np.unique(self.encoding.ids_once(text))] += 1
        counts[tokenizer.special_ids] = 0
        return torch.from_numpy(counts), number

    def check_stage(self, stage: Stage) -> None:
        """Raise what `build` would, where it needs no tokens: before hours of tokenising."""

    @abstractmethod
    def prepare_tokens(self, stage: Stage, encoding: TextEncoding, recipe: dict[str, Any]) -> None:
        """Make the tokens of a stage's texts in the cache; a prediction reads each text once, and
        makes them when it does."""

    def recipe_facts(self) -> dict[str, Any]:
        """Return what else a checkpoint must keep, such as the names of classes; none here."""
        return {}

    def prepare_data(self) -> None:
        """Make the tokenizer, and the tokens of all texts, in the cache, once per machine."""
        stages = self.wanted_stages(self._trainer_stage())
        for stage in stages:
            self.check_stage(stage)
        recipe = self._recipe(self._trainer_stage())
        encoding = TextEncoding(recipe)
        for stage in stages:
            self.prepare_tokens(stage, encoding, recipe)

    def setup(self, stage: str) -> None:
        """Take the recipe and build the datasets of the stage."""
        recipe = self._recipe(stage)
        encoding = TextEncoding(recipe)
        if self.encoding is None or self.encoding.digest != encoding.digest:
            self.encoding = encoding
            self.datasets.clear()
        self.recipe = recipe
        if stage == "predict":
            self.datasets.pop("predict", None)
        super().setup(stage)

    def _recipe(self, stage: str) -> dict[str, Any]:
        """Return the recipe of the model that is evaluated, or the one to train with."""
        recipe = self._trained_recipe(stage)
        if recipe is not None:
            return recipe
        limits = {"text": asdict(self.text)}
        return {"tokenizer": self._new_tokenizer().to_dict(), **limits, **self.recipe_facts()}

    def _trained_recipe(self, stage: str) -> dict[str, Any] | None:
        """Return the recipe of the model that is evaluated; `None` in training.

        Raises:
            FileNotFoundError: there is no such checkpoint.
            ValueError: it is damaged or of another family, or a prediction has no trained model.
        """
        if stage == "fit":
            return None
        recipe = self.model.recipe or self.recipe
        if recipe is None and stage == "predict":
            raise ValueError(
                "predict needs a trained model: give --ckpt_path, in a script "
                "trainer.ckpt_path = path before it, or load_from_checkpoint(path) of its class."
            )
        return recipe

    def _new_tokenizer(self) -> TextTokenizer:
        options = options_of_model(self.model.tokenizer, self.tokenizer_options)
        if options.kind in ("bytes", "folder"):  # made at once
            return make_tokenizer(options, iter(()))
        kept = {k: v for k, v in asdict(self.text).items() if not k.startswith("max_")}
        facts = [options.facts(), self.texts_digest(), kept]

        def make(folder: Path) -> None:
            texts = (self.text.normalised(text) for text in self.training_texts())
            values = make_tokenizer(options, texts).to_dict()
            (folder / "tokenizer.json").write_text(json.dumps(values), "utf-8")

        folder = made_once(cache_root() / "tokenizers" / digest_of(facts), make)
        return TextTokenizer.from_dict(json.loads((folder / "tokenizer.json").read_text("utf-8")))
