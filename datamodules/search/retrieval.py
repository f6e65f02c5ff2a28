"""RetrievalDataModule: pairs to train a retriever, single texts for everything else.

Shapes: B samples of the micro-batch, K documents of one, R most documents that are known, Q queries
among the texts of a batch, J most judgements of one query, F documents of a first stage.
"""

import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from datamodules.core.plan import hash_ids, rng_for, rngs_for
from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import digest_of, sync
from datamodules.files.splitting import PART_NAMES
from datamodules.files.tables import naming
from datamodules.search.bm25 import Bm25Options, open_bm25
from datamodules.search.candidates import HardNegatives, Lists, bm25_lists, run_lists
from datamodules.search.collection import Collection, CollectionDocument
from datamodules.search.datamodule import (
    TERM,
    SearchDataModule,
    kept_documents,
    kept_queries,
    tokens_per_byte,
)
from datamodules.search.queries import (
    NO_DOCUMENT,
    RELEVANT_ABOVE,
    JudgedQueries,
    Queries,
    numbers_digest,
    rows_of,
)
from datamodules.text.encoding import Framing, TextEncoding, sentences_of

KINDS = ("judged", "titles", "sentences")  # of training pairs
FEWEST_WORDS = 4  # of a sentence that can stand for a query
SAMPLE_KEY = 1_607  # of the documents that are drawn; any number
KEPT_TEXTS = 1 << 13  # whose sentences a process remembers
QueryPart = Literal["train", "validation", "test", "all"]
TEXTS = ("documents", "queries")
RUN_FILE = "run.trec"


@dataclass(frozen=True)
class TrainingMix:
    """How often each kind of pair comes in an epoch: the ratio of a mixed training.

    Args:
        judged: times that each judged query is taken, with one of its relevant documents, drawn
            anew each time in proportion to its grade.
        titles: times that each document gives its title as query and its text as answer.
        sentences: times that each document gives one of its sentences as query, drawn anew each
            time, and itself as answer.
        removal: probability that such a sentence is then missing from the document.
        token_dropout: probability that a distinct token is missing from a query or a document in
            this epoch; a text of one token keeps it.

    Raises:
        ValueError: a negative number, nothing at all, or a removal or dropout that is no
            probability.
    """

    judged: int = 1
    titles: int = 0
    sentences: int = 0
    removal: float = 0.9
    token_dropout: float = 0.0

    def __post_init__(self) -> None:
        times = [getattr(self, name) for name in KINDS]
        if min(times) < 0 or not any(times):
            raise ValueError(
                f"mix.{', mix.'.join(KINDS)} must be 0 or more, one of them above 0, got {times}."
            )
        for name in ("removal", "token_dropout"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"mix.{name} must be 0 to 1, got {getattr(self, name)}.")

    @property
    def reads_whole(self) -> bool:
        """Whether texts are read beyond the encoder's lengths: tokens are dropped from all."""
        return self.token_dropout > 0

    def counts(self, collection: Collection, judged: JudgedQueries) -> dict[str, int]:
        """Return kind -> how many pairs of it there are, each counted once.

        Args:
            judged: queries that have a relevant document.

        Raises:
            ValueError: nothing is left to train on.
        """
        num_documents = collection.num_documents
        counts = dict(zip(KINDS, (len(judged.queries), num_documents, num_documents), strict=True))
        if not any(counts[kind] and getattr(self, kind) for kind in KINDS):
            raise ValueError(
                "there is no pair to train on: the training part has no relevant document. Name "
                "judgements in data.collection, or let the documents teach themselves with "
                "data.mix.sentences."
            )
        return counts


@lru_cache(KEPT_TEXTS)
def _document(collection: Collection, number: int) -> CollectionDocument:
    return collection.document(number)


@lru_cache(KEPT_TEXTS)
def document_sentences(text: str) -> tuple[list[str], list[int]]:
    """Return the sentences of a text, at least one, which may have no word, and the places of
    those that can stand for a query: short ones where there are no others.

    The ends of lines mean nothing, as texts may be wrapped.
    """
    line = " ".join(text.split())
    sentences = sentences_of([line]) or [line]
    long = [n for n, one in enumerate(sentences) if len(one.split()) >= FEWEST_WORDS]
    return sentences, long or list(range(len(sentences)))


