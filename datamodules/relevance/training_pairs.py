"""Queries with a document that answers each: what a retriever is trained on.

Shapes: B samples of the micro-batch, K documents of one, R most documents that are known.
"""

from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch

from datamodules.cache import digest_of
from datamodules.encoded_texts import TextEncoding
from datamodules.framing import Framed, padded
from datamodules.plan import rng_for
from datamodules.planned import PlannedDataset
from datamodules.relevance.collection import Collection, Document
from datamodules.relevance.judged_queries import JudgedQueries
from datamodules.relevance.negatives import HardNegatives, NegativePool
from datamodules.relevance.tables import NO_DOCUMENT, rows_of
from datamodules.sentences import sentences_of

TERM = "queries"
LENGTH_PROBES = 64  # documents of which bytes per token are counted
FEWEST_WORDS = 4  # of a sentence that can stand for a query


@dataclass(frozen=True)
class TrainingMix:
    """How often each kind of pair comes in an epoch: the ratio of a mixed training.

    Args:
        judged: times that each judged query is taken, with one of its relevant documents, drawn
            anew each time in proportion to its grade.
        triples: times that each triple is taken, where the collection has some.
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
    triples: int = 1
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


KINDS = ("judged", "triples", "titles", "sentences")


class PairExample(NamedTuple):
    """A query, its K documents (the first answers it), their numbers [K] with -1 where there are
    fewer, and the documents [R] that may be no negatives of it."""

    query: Framed
    texts: list[Framed]
    document: np.ndarray
    known: np.ndarray


class _Pair(NamedTuple):
    """Texts of a sample before they are encoded, and what is known of its query."""

    query: str
    answer: Document
    document: int
    known: np.ndarray
    judged_query: int | None = None  # where negatives can be looked up
    negative: int | None = None  # that came with it


class PairDataset(PlannedDataset):
    """Pairs of the training part, of triples and of the documents themselves.

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
        self.judged = judged.with_relevant()
        self.num_negatives = negatives.count
        self.pool = NegativePool(negatives, collection, judged)
        self.triples = collection.triples if mix.triples else None
        counts = {
            "judged": len(self.judged.queries),
            "triples": 0 if self.triples is None else len(self.triples.query),
            "titles": collection.num_documents,
            "sentences": collection.num_documents,
        }
        self.counts = counts
        self.ends = np.cumsum([counts[kind] * getattr(mix, kind) for kind in KINDS])
        if not self.ends[-1]:
            raise ValueError(
                "there is no pair to train on: the training part has no relevant document and the "
                "collection no triples. Name judgements in data.collection, or let the documents "
                "teach themselves with data.mix.sentences."
            )
        self.lengths = self._lengths()
        facts = [asdict(mix), negatives.facts(), collection.fingerprint, encoding.digest]
        self.fingerprint = digest_of(facts)
        self.target_counts = {TERM: None}

    def example(self, sample_id: int, epoch: int) -> PairExample:
        """Return one sample as it is in this epoch."""
        rng = rng_for(self.seed, epoch, sample_id)
        pair = self._pair(sample_id, rng)
        chosen = self._negatives(pair, rng)
        others = [self.collection.document(int(number)) for number in chosen]
        missing = self.num_negatives - len(chosen)
        texts = [self._framed(document, rng) for document in (pair.answer, *others)]
        texts += [self.encoding.framing.single(np.zeros(0, np.int64))] * missing
        numbers = [pair.document, *chosen, *[NO_DOCUMENT] * missing]
        query = self.encoding.framing.query(self._ids(pair.query, rng))
        return PairExample(query, texts, np.array(numbers, np.int64), pair.known)

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
        rng = rng_for(self.seed, epoch, sample_id)
        kind, _ = self._place(sample_id)
        pair = self._pair(sample_id, rng)
        ids = [self.collection.document_id(int(n)) for n in self._negatives(pair, rng)]
        answer = self.collection.document_id(pair.document)
        return {"kind": kind, "query": pair.query, "answer": answer, "negatives": " ".join(ids)}

    def _place(self, sample_id: int) -> tuple[str, int]:
        """Return the kind of a sample and its number among those."""
        kind = int(np.searchsorted(self.ends, sample_id, side="right"))
        first = int(self.ends[kind - 1]) if kind else 0
        return KINDS[kind], (sample_id - first) % self.counts[KINDS[kind]]

    def _pair(self, sample_id: int, rng: np.random.Generator) -> _Pair:
        kind, number = self._place(sample_id)
        if kind == "judged":
            return self._judged_pair(number, rng)
        if kind == "triples":
            return self._triple(number)
        whole = self.collection.document(number)
        known = np.array([number])
        if kind == "titles" and whole.title:
            # Some texts begin with their title, by which they would be found without any learning.
            text = whole.text.removeprefix(whole.title)
            return _Pair(whole.title, Document("", text), number, known)
        sentence, rest = sentence_and_rest(whole, rng, self.mix.removal)
        return _Pair(sentence, rest, number, known)

    def _judged_pair(self, number: int, rng: np.random.Generator) -> _Pair:
        query = int(self.judged.queries[number])
        documents, grades = self.judged.relevant(number)
        answer = int(rng.choice(documents, p=grades / grades.sum()))
        text = self.collection.document(answer)
        return _Pair(self.collection.query(query), text, answer, documents, query)

    def _triple(self, number: int) -> _Pair:
        assert self.triples is not None
        query, positive, negative = (int(column[number]) for column in self.triples)
        known = np.union1d(self.judged.relevant_of(query), [positive])
        text = self.collection.document(positive)
        return _Pair(self.collection.query(query), text, positive, known, query, negative)

    def _negatives(self, pair: _Pair, rng: np.random.Generator) -> list[int]:
        """Return the numbers of at most `num_negatives` hard negatives; none is known relevant."""
        if not self.num_negatives:
            return []
        own = [] if pair.negative is None or pair.negative in pair.known else [pair.negative]
        if pair.judged_query is None:
            return own
        pool = np.setdiff1d(self.pool.of(pair.judged_query), [*pair.known, *own])
        more = min(self.num_negatives - len(own), len(pool))
        return [*own, *rng.choice(pool, more, replace=False).tolist()]

    def _framed(self, document: Document, rng: np.random.Generator) -> Framed:
        return self.encoding.framing.single(self._ids(document.whole, rng))

    def _ids(self, text: str, rng: np.random.Generator) -> np.ndarray:
        """Return the token ids of a text, without those that are dropped in this epoch."""
        ids, probability = self.encoding.ids(text), self.mix.token_dropout
        if not probability or not len(ids):
            return ids
        distinct, which = np.unique(ids, return_inverse=True)
        is_kept = rng.random(len(distinct)) >= probability
        return ids[is_kept[which]] if is_kept.any() else ids

    def _lengths(self) -> np.ndarray:
        """Return about how many positions each sample's document takes, [N] int64."""
        of_document = estimated_lengths(self.encoding, self.collection)
        parts = []
        for kind in KINDS:
            if kind == "judged":
                lengths = np.array([of_document[d].mean() for d, _ in self.judged.all_relevant()])
            elif kind == "triples":
                lengths = of_document[[] if self.triples is None else self.triples.positive]
            else:
                lengths = of_document
            parts.append(np.tile(lengths.astype(np.int64), getattr(self.mix, kind)))
        return np.concatenate(parts)


