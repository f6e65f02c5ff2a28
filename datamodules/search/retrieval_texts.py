"""The queries and documents that a retriever encodes, each once, in evaluation and prediction.

Shapes: B texts of the micro-batch, Q queries among them, J most judgements of one query, F
documents of a first stage.
"""

from dataclasses import asdict
from typing import NamedTuple

import numpy as np
import torch

from datamodules.core.plan import hash_ids
from datamodules.core.planned import PlannedDataset
from datamodules.core.store import digest_of
from datamodules.search.bm25 import Bm25, Bm25Options, open_bm25
from datamodules.search.collection import Collection
from datamodules.search.collection_tokens import (
    CollectionTokens,
    is_among,
    kept_collection,
    read_collection,
)
from datamodules.search.judged_queries import JudgedQueries
from datamodules.search.queries import Queries, hash_digest
from datamodules.search.tables import NO_DOCUMENT, rows_of
from datamodules.search.training_pairs import estimated_lengths
from datamodules.text.encoding import Framed, TextEncoding, padded

SAMPLE_KEY = 1_607  # of the documents that are drawn; any number


class FirstStage(NamedTuple):
    """Documents of BM25 for one query, best first; -1 and 0 behind the last."""

    documents: np.ndarray
    scores: np.ndarray


NO_FIRST_STAGE = FirstStage(np.zeros(0, np.int64), np.zeros(0, np.float32))


class TextExample(NamedTuple):
    """One text, its number, and what evaluation needs to know of a query."""

    framed: Framed
    is_query: bool
    number: int
    judged: np.ndarray
    grade: np.ndarray
    first: FirstStage


class TextsDataset(PlannedDataset):
    """Queries, then documents; a sample is a text.

    Args:
        collection: of the texts.
        encoding: of the texts.
        queries: that are encoded.
        documents: [D] numbers of those that are encoded, ascending.
        judged: judgements of the queries; none in prediction.
        bm25: how the first stage scores; none leaves it out.
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
        # A prediction reads each text once, and its memory must not grow with their number.
        self.tokens = (
            read_collection(collection, encoding.ids_once, queries)
            if judged is None
            else kept_evaluation(collection, encoding, queries.indices, documents, is_whole)
        )
        self.depth = min(depth, len(documents)) if bm25 else 0
        self._bm25: Bm25 | None = None
        of_queries = np.full(len(queries), encoding.limits.max_query_length)
        of_documents = estimated_lengths(encoding, collection)[documents]
        self.lengths = np.concatenate([of_queries, of_documents]).astype(np.int64)
        chosen = digest_of([queries.digest, hash_digest(documents)])
        options = [bm25 and asdict(bm25), self.depth, judged is not None]
        self.fingerprint = digest_of([collection.fingerprint, encoding.digest, chosen, options])
        self.target_counts = {}

    def example(self, sample_id: int, epoch: int) -> TextExample:
        """Return one text; it is the same in every epoch."""
        none = (np.zeros(0, np.int64), np.zeros(0, np.float32), NO_FIRST_STAGE)
        if sample_id >= len(self.queries):
            index = int(self.documents[sample_id - len(self.queries)])
            ids = self.tokens.documents[index]
            return TextExample(self.encoding.framing.single(ids), False, index, *none)
        index = int(self.queries.indices[sample_id])
        framed = self.encoding.framing.query(self.tokens.query(sample_id))
        if self.judged is None:
            return TextExample(framed, True, index, *none)
        documents, grades = self.judged.judged(int(np.searchsorted(self.judged.queries, index)))
        return TextExample(framed, True, index, documents, grades, self._first_stage(sample_id))

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
        queries = [example for example in examples if example.is_query]
        firsts = [example.first for example in queries]
        most, depth = self.judged.most, self.depth
        return {
            **texts,
            "judged": _table([e.judged for e in queries], NO_DOCUMENT, most, np.int64),
            "grade": _table([e.grade for e in queries], np.nan, most, np.float32),
            "first_document": _table([f.documents for f in firsts], NO_DOCUMENT, depth, np.int64),
            "first_score": _table([f.scores for f in firsts], 0.0, depth, np.float32),
        }

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the id and the beginning of the text."""
        example = self.example(sample_id, epoch)
        if example.is_query:
            return {"query": self.queries.id(sample_id)}
        return {"document": self.collection.document_id(example.number)}

    def _first_stage(self, place: int) -> FirstStage:
        if self.bm25_options is None:
            return NO_FIRST_STAGE
        query = self.queries.text(place)
        if self._bm25 is None:
            self._bm25 = open_bm25(self.collection, self.bm25_options)
        if len(self.documents) == self.collection.num_documents:
            (hits,) = self._bm25.search([query], self.depth)
            return FirstStage(hits.documents[0], hits.scores[0])
        return first_of(self._bm25.scores(query, self.documents), self.documents, self.depth)


def kept_evaluation(
    collection: Collection,
    encoding: TextEncoding,
    queries: np.ndarray,
    documents: np.ndarray,
    is_whole: bool,
) -> CollectionTokens:
    """Return the tokens of an evaluation's queries and documents, given as `TextsDataset` has
    them, tokenised once into the cache."""
    chosen = is_among(collection.num_documents, documents)
    return kept_collection(collection, encoding, queries, chosen, is_whole)


def first_of(scores: np.ndarray, documents: np.ndarray, depth: int) -> FirstStage:
    """Return the best of some documents, as a search of all would.

    Args:
        scores: [D], 0 where a document shares no word.
        documents: [D] numbers, ascending.
        depth: how many.
    """
    order = np.argsort(-scores, kind="stable")[:depth]
    best = order[scores[order] > 0]
    found = FirstStage(np.full(depth, NO_DOCUMENT, np.int64), np.zeros(depth, np.float32))
    found.documents[: len(best)], found.scores[: len(best)] = documents[best], scores[best]
    return found


def chosen_documents(
    judged: JudgedQueries, num_documents: int, num_others: int | None
) -> np.ndarray:
    """Return the documents that queries are searched among, ascending.

    Args:
        judged: queries with their judgements.
        num_documents: of the collection.
        num_others: documents besides those that are judged, which depend on nothing but their
            number; none takes all.
    """
    everything = np.arange(num_documents)
    if num_others is None:
        return everything
    of_queries = np.unique(judged.judgements.document)
    others = np.setdiff1d(everything, of_queries)
    drawn = others[np.argsort(hash_ids(others, SAMPLE_KEY), kind="stable")[:num_others]]
    return np.sort(np.concatenate([of_queries, drawn]))


def _table(
    values: list[np.ndarray], filler: float, width: int, dtype: type[np.generic]
) -> torch.Tensor:
    if not values:
        return torch.from_numpy(np.zeros((0, width), dtype))
    return torch.from_numpy(rows_of([v.astype(dtype) for v in values], filler, width))