def drawn_sentence(
    document: CollectionDocument, removal: float, rng: np.random.Generator
) -> tuple[str, CollectionDocument | None]:
    """Return one sentence of a document, and the document without it if it is taken out.

    Args:
        removal: probability that the sentence is taken out; a single one stays.
    """
    sentences, places = document_sentences(document.text)
    place = places[int(rng.integers(len(places))) if len(places) > 1 else 0]
    if rng.random() >= removal or len(sentences) == 1:
        return sentences[place], None
    rest = " ".join(sentences[:place] + sentences[place + 1 :])
    return sentences[place], CollectionDocument(document.title, rest)


def framed(texts: Sequence[np.ndarray], framing: Framing) -> tuple[torch.Tensor, torch.Tensor]:
    """Return input_ids [n, T] int64, padded with 0, and attention_mask [n, T] bool of token ids,
    each between its marks and cut before."""
    first = framing.num_marks - 1
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    ends = (first + sizes)[:, None]
    place = np.arange(ends.max() + 1)
    ids = np.zeros((len(texts), len(place)), np.int64)
    ids[(place >= first) & (place < ends)] = np.concatenate(texts)
    ids[place == ends] = framing.separator_id
    if framing.begin_id is not None:
        ids[:, 0] = framing.begin_id
    return torch.from_numpy(ids), torch.from_numpy(place <= ends)


class PairExample(NamedTuple):
    """A query and its K documents (the first answers it) as token ids, their numbers [K] with -1
    where there are fewer, and the documents [R] that may be no negatives of it."""

    query: np.ndarray
    texts: list[np.ndarray]
    document: np.ndarray
    known: np.ndarray


