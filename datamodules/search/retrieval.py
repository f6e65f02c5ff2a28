"""RetrievalDataModule: pairs to train a retriever, single texts for everything else.

Shapes: B samples of the micro-batch, K documents of one, R most documents that are known, Q queries
among the texts of a batch, J most judgements of one query, F documents of a first stage.
"""

import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from datamodules.core.plan import hash_ids, rng_for
from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import digest_of, sync
from datamodules.files.splitting import PART_NAMES
from datamodules.files.tables import naming
from datamodules.search.bm25 import Bm25, Bm25Options, open_bm25
from datamodules.search.candidates import HardNegatives, NegativePool
from datamodules.search.collection import Collection, Document
from datamodules.search.datamodule import (
    TERM,
    SearchDataModule,
    kept_collection,
    read_collection,
    tokens_per_byte,
)
from datamodules.search.queries import (
    NO_DOCUMENT,
    CollectionQueries,
    JudgedQueries,
    Queries,
    numbers_digest,
    rows_of,
)
from datamodules.text.encoding import Framed, TextEncoding, padded
from datamodules.text.terms import sentences_of

KINDS = ("judged", "titles", "sentences")  # of training pairs
FEWEST_WORDS = 4  # of a sentence that can stand for a query
SAMPLE_KEY = 1_607  # of the documents that are drawn; any number
QueryPart = Literal["train", "validation", "test", "all"]
NumberType = Literal["float32", "float16"]
ROWS_AT_ONCE = 65_536
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
        times = {name: getattr(self, name) for name in KINDS}
        for name, value in times.items():
            if value < 0:
                raise ValueError(f"mix.{name} must be 0 or more, got {value}.")
        if not any(times.values()):
            raise ValueError(
                f"mix takes no pair at all; give one of {', '.join(KINDS)} a number above 0."
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
            collection: of the texts.
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


def document_sentences(document: Document) -> list[str]:
    """Return the sentences of a document's text, at least one; it may have no word.

    The ends of lines mean nothing, as texts may be wrapped.
    """
    text = " ".join(document.text.split())
    return sentences_of([text]) or [text]


def drawn_sentence(
    document: Document, removal: float, rng: np.random.Generator
) -> tuple[str, Document | None]:
    """Return one sentence of a document, and the document without it if it is taken out.

    Args:
        document: whose short sentences are drawn only where it has no others.
        removal: probability that the sentence is taken out; a single one stays.
        rng: of the sample.
    """
    sentences = document_sentences(document)
    long = [n for n, text in enumerate(sentences) if len(text.split()) >= FEWEST_WORDS]
    places = long or list(range(len(sentences)))
    place = places[int(rng.integers(len(places))) if len(places) > 1 else 0]
    if rng.random() >= removal or len(sentences) == 1:
        return sentences[place], None
    rest = " ".join(text for n, text in enumerate(sentences) if n != place)
    return sentences[place], Document(document.title, rest)


class PairExample(NamedTuple):
    """A query, its K documents (the first answers it), their numbers [K] with -1 where there are
    fewer, and the documents [R] that may be no negatives of it."""

    query: Framed
    texts: list[Framed]
    document: np.ndarray
    known: np.ndarray


class PairDataset(PlannedDataset):
    """Pairs of the training part, and of the documents themselves.

    Args:
        collection: of texts and judgements.
        encoding: of the texts.
        judged: queries of the training part.
        mix: how often each kind comes.
        negatives: which documents come along as hard negatives.
        seed: key of all that is drawn, together with epoch and sample id.

    Raises:
        ValueError: nothing is left to train on, or there are no negatives of the wanted kind.
    """

    def __init__(
        self,
        collection: Collection,
        encoding: TextEncoding,
        judged: JudgedQueries,
        mix: TrainingMix,
        negatives: HardNegatives,
        seed: int,
    ) -> None:
        self.collection, self.encoding, self.mix, self.seed = collection, encoding, mix, seed
        self.judged, self.num_negatives = judged.with_relevant(), negatives.count
        self.pool = NegativePool(negatives, collection, judged)
        self.counts = mix.counts(collection, self.judged)
        self.ends = np.cumsum([self.counts[kind] * getattr(mix, kind) for kind in KINDS]).tolist()
        self.tokens = kept_collection(collection, encoding, mix.reads_whole)
        of_document = estimated_lengths(encoding, collection)
        answers = (self.judged.relevant(place)[0] for place in range(len(self.judged.queries)))
        of_query = np.array([of_document[documents].mean() for documents in answers], np.int64)
        of_kinds = zip(KINDS, (of_query, of_document, of_document), strict=True)
        self.lengths = np.concatenate([np.tile(own, getattr(mix, kind)) for kind, own in of_kinds])
        facts = [asdict(mix), self.pool.fingerprint, collection.fingerprint, encoding.digest]
        self.fingerprint = digest_of(facts)
        self.target_counts = {TERM: None}

    def example(self, sample_id: int, epoch: int) -> PairExample:
        """Return one sample as it is in this epoch."""
        kind, number = self._place(sample_id)
        rng, framing = rng_for(self.seed, epoch, sample_id), self.encoding.framing
        if kind == "judged":
            query_number, answer, known = self._judged_pair(number, rng)
            query, text = self.tokens.queries[query_number], self.tokens.documents[answer]
            negatives = self._negatives(query_number, known, rng)
        else:
            asked, rest = self._own_pair(kind, number, rng)
            answer, known, negatives = number, np.array([number]), []
            query = self.encoding.ids(asked)  # drawn again in a later epoch
            whole = self.tokens.documents
            text = whole[number] if rest is None else self.encoding.ids(rest)
        others = [self.tokens.documents[other] for other in negatives]
        missing = self.num_negatives - len(negatives)
        texts = [framing.single(self._kept(ids, rng)) for ids in (text, *others)]
        texts += [framing.single(np.zeros(0, np.int64))] * missing
        numbers = np.array([answer, *negatives, *[NO_DOCUMENT] * missing], np.int64)
        return PairExample(framing.query(self._kept(query, rng)), texts, numbers, known)

    def collate(self, examples: list[PairExample]) -> dict[str, torch.Tensor]:
        """Return the padded batch."""
        queries = padded([example.query for example in examples])
        documents = padded([text for example in examples for text in example.texts])
        return {
            "query_ids": queries["input_ids"],
            "query_mask": queries["attention_mask"],
            "document_ids": documents["input_ids"],
            "document_mask": documents["attention_mask"],
            "document": torch.from_numpy(np.concatenate([e.document for e in examples])),
            "known": torch.from_numpy(rows_of([e.known for e in examples], NO_DOCUMENT)),
        }

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the kind, the query and the ids of the documents."""
        kind, number = self._place(sample_id)
        rng, document_id = rng_for(self.seed, epoch, sample_id), self.collection.document_id
        if kind != "judged":
            query, _ = self._own_pair(kind, number, rng)
            return {"kind": kind, "query": query, "answer": document_id(number), "negatives": ""}
        query_number, answer, known = self._judged_pair(number, rng)
        negatives = map(document_id, self._negatives(query_number, known, rng))
        texts = {"query": self.collection.query(query_number), "answer": document_id(answer)}
        return {"kind": kind, **texts, "negatives": " ".join(negatives)}

    def _place(self, sample_id: int) -> tuple[str, int]:
        """Return the kind of a sample and its number among those."""
        kind = bisect_right(self.ends, sample_id)
        first = self.ends[kind - 1] if kind else 0
        return KINDS[kind], (sample_id - first) % self.counts[KINDS[kind]]

    def _judged_pair(self, place: int, rng: np.random.Generator) -> tuple[int, int, np.ndarray]:
        """Return the number of a query, of a document that answers it, and of all that do."""
        documents, grades = self.judged.relevant(place)
        answer = int(rng.choice(documents, p=grades / grades.sum()))
        return int(self.judged.queries[place]), answer, documents

    def _own_pair(self, kind: str, number: int, rng: np.random.Generator) -> tuple[str, str | None]:
        """Return the query and the answer that a document makes itself; `None` is all of it."""
        document = self.collection.document(number)
        if kind == "titles" and document.title:
            # Some texts begin with their title, by which they would be found without learning.
            return document.title, document.text.removeprefix(document.title)
        sentence, rest = drawn_sentence(document, self.mix.removal, rng)
        return sentence, rest and rest.whole

    def _negatives(self, query: int, known: np.ndarray, rng: np.random.Generator) -> list[int]:
        """Return the numbers of at most `num_negatives` hard negatives; none is known relevant."""
        if not self.num_negatives:
            return []
        pool = np.setdiff1d(self.pool.of(query), known)
        return rng.choice(pool, min(self.num_negatives, len(pool)), replace=False).tolist()

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
    """One text, its number, and of a query its judgements and the first stage's documents with
    their scores, best first."""

    framed: Framed
    is_query: bool
    number: int
    judged: np.ndarray = np.zeros(0, np.int64)
    grade: np.ndarray = np.zeros(0, np.float32)
    first: np.ndarray = np.zeros(0, np.int64)
    first_score: np.ndarray = np.zeros(0, np.float32)


class TextsDataset(PlannedDataset):
    """Queries, then documents, each once; a sample is a text: for evaluation and prediction.

    Args:
        collection: of the texts.
        encoding: of the texts.
        queries: that are encoded.
        documents: [D] numbers of those that are encoded, ascending.
        judged: judgements of the queries; `None` in prediction.
        bm25: how the first stage scores; `None` leaves it out.
        depth: documents of the first stage.
        is_whole: read tokens beyond the encoder's lengths too, where a training keeps those.
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
        self.queries, self.documents = queries, documents
        self.judged, self.bm25_options = judged, bm25
        self.tokens = (
            read_collection(collection, encoding, queries)
            if judged is None
            else kept_collection(collection, encoding, is_whole)
        )
        self.depth = min(depth, len(documents)) if bm25 else 0
        self._bm25: Bm25 | None = None
        of_queries = np.full(len(queries), encoding.limits.max_query_length)
        of_documents = estimated_lengths(encoding, collection)[documents]
        self.lengths = np.concatenate([of_queries, of_documents]).astype(np.int64)
        chosen = digest_of([queries.digest, numbers_digest(documents)])
        options = [bm25 and asdict(bm25), self.depth, judged is not None]
        self.fingerprint = digest_of([collection.fingerprint, encoding.digest, chosen, options])
        self.target_counts = {}

    def example(self, sample_id: int, epoch: int) -> TextExample:
        """Return one text; it is the same in every epoch."""
        framing = self.encoding.framing
        if sample_id >= len(self.queries):
            index = int(self.documents[sample_id - len(self.queries)])
            return TextExample(framing.single(self.tokens.documents[index]), False, index)
        index = int(self.queries.indices[sample_id])
        framed = framing.query(self.tokens.queries[index])
        if self.judged is None:
            return TextExample(framed, True, index)
        judged = self.judged.judged(int(np.searchsorted(self.judged.queries, index)))
        if self.bm25_options is None:
            return TextExample(framed, True, index, *judged)
        query = self.queries.text(sample_id)
        if self._bm25 is None:
            self._bm25 = open_bm25(self.collection, self.bm25_options)
        (hits,) = self._bm25.search([query], self.depth, self.documents)
        return TextExample(framed, True, index, *judged, hits.documents[0], hits.scores[0])

    def collate(self, examples: list[TextExample]) -> dict[str, torch.Tensor]:
        """Return the padded batch; widths of judgements do not depend on it."""
        rows = padded([example.framed for example in examples])
        texts = {
            "input_ids": rows["input_ids"],
            "attention_mask": rows["attention_mask"],
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
        num_documents: of the collection.
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

    Args:
        folder: of the prediction.

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
        """One id per row of `documents`."""
        return self._ids("documents")

    @property
    def query_ids(self) -> list[str]:
        """One id per row of `queries`."""
        return self._ids("queries")

    def _ids(self, name: str) -> list[str]:
        with (self.folder / f"{name}.ids.jsonl").open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]


def write_encoded(
    folder: Path,
    vectors: dict[str, np.ndarray],
    ids: dict[str, Iterable[str]],
    number_type: NumberType,
    facts: dict[str, Any],
    finish: Callable[[EncodedCollection], None],
) -> None:
    """Write encoded texts, whole or not at all.

    Args:
        folder: which must not be there yet.
        vectors: `documents` and `queries`, [n, W]; larger than memory where they are mapped.
        ids: of each row.
        number_type: of the matrices.
        facts: what else a reader should know.
        finish: called with the unfinished folder, to which it may add files.

    Raises:
        FileExistsError: the folder is there.
    """
    with _whole_folder(folder) as unfinished:
        for name in TEXTS:
            values = vectors[name]
            header = {"descr": np.dtype(number_type).str, "fortran_order": False}
            with naming(folder), (unfinished / f"{name}.npy").open("wb") as file:
                # Not mapped: a full disk is then an error, not a signal.
                np.lib.format.write_array_header_1_0(file, {**header, "shape": values.shape})
                for start in range(0, len(values), ROWS_AT_ONCE):
                    rows = np.asarray(values[start : start + ROWS_AT_ONCE], number_type)
                    file.write(rows.tobytes())
            with naming(folder), (unfinished / f"{name}.ids.jsonl").open("w", -1, "utf-8") as file:
                file.writelines(json.dumps(id) + "\n" for id in ids[name])
        (unfinished / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        finish(EncodedCollection(unfinished))


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """Give an unfinished folder, which takes its name when all in it is on the disk."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists and is not overwritten; move it away.")
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with naming(folder):
        unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for path in unfinished.iterdir():
            sync(path)
        sync(unfinished)
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
        predict_type: numbers of the matrices that a prediction writes.
        search: collection, output, tokenizer and more, see `SearchDataModule`.

    Raises:
        ValueError: a number below 1, or of others below 0, or options in conflict.
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
        predict_type: NumberType = "float32",
        **search: Any,
    ) -> None:
        super().__init__(**search)
        for name, value in (("bm25_depth", bm25_depth), ("predict_depth", predict_depth)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        if num_others is not None and num_others < 0:
            raise ValueError(f"num_others must be 0 or more, got {num_others}.")
        if self.predict_queries is not None and predict_part != "test":
            raise ValueError(
                f"predict_part {predict_part} has no effect beside predict_queries "
                f"{self.predict_queries}; leave one of them out."
            )
        self.mix, self.negatives, self.num_others = mix, negatives, num_others
        self.bm25, self.bm25_depth = bm25, bm25_depth
        self.predict_part, self.predict_depth = predict_part, predict_depth
        self.predict_type: NumberType = predict_type
        self.search_encoded: Callable[[EncodedCollection], None] = no_search

    @property
    def predict_output_path(self) -> Path:
        """The folder of encoded texts that a prediction makes."""
        return self.output_path("encoded")

    def check_stage(self, stage: Stage) -> None:
        """Raise where there is nothing to train on, or no query to evaluate or search with."""
        if stage == "predict":
            self._predicted()
            return
        judged = self.judged(stage, may_lack=stage == "train")
        if stage == "train":
            self.negatives.check(judged)
            self.mix.counts(self.collection, judged.with_relevant())

    def prepare_tokens(self, stage: Stage, encoding: TextEncoding, recipe: dict[str, Any]) -> None:
        """Make the tokens of the stage's texts, and the lists of negatives, in the cache."""
        collection = self.collection_of(stage)
        if stage != "predict":
            kept_collection(collection, encoding, self.mix.reads_whole)
        if stage == "train":
            NegativePool(self.negatives, collection, self.judged(stage, may_lack=True))

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage.

        Raises:
            ValueError: there is nothing to train on, or no query to evaluate or search with.
        """
        assert self.encoding is not None
        collection, encoding = self.collection_of(stage), self.encoding
        if stage == "predict":
            everything = np.arange(collection.num_documents)
            return TextsDataset(collection, encoding, self._predicted(), everything)
        judged = self.judged(stage, may_lack=stage == "train")
        if stage == "train":
            facts = (judged, self.mix, self.negatives, self.seed)
            return PairDataset(collection, encoding, *facts)
        documents = chosen_documents(judged, collection.num_documents, self.num_others)
        first = (self.bm25, self.bm25_depth, self.mix.reads_whole)
        queries = CollectionQueries(collection, judged.queries)
        return TextsDataset(collection, encoding, queries, documents, judged, *first)

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the encoded texts, and whatever `search_encoded` finds in them."""
        dataset = self.datasets["predict"]
        assert isinstance(dataset, TextsDataset)
        vectors, num_queries = results["vector"], len(dataset.queries)
        collection = self.collection
        write_encoded(
            path,
            {"queries": vectors[:num_queries], "documents": vectors[num_queries:]},
            {
                "queries": (dataset.queries.id(place) for place in range(num_queries)),
                "documents": (collection.document_id(int(n)) for n in dataset.documents),
            },
            self.predict_type,
            {
                "collection": collection.fingerprint,
                "queries": self.predict_queries or self.predict_part,
            },
            self.search_encoded,
        )

    def _predicted(self) -> Queries:
        """Return the queries that a prediction searches with."""
        if (queries := self.queries_of_file()) is not None:
            return queries
        if self.predict_part == "all":
            return CollectionQueries(self.collection, np.arange(self.collection.num_queries))
        judgements = self.collection.judgements(PART_NAMES.index(self.predict_part))
        numbers = np.unique(judgements.query)
        if not len(numbers):
            raise ValueError(
                f"predict_part is {self.predict_part}, and no query is judged there; take "
                "another part, or all."
            )
        return CollectionQueries(self.collection, numbers)
