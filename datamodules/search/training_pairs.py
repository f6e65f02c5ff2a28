"""Queries with a document that answers each: what a retriever is trained on.

Shapes: B samples of the micro-batch, K documents of one, R most documents that are known.
"""

from bisect import bisect_right
from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import torch

from datamodules.core.plan import rng_for, uniforms_for
from datamodules.core.planned import PlannedDataset
from datamodules.core.store import digest_of
from datamodules.search.collection import Collection
from datamodules.search.document_parts import Drawn, document_sentences, drawn_sentence
from datamodules.search.judged_queries import JudgedQueries, shares_up_to
from datamodules.search.negatives import HardNegatives, NegativePool
from datamodules.search.tables import NO_DOCUMENT, rows_of
from datamodules.search.training_mix import KINDS, TrainingMix, pair_counts, pair_tokens
from datamodules.text.encoding import Framed, TextEncoding, padded

TERM = "queries"
NUM_SHARES = 2  # most draws that choose a query and its answer
LENGTH_PROBES = 64  # documents of which bytes per token are counted


class PairExample(NamedTuple):
    """A query, its K documents (the first answers it), their numbers [K] with -1 where there are
    fewer, and the documents [R] that may be no negatives of it."""

    query: Framed
    texts: list[Framed]
    document: np.ndarray
    known: np.ndarray


class _Pair(NamedTuple):
    """What a sample is made of, in numbers: its document, and a judged query or a triple's, or a
    drawn sentence; with neither, the title is the query."""

    document: int
    known: np.ndarray
    judged_query: int | None = None  # where negatives can be looked up
    drawn: Drawn | None = None
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
        self.draws_more = negatives.count > 0 or mix.token_dropout > 0
        self.pool = NegativePool(negatives, collection, judged)
        self.triples = collection.triples if mix.triples else None
        self.counts = pair_counts(collection, self.judged, mix)
        totals = [self.counts[kind] * getattr(mix, kind) for kind in KINDS]
        self.ends = np.cumsum(totals).tolist()
        self.tokens = pair_tokens(collection, encoding, judged, mix, negatives)
        self.lengths = self._lengths()
        facts = [asdict(mix), negatives.facts(), collection.fingerprint, encoding.digest]
        self.fingerprint = digest_of(facts)
        self.target_counts = {TERM: None}

    def example(self, sample_id: int, epoch: int) -> PairExample:
        """Return one sample as it is in this epoch."""
        (example,) = self.examples(np.array([sample_id]), epoch)
        return example

    def examples(self, sample_ids: np.ndarray, epoch: int) -> list[PairExample]:
        """Return samples as they are in this epoch; their first draws are made at once."""
        shares = uniforms_for(self.seed, epoch, sample_ids, NUM_SHARES).tolist()
        facts = zip(sample_ids.tolist(), shares, strict=True)
        return [self._example(sample_id, epoch, own) for sample_id, own in facts]

    def _example(self, sample_id: int, epoch: int, shares: list[float]) -> PairExample:
        pair, framing = self._pair(sample_id, shares), self.encoding.framing
        query, answer = self._ids(pair)
        if not self.draws_more:
            document = np.array([pair.document], np.int64)
            return PairExample(framing.query(query), [framing.single(answer)], document, pair.known)
        rng = rng_for(self.seed, epoch, sample_id)
        chosen = self._negatives(pair, rng)
        others = [self.tokens.documents[number] for number in chosen]
        missing = self.num_negatives - len(chosen)
        texts = [framing.single(self._kept(ids, rng)) for ids in (answer, *others)]
        texts += [framing.single(np.zeros(0, np.int64))] * missing
        numbers = [pair.document, *chosen, *[NO_DOCUMENT] * missing]
        framed = framing.query(self._kept(query, rng))
        return PairExample(framed, texts, np.array(numbers, np.int64), pair.known)

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
        (shares,) = uniforms_for(self.seed, epoch, np.array([sample_id]), NUM_SHARES).tolist()
        kind, _ = self._place(sample_id)
        pair = self._pair(sample_id, shares)
        negatives = self._negatives(pair, rng_for(self.seed, epoch, sample_id))
        ids = [self.collection.document_id(int(n)) for n in negatives]
        answer = self.collection.document_id(pair.document)
        found = {"kind": kind, "query": self._query_text(pair), "answer": answer}
        return {**found, "negatives": " ".join(ids)}

    def _place(self, sample_id: int) -> tuple[str, int]:
        """Return the kind of a sample and its number among those."""
        kind = bisect_right(self.ends, sample_id)
        first = self.ends[kind - 1] if kind else 0
        return KINDS[kind], (sample_id - first) % self.counts[KINDS[kind]]

    def _pair(self, sample_id: int, shares: list[float]) -> _Pair:
        kind, number = self._place(sample_id)
        if kind == "judged":
            return self._judged_pair(number, shares[0])
        if kind == "triples":
            return self._triple(number)
        assert self.tokens.parts is not None
        known = np.array([number])
        if kind == "titles" and self.tokens.parts.has_title[number]:
            return _Pair(number, known)
        is_long = self.tokens.parts.long_ones(number)
        drawn = drawn_sentence(is_long, shares, self.mix.removal)
        return _Pair(number, known, drawn=drawn)

    def _judged_pair(self, number: int, share: float) -> _Pair:
        documents, grades = self.judged.relevant(number)
        answer = int(documents[place_in_proportion(grades, share)])
        query = int(self.judged.queries[number])
        return _Pair(answer, documents, query)

    def _triple(self, number: int) -> _Pair:
        assert self.triples is not None
        query, positive, negative = (int(column[number]) for column in self.triples)
        known = np.union1d(self.judged.relevant_of(query), [positive])
        return _Pair(positive, known, query, negative=negative)

    def _ids(self, pair: _Pair) -> tuple[np.ndarray, np.ndarray]:
        """Return the token ids of the query and of its answer, whole where tokens are dropped."""
        tokens, parts, number = self.tokens, self.tokens.parts, pair.document
        if pair.judged_query is not None:
            return tokens.queries[pair.judged_query], tokens.documents[number]
        assert parts is not None
        if pair.drawn is None:
            return parts.titles[number], parts.bodies[number]
        sentence, is_removed = pair.drawn
        answer = parts.without(number, sentence) if is_removed else tokens.documents[number]
        return parts.sentence(number, sentence), answer

    def _query_text(self, pair: _Pair) -> str:
        if pair.judged_query is not None:
            return self.collection.query(pair.judged_query)
        document = self.collection.document(pair.document)
        if pair.drawn is None:
            return document.title
        return document_sentences(document)[pair.drawn.sentence]

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

    def _kept(self, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return token ids without those that are dropped in this epoch."""
        probability = self.mix.token_dropout
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


def place_in_proportion(grades: np.ndarray, share: float) -> int:
    """Return a place in [n] positive float64, each found in proportion to its value.

    Args:
        grades: [n].
        share: drawn from [0, 1).
    """
    if len(grades) == 1:
        return 0
    return int(shares_up_to(grades).searchsorted(share, "right"))


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