class PairDataset(PlannedDataset):
    """Pairs of the training part, and of the documents themselves.

    Args:
        judged: queries of the training part that have a relevant document.
        queries: the same, with their texts.
        mix: how often each kind comes.
        negatives: which documents come along as hard negatives.
        lists: that these are drawn from, where people have not judged them.
        seed: key of all that is drawn, together with epoch and sample id.

    Raises:
        ValueError: nothing is left to train on.
    """

    def __init__(
        self,
        collection: Collection,
        encoding: TextEncoding,
        judged: JudgedQueries,
        queries: Queries,
        mix: TrainingMix,
        negatives: HardNegatives,
        lists: Lists | None,
        seed: int,
    ) -> None:
        self.collection, self.encoding, self.mix, self.seed = collection, encoding, mix, seed
        self.judged, self.queries, self.negatives, self.lists = judged, queries, negatives, lists
        self.counts = mix.counts(collection, judged)
        self.ends = np.cumsum([self.counts[kind] * getattr(mix, kind) for kind in KINDS]).tolist()
        self.document_tokens = kept_documents(collection, encoding, mix.reads_whole)
        self.query_tokens = kept_queries(queries, encoding, mix.reads_whole)
        of_document = estimated_lengths(encoding, collection)
        answers = (self.relevant(place)[0] for place in range(len(queries)))
        of_query = np.array([of_document[documents].mean() for documents in answers], np.int64)
        of_kinds = zip(KINDS, (of_query, of_document, of_document), strict=True)
        self.lengths = np.concatenate([np.tile(own, getattr(mix, kind)) for kind, own in of_kinds])
        pool = [asdict(negatives) | {"run": None}, lists and lists.fingerprint]
        self.fingerprint = digest_of([asdict(mix), pool, collection.fingerprint, encoding.digest])
        self.target_counts = {TERM: None}

    def relevant(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the relevant documents of a query and their grades, as float64."""
        documents, grades = self.judged.judged(place)
        is_relevant = grades > RELEVANT_ABOVE
        return documents[is_relevant], grades[is_relevant].astype(np.float64)

    def pool(self, place: int) -> np.ndarray:
        """Return the documents [n] int64 that negatives of a query are drawn from, those of lists
        in the order of their ranks; relevant ones may be there."""
        if self.lists is not None:
            return self.lists.of(place)[0][self.negatives.skip :]
        documents, grades = self.judged.judged(place)
        return documents[grades <= RELEVANT_ABOVE]

    def example(self, sample_id: int, epoch: int) -> PairExample:
        """Return one sample as it is in this epoch."""
        return self.examples(np.array([sample_id]), epoch)[0]

    def examples(self, sample_ids: np.ndarray, epoch: int) -> list[PairExample]:
        rngs = rngs_for(self.seed, epoch, sample_ids)
        return [self._drawn(*own) for own in zip(sample_ids.tolist(), rngs, strict=True)]

    def _drawn(self, sample_id: int, rng: np.random.Generator) -> PairExample:
        (kind, number), limits = self._place(sample_id), self.encoding.limits
        if kind == "judged":
            answer, known, negatives = self._judged_pair(number, rng)
            query, text = self.query_tokens[number], self.document_tokens[answer]
        else:
            asked, rest = self._own_pair(kind, number, rng)
            answer, known, negatives = number, np.array([number]), []
            query = self.encoding.ids(asked)  # drawn again in a later epoch
            text = self.document_tokens[number] if rest is None else self.encoding.ids(rest)
        room = limits.max_length - self.encoding.framing.num_marks
        texts = [text, *(self.document_tokens[other] for other in negatives)]
        texts = [self._kept(ids, rng)[:room] for ids in texts]
        missing = self.negatives.count - len(negatives)
        texts += [np.zeros(0, np.int64)] * missing
        numbers = np.array([answer, *negatives, *[NO_DOCUMENT] * missing], np.int64)
        return PairExample(self._kept(query, rng)[: limits.max_query_length], texts, numbers, known)

    def collate(self, examples: list[PairExample]) -> dict[str, torch.Tensor]:
        """Return the padded batch."""
        framing = self.encoding.framing
        queries = framed([example.query for example in examples], framing)
        documents = framed([text for example in examples for text in example.texts], framing)
        return {
            "query_ids": queries[0],
            "query_mask": queries[1],
            "document_ids": documents[0],
            "document_mask": documents[1],
            "document": torch.from_numpy(np.concatenate([e.document for e in examples])),
            "known": torch.from_numpy(rows_of([e.known for e in examples], NO_DOCUMENT)),
        }

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the kind, the query and the ids of the documents."""
        kind, number = self._place(sample_id)
        rng, document_id = rng_for(self.seed, epoch, sample_id), self.collection.document_id
        if kind == "judged":
            answer, _, negatives = self._judged_pair(number, rng)
            query = self.queries.text(number)
        else:
            (query, _), answer, negatives = self._own_pair(kind, number, rng), number, []
        others = " ".join(map(document_id, negatives))
        return {"kind": kind, "query": query, "answer": document_id(answer), "negatives": others}

    def _place(self, sample_id: int) -> tuple[str, int]:
        """Return the kind of a sample and its number among those."""
        kind = bisect_right(self.ends, sample_id)
        first = self.ends[kind - 1] if kind else 0
        return KINDS[kind], (sample_id - first) % self.counts[KINDS[kind]]

    def _judged_pair(
        self, place: int, rng: np.random.Generator
    ) -> tuple[int, np.ndarray, list[int]]:
        """Return the numbers of a document that answers a query, of all that do, and of at most
        `negatives.count` hard negatives."""
        known, grades = self.relevant(place)
        shares = np.cumsum(grades / grades.sum())  # as `rng.choice` draws, in a quarter of its time
        answer = int(known[np.searchsorted(shares / shares[-1], rng.random(), side="right")])
        if not self.negatives.count:
            return answer, known, []
        pool = np.setdiff1d(self.pool(place), known)
        count = min(self.negatives.count, len(pool))
        return answer, known, rng.choice(pool, count, replace=False).tolist()

    def _own_pair(self, kind: str, number: int, rng: np.random.Generator) -> tuple[str, str | None]:
        """Return the query and the answer that a document makes itself; `None` is all of it."""
        document = _document(self.collection, number)
        if kind == "titles" and document.title:
            # Some texts begin with their title, by which they would be found without learning.
            return document.title, document.text.removeprefix(document.title)
        sentence, rest = drawn_sentence(document, self.mix.removal, rng)
        return sentence, rest and rest.whole

    def _kept(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return token ids without those that are dropped in this epoch."""
        probability = self.mix.token_dropout
        if not probability or not len(ids):
            return ids
        distinct, which = np.unique(ids, return_inverse=True)
        is_kept = rng.random(len(distinct)) >= probability
        return ids[is_kept[which]] if is_kept.any() else ids


def estimated_lengths(encoding: TextEncoding, collection: Collection) -> np.ndarray:
    """Return about how many positions each document takes, [documents] int64: its bytes by the
    tokens per byte of some, cut at the encoder's length."""
    sizes = collection.document_lengths
    positions = np.ceil(sizes * tokens_per_byte(encoding, collection)).astype(np.int64)
    return np.clip(positions + encoding.framing.num_marks, 1, encoding.limits.max_length)


class TextExample(NamedTuple):
    """Token ids of one text, its number, and of a query its judgements and the first stage's
    documents with their scores, best first."""

    ids: np.ndarray
    is_query: bool
    number: int
    judged: np.ndarray = np.zeros(0, np.int64)
    grade: np.ndarray = np.zeros(0, np.float32)
    first: np.ndarray = np.zeros(0, np.int64)
    first_score: np.ndarray = np.zeros(0, np.float32)


class TextsDataset(PlannedDataset):
    """Queries, then documents, each once; a sample is a text: for evaluation and prediction.

    Args:
        documents: [D] numbers of those that are encoded, ascending.
        judged: judgements of the queries; `None` in prediction.
        bm25: how the first stage scores; `None` leaves it out.
        depth: documents of the first stage.
        is_whole: read the tokens that a training keeps which drops some of them.
    """

    def __init__(
        self,
        collection: Collection,
        encoding: TextEncoding,
        queries: Queries,
        documents: np.ndarray,
        judged: JudgedQueries | None = None,
        bm25: Bm25Options | None = None,
        depth: int = 0,
        is_whole: bool = False,
    ) -> None:
        self.collection, self.encoding = collection, encoding
        self.queries, self.documents, self.judged = queries, documents, judged
        self.document_tokens = kept_documents(collection, encoding, is_whole)
        self.query_tokens = kept_queries(queries, encoding, is_whole)
        self.bm25 = None if bm25 is None else open_bm25(collection, bm25)
        self.depth = min(depth, len(documents)) if bm25 else 0
        of_queries = np.full(len(queries), encoding.limits.max_query_length)
        of_documents = estimated_lengths(encoding, collection)[documents]
        self.lengths = np.concatenate([of_queries, of_documents]).astype(np.int64)
        chosen = digest_of([queries.digest, numbers_digest(documents)])
        options = [bm25 and asdict(bm25), self.depth, judged is not None]
        self.fingerprint = digest_of([collection.fingerprint, encoding.digest, chosen, options])
        self.target_counts = {}

    def example(self, sample_id: int, epoch: int) -> TextExample:
        """Return one text; it is the same in every epoch."""
        limits = self.encoding.limits
        if sample_id >= len(self.queries):
            number = int(self.documents[sample_id - len(self.queries)])
            room = limits.max_length - self.encoding.framing.num_marks
            return TextExample(self.document_tokens[number][:room], False, number)
        ids = self.query_tokens[sample_id][: limits.max_query_length]
        number = int(self.queries.numbers[sample_id])
        if self.judged is None:
            return TextExample(ids, True, number)
        judged = self.judged.judged(sample_id)
        if self.bm25 is None:
            return TextExample(ids, True, number, *judged)
        (hits,) = self.bm25.search([self.queries.text(sample_id)], self.depth, self.documents)
        return TextExample(ids, True, number, *judged, hits.documents[0], hits.scores[0])

    def collate(self, examples: list[TextExample]) -> dict[str, torch.Tensor]:
        """Return the padded batch; widths of judgements do not depend on it."""
        ids, mask = framed([example.ids for example in examples], self.encoding.framing)
        texts = {
            "input_ids": ids,
            "attention_mask": mask,
            "is_query": torch.tensor([example.is_query for example in examples]),
            "text_index": torch.tensor([example.number for example in examples]),
        }
        if self.judged is None:
            return texts
        queries, most = [example for example in examples if example.is_query], self.judged.most
        return {
            **texts,
            "judged": _table([e.judged for e in queries], NO_DOCUMENT, most, np.int64),
            "grade": _table([e.grade for e in queries], np.nan, most, np.float32),
            "first_document": _table([e.first for e in queries], NO_DOCUMENT, self.depth, np.int64),
            "first_score": _table([e.first_score for e in queries], 0.0, self.depth, np.float32),
        }

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the id of the text."""
        if sample_id < len(self.queries):
            return {"query": self.queries.id(sample_id)}
        number = int(self.documents[sample_id - len(self.queries)])
        return {"document": self.collection.document_id(number)}


def chosen_documents(
    judged: JudgedQueries, num_documents: int, num_others: int | None
) -> np.ndarray:
    """Return the documents that queries are searched among, ascending.

    Args:
        judged: queries with their judgements.
        num_others: documents besides those that are judged, which depend on nothing but their
            number; `None` takes all.
    """
    everything = np.arange(num_documents)
    if num_others is None:
        return everything
    of_queries = np.unique(judged.judgements.document)
    others = np.setdiff1d(everything, of_queries)
    drawn = others[np.argsort(hash_ids(others, SAMPLE_KEY), kind="stable")[:num_others]]
    return np.sort(np.concatenate([of_queries, drawn]))


def _table(
    values: Sequence[np.ndarray], filler: float, width: int, dtype: type[np.generic]
) -> torch.Tensor:
    if not values:
        return torch.from_numpy(np.zeros((0, width), dtype))
    return torch.from_numpy(rows_of([v.astype(dtype) for v in values], filler, width))


class EncodedCollection:
    """A folder of encoded texts, as a prediction of a retriever writes it.

    Attributes:
        documents: [D, W] memory-mapped, unit vectors.
        queries: [Q, W] memory-mapped.
        document_ids, query_ids: one id per row, as in the collection.

    Raises:
        FileNotFoundError: it holds no encoded texts.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "facts.json").is_file():
            raise FileNotFoundError(
                f"{folder} holds no encoded texts; make it with unisono predict of a retriever."
            )
        self.folder = folder
        self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text("utf-8"))
        self.documents, self.queries = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in TEXTS
        )

    @property
    def document_ids(self) -> list[str]:
        return self._ids("documents")

    @property
    def query_ids(self) -> list[str]:
        return self._ids("queries")

    def _ids(self, name: str) -> list[str]:
        with (self.folder / f"{name}.ids.jsonl").open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]


