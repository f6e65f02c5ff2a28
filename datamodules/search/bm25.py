"""BM25: how well the words of a query fit a document, without learning anything.

Source: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond (2009),
sections 3.4 and 3.5; the inverse document frequency is Lucene's, which is never negative.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datamodules.core.store import ArrayFolder, cache_folder, made_once, write_arrays
from datamodules.search.collection import Collection
from datamodules.text.encoding import terms_by

BM25_VERSION = 1


@dataclass(frozen=True)
class Bm25Options:
    """How documents are scored.

    Args:
        k1: how long further occurrences of a word count, 0 or more.
        b: how much long documents are marked down, 0 to 1.
        stemmer: language of a Snowball stemmer, such as english; `None` compares whole words.
        stopwords: language whose commonest words are passed over; `None` keeps all.
    """

    k1: float = 0.9
    b: float = 0.4
    stemmer: str | None = None
    stopwords: str | None = None

    def __post_init__(self) -> None:
        if not self.k1 >= 0:
            raise ValueError(f"k1 must be 0 or more, got {self.k1}.")
        if not 0 <= self.b <= 1:
            raise ValueError(f"b must be 0 to 1, got {self.b}.")
        terms_by(self.stemmer, self.stopwords)

    def words(self) -> Callable[[str], list[str]]:
        """Return the function that cuts a text into words."""
        return terms_by(self.stemmer, self.stopwords)


class Hits(NamedTuple):
    """The best documents of each query, best first; equal scores in the order of documents.

    Args:
        documents: [Q, k] int64, -1 behind the last document that shares a word.
        scores: [Q, k] float32, 0 there.
    """

    documents: np.ndarray
    scores: np.ndarray


class Bm25(ArrayFolder):
    """An inverted index, as `open_bm25` makes it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.num_documents: int = self.facts["num_documents"]
        self._words = Bm25Options(**self.facts["options"]).words()
        names = ("starts", "documents", "impacts")
        self._starts, self._documents, self._impacts = (self.arrays[name] for name in names)

    @cached_property
    def _terms(self) -> dict[str, int]:
        with (self.folder / "terms.txt").open(encoding="utf-8") as file:
            return {line.rstrip("\n"): number for number, line in enumerate(file)}

    def search(self, queries: Sequence[str], k: int, among: np.ndarray | None = None) -> Hits:
        """Return the best k documents of these queries, or all if they are fewer.

        Args:
            queries: any texts.
            k: at least 1.
            among: [D] ascending, the documents that are searched; `None` searches all.
        """
        if k < 1:
            raise ValueError(f"k must be 1 or more, got {k}.")
        k = min(k, self.num_documents if among is None else len(among))
        scores = np.zeros(self.num_documents, np.float64)
        hits = Hits(np.full((len(queries), k), -1, np.int64), np.zeros((len(queries), k), "f4"))
        for row, query in enumerate(queries):
            scores.fill(0.0)
            for postings, impacts in self._postings(query):
                scores[postings] += impacts
            own = scores if among is None else scores[among]
            worst = np.partition(own, len(own) - k)[len(own) - k]
            matching = np.flatnonzero(own >= worst if worst > 0 else own)
            best = matching[np.argsort(-own[matching], kind="stable")][:k]
            hits.documents[row, : len(best)] = best if among is None else among[best]
            hits.scores[row, : len(best)] = own[best]
        return hits

    def scores(self, query: str, documents: np.ndarray) -> np.ndarray:
        """Return the scores of some documents, [n] float64; 0 where no word is shared."""
        found = np.zeros(len(documents), np.float64)
        for postings, impacts in self._postings(query):
            place = np.minimum(np.searchsorted(postings, documents), len(postings) - 1)
            found += np.where(postings[place] == documents, impacts[place], 0)
        return found

    def _postings(self, query: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the documents of each of its words, ascending, and what it adds to their scores."""
        counts = Counter(self._words(query))
        # In the order of the terms, so that the sums do not depend on the order of the words.
        for term, count in sorted((self._terms.get(w, -1), n) for w, n in counts.items()):
            if term >= 0:
                part = slice(self._starts[term], self._starts[term + 1])
                impacts = self._impacts[part]
                if count > 1:
                    impacts = np.multiply(impacts, count, dtype=np.float64)
                yield self._documents[part], impacts


def open_bm25(collection: Collection, options: Bm25Options = Bm25Options()) -> Bm25:
    """Return the index of a collection's titles and texts, made in the cache at first use."""
    facts = [BM25_VERSION, collection.fingerprint, asdict(options)]
    folder = cache_folder("bm25_index", facts)
    return Bm25(made_once(folder, lambda target: _write(target, collection, options)))


def _write(folder: Path, collection: Collection, options: Bm25Options) -> None:
    terms: defaultdict[str, int] = defaultdict()
    terms.default_factory = terms.__len__  # a new word gets the next number
    lengths = np.zeros(len(collection.documents), np.int64)
    columns = array("i"), array("i"), array("i")  # term, document and count of each posting
    words = options.words()
    for number, text in enumerate(collection.documents):
        numbers = [terms[word] for word in words(f"{text.title} {text.text}")]
        counts = Counter(numbers)
        lengths[number] = len(numbers)
        for column, values in zip(
            columns, (counts, [number] * len(counts), counts.values()), strict=True
        ):
            column.extend(values)
    term, document, count = (np.array(column, np.int32) for column in columns)
    order = np.argsort(term, kind="stable")  # documents stay ascending within a term
    term, document, count = term[order], document[order], count[order]
    frequency = np.bincount(term, minlength=len(terms))
    mean_length = max(lengths.mean(), 1.0)
    weight = np.log1p((len(lengths) - frequency[term] + 0.5) / (frequency[term] + 0.5))
    norm = options.k1 * (1 - options.b + options.b * lengths[document] / mean_length)
    impacts = weight * count / (count + norm)
    starts = np.concatenate([[0], np.cumsum(frequency)]).astype(np.int64)
    arrays = {"starts": starts, "documents": document, "impacts": impacts.astype(np.float32)}
    (folder / "terms.txt").write_text("".join(f"{t}\n" for t in terms), "utf-8")
    write_arrays(folder, arrays, num_documents=len(lengths), options=asdict(options))