def sentence_and_rest(
    document: Document, rng: np.random.Generator, removal: float
) -> tuple[str, Document]:
    """Return one sentence of a document's text, and the document, perhaps without it.

    Sentences of fewer than four words are not drawn where there are others; a document of a
    single sentence keeps it. The ends of lines mean nothing, as texts may be wrapped.
    """
    text = " ".join(document.text.split())
    sentences = sentences_of([text]) or [text]  # which may have no word
    long = [n for n, text in enumerate(sentences) if len(text.split()) >= FEWEST_WORDS]
    drawn = int(rng.choice(long or range(len(sentences))))
    is_removed = rng.random() < removal and len(sentences) > 1
    rest = " ".join(s for n, s in enumerate(sentences) if n != drawn) if is_removed else None
    return sentences[drawn], document if rest is None else Document(document.title, rest)


def estimated_lengths(encoding: TextEncoding, collection: Collection) -> np.ndarray:
    """Return about how many positions each document takes, [documents] int64: its bytes by the
    tokens per byte of some, cut at the encoder's length."""
    sizes = collection.document_lengths
    positions = np.ceil(sizes * tokens_per_byte(encoding, collection)).astype(np.int64)
    return np.clip(positions + encoding.framing.num_marks, 1, encoding.limits.max_length)


def tokens_per_byte(encoding: TextEncoding, collection: Collection) -> float:
    """Return the tokens per byte of some documents of a collection, evenly drawn."""
    sizes = collection.document_lengths
    probes = np.unique(np.linspace(0, len(sizes) - 1, LENGTH_PROBES).astype(np.int64))
    texts = (collection.document(int(number)) for number in probes)
    tokens = sum(len(encoding.ids_once(text.whole)) for text in texts)
    return tokens / max(1, int(sizes[probes].sum()))