def write_encoded(
    folder: Path,
    texts: Mapping[str, tuple[np.ndarray, Iterable[str]]],
    facts: dict[str, Any],
    finish: Callable[[EncodedCollection], None],
) -> None:
    """Write encoded texts, whole or not at all.

    Args:
        folder: which must not be there yet.
        texts: `documents` and `queries`: vectors [n, W], larger than memory where they are
            mapped, and the id of each row.
        facts: what else a reader should know.
        finish: called with the unfinished folder, to which it may add files.

    Raises:
        FileExistsError: the folder is there.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} exists and is not overwritten; move it away.")
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        with naming(folder):
            unfinished.mkdir(parents=True)
            for name, (vectors, ids) in texts.items():
                np.save(unfinished / f"{name}.npy", vectors)
                lines = (json.dumps(id) + "\n" for id in ids)
                with (unfinished / f"{name}.ids.jsonl").open("w", encoding="utf-8") as file:
                    file.writelines(lines)
            (unfinished / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        finish(EncodedCollection(unfinished))
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        os.rename(unfinished, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def no_search(encoded: EncodedCollection) -> None:
    """Leave encoded texts as they are."""


class RetrievalDataModule(SearchDataModule):
    """Deals pairs for training, and single texts to encode for everything else.

    In evaluation and prediction a sample is a query or a document, and each is encoded once.

    Args:
        mix: how often each kind of pair comes in an epoch.
        negatives: which documents come along as hard negatives.
        num_others: evaluation searches the judged documents and so many others instead of the
            whole collection, which is easier: its figures say so. `None` searches all.
        bm25: the first stage that is measured beside the retriever, and fused with it; `None`
            leaves it out.
        bm25_depth: documents of the first stage for each query.
        predict_part: part whose judged queries a prediction encodes and searches with.
        predict_depth: documents of each query in the run that a prediction writes.
        search: collection, output, tokenizer and more, see `SearchDataModule`.

    Raises:
        ValueError: a number below 1, or of others below 0.
    """

    def __init__(
        self,
        mix: TrainingMix = TrainingMix(),
        negatives: HardNegatives = HardNegatives(),  # noqa: B008 - frozen
        num_others: int | None = None,
        bm25: Bm25Options | None = Bm25Options(),  # noqa: B008 - frozen
        bm25_depth: int = 1000,
        predict_part: QueryPart = "test",
        predict_depth: int = 1000,
        **search: Any,
    ) -> None:
        super().__init__(**search)
        for name, value in (("bm25_depth", bm25_depth), ("predict_depth", predict_depth)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if num_others is not None and num_others < 0:
            raise ValueError(f"num_others must be 0 or more, got {num_others}.")
        self.mix, self.negatives, self.num_others = mix, negatives, num_others
        self.bm25, self.bm25_depth = bm25, bm25_depth
        self.predict_part, self.predict_depth = predict_part, predict_depth

    @property
    def predict_output_path(self) -> Path:
        """The folder of encoded texts that a prediction makes."""
        return self.output_path("encoded")

    def check_stage(self, stage: Stage) -> None:
        """Raise where there is nothing to train on, or no query to evaluate or search with."""
        if stage == "predict":
            self._predicted()
        elif (judged := self.judged(stage, may_lack=stage == "train")) and stage == "train":
            self.mix.counts(self.collection, judged.with_relevant())

    def prepare_tokens(self, stage: Stage, encoding: TextEncoding, recipe: dict[str, Any]) -> None:
        """Make the tokens of the stage's texts, and the lists of negatives, in the cache."""
        self._dataset(stage, encoding)

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage.

        Raises:
            ValueError: there is nothing to train on, or no query to evaluate or search with.
        """
        assert self.encoding is not None
        return self._dataset(stage, self.encoding)

    def _dataset(self, stage: Stage, encoding: TextEncoding) -> PairDataset | TextsDataset:
        collection = self.collection_of(stage)
        everything = np.arange(collection.num_documents)
        if stage == "predict":
            return TextsDataset(collection, encoding, self._predicted(), everything)
        judged = self.judged(stage, may_lack=stage == "train")
        if stage == "train":
            own = judged.with_relevant()
            queries = self.queries(own.queries)
            lists = negative_lists(self.negatives, collection, judged, queries)
            facts = (self.mix, self.negatives, lists, self.seed)
            return PairDataset(collection, encoding, own, queries, *facts)
        documents = chosen_documents(judged, collection.num_documents, self.num_others)
        first = (self.bm25, self.bm25_depth, self.mix.reads_whole)
        queries = self.queries(judged.queries)
        return TextsDataset(collection, encoding, queries, documents, judged, *first)

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the encoded texts, and whatever the model's `search` finds in them."""
        dataset = self.datasets["predict"]
        assert isinstance(dataset, TextsDataset)
        vectors, queries = results["vector"], dataset.queries
        names = map(self.collection.document_id, range(self.collection.num_documents))
        texts = {
            "queries": (vectors[: len(queries)], map(queries.id, range(len(queries)))),
            "documents": (vectors[len(queries) :], names),
        }
        facts = {
            "collection": self.collection.fingerprint,
            "queries": self.predict_queries or self.predict_part,
        }
        write_encoded(path, texts, facts, self.model.options.get("search", no_search))

    def _predicted(self) -> Queries:
        """Return the queries that a prediction searches with."""
        if (queries := self.queries_of_file()) is not None:
            return queries
        if self.predict_part == "all":
            return self.queries(np.arange(self.collection.num_queries))
        judgements = self.collection.judgements(PART_NAMES.index(self.predict_part))
        numbers = np.unique(judgements.query)
        if not len(numbers):
            raise ValueError(
                f"predict_part is {self.predict_part}, and no query is judged there; take "
                "another part, or all."
            )
        return self.queries(numbers)


def negative_lists(
    options: HardNegatives, collection: Collection, judged: JudgedQueries, queries: Queries
) -> Lists | None:
    """Return the lists that hard negatives of queries are drawn from; `None` for judged ones.

    Raises: as of `run_lists`, and ValueError where nobody was found not relevant.
    """
    if options.count and options.source == "bm25":
        return bm25_lists(options.bm25, collection, queries, options.depth)
    if options.count and options.source == "run":
        facts = (collection, queries, options.depth, "data.negatives.run")
        return run_lists(options.run, *facts)
    if options.count and not (judged.judgements.grade <= RELEVANT_ABOVE).any():
        raise ValueError(
            'negatives.source is "judged", but no document was judged and found not relevant '
            "(grade 0); take bm25 or run, or set negatives.count to 0."
        )
    return None
