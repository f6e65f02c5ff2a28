"""Candidates of queries (judged, from BM25 or from a run), training groups and hard negatives.

Shapes: Q queries, L documents of the longest list.

Source of BM25: Robertson and Zaragoza, The Probabilistic Relevance Framework: BM25 and Beyond
(2009), sections 3.4 and 3.5; the inverse document frequency is Lucene's, which is never negative.
"""

from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from datamodules.core.batches import padded
from datamodules.core.plan import check_range
from datamodules.core.store import ArrayFolder, cache_folder, file_digest, made_once, write_arrays
from datamodules.files.tables import check_file
from datamodules.search.collection import Collection
from datamodules.search.queries import NO_DOCUMENT, NO_SCORE, Queries, numbers_digest, read_run
from datamodules.text.encoding import stemmer_version, terms_by

BM25_VERSION, LISTS_VERSION = 1, 1
RUN_SUFFIXES = (".trec", ".run", ".txt", ".tsv")
DISTILLED = "distillation"  # name of the loss term on a teacher's scores
FIRST_DEPTH = 1000  # documents per query of BM25, the baseline of a retriever
Source = Literal["judged", "bm25", "run"]


@dataclass(frozen=True)
class Bm25Options:
    """Parameters of BM25 scores.

    Args:
        k1: saturation of repeated words, 0 or more; the higher, the more repetitions count.
        b: normalisation by document length, 0 (none) to 1 (full).
        stemmer: language of a Snowball stemmer, such as english; `None` compares whole words.
        stopwords: language whose most common words are ignored; `None` keeps all.
    """

    k1: float = 0.9
    b: float = 0.4
    stemmer: str | None = None
    stopwords: str | None = None

    def __post_init__(self) -> None:
        check_range("bm25", 0, k1=self.k1)
        check_range("bm25", 0, 1, b=self.b)
        self.words()

    def words(self) -> Callable[[str], list[str]]:
        """Return the function that cuts a text into words."""
        return terms_by(self.stemmer, self.stopwords)

    def index_of(self, collection: Collection) -> list[Any]:
        """Return all facts that determine the index of a collection."""
        facts = [BM25_VERSION, collection.fingerprint, asdict(self)]
        return facts + stemmer_version(self.stemmer)


class Hits(NamedTuple):
    """The best documents of each query, best first, ties in document order."""

    documents: np.ndarray  # [Q, k] int64; -1 after the last one that shares a word
    scores: np.ndarray  # [Q, k] float32; 0 for -1


class Bm25(ArrayFolder):
    """Inverted index, as made by `open_bm25`."""

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
        """Return the k best documents of each query, or fewer if there are not k. `among` [D],
        ascending, restricts the search to these documents."""
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
        """Return the scores of documents, [n] float64; 0 for those that share no word."""
        scores = np.zeros(len(documents), np.float64)
        for postings, impacts in self._postings(query):
            place = np.minimum(np.searchsorted(postings, documents), len(postings) - 1)
            scores += np.where(postings[place] == documents, impacts[place], 0)
        return scores

    def _postings(self, query: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield for each word of the query its documents, ascending, and their score increments."""
        counts = Counter(self._words(query))
        # In term order, so that rounding does not depend on the order of words in the query.
        for term, count in sorted((self._terms.get(w, -1), n) for w, n in counts.items()):
            if term >= 0:
                part = slice(self._starts[term], self._starts[term + 1])
                impacts = self._impacts[part]
                if count > 1:
                    impacts = np.multiply(impacts, count, dtype=np.float64)
                yield self._documents[part], impacts


def open_bm25(collection: Collection, options: Bm25Options = Bm25Options()) -> Bm25:
    """Return the index of a collection's titles and texts, cached at first use."""
    folder = cache_folder("bm25_index", options.index_of(collection))
    return Bm25(made_once(folder, lambda target: _write(target, collection, options)))


def _write(folder: Path, collection: Collection, options: Bm25Options) -> None:
    terms: defaultdict[str, int] = defaultdict()
    terms.default_factory = terms.__len__  # a new word gets the next number
    lengths = np.zeros(len(collection.documents), np.int64)
    term_of, document_of, count_of = array("i"), array("i"), array("i")  # of each posting
    words = options.words()
    for number, text in enumerate(collection.documents):
        numbers = [terms[word] for word in words(f"{text.title} {text.text}")]
        counts = Counter(numbers)
        lengths[number] = len(numbers)
        term_of.extend(counts)
        document_of.extend([number] * len(counts))
        count_of.extend(counts.values())
    order = np.argsort(np.array(term_of), kind="stable")  # documents ascend within a term
    columns = (term_of, document_of, count_of)
    term, document, count = (np.array(column, np.int32)[order] for column in columns)
    frequency = np.bincount(term, minlength=len(terms))
    mean_length = max(lengths.mean(), 1.0)
    weight = np.log1p((len(lengths) - frequency[term] + 0.5) / (frequency[term] + 0.5))
    norm = options.k1 * (1 - options.b + options.b * lengths[document] / mean_length)
    impacts = weight * count / (count + norm)
    starts = np.concatenate([[0], np.cumsum(frequency)]).astype(np.int64)
    arrays = {"starts": starts, "documents": document, "impacts": impacts.astype(np.float32)}
    (folder / "terms.txt").write_text("".join(f"{t}\n" for t in terms), "utf-8")
    write_arrays(folder, arrays, num_documents=len(lengths), options=asdict(options))


@dataclass(frozen=True)
class CandidateOptions:
    """The documents that are ranked for a query.

    Args:
        source: `judged` documents, the best of `bm25`, or those of a `run`, a TREC file of
            rankings.
        top: how many documents of BM25 or of the run.
        run: file of the run.

    Raises:
        ValueError: a run with another source, source run without one, or a top below 1.
    """

    source: Source = "judged"
    top: int = 100
    run: str | None = None

    def __post_init__(self) -> None:
        _check_run("candidates", self.source, self.run)
        check_range("candidates", 1, top=self.top)


def _check_run(option: str, source: Source, run: str | None) -> None:
    if (source == "run") != bool(run):
        raise ValueError(
            f'{option}.source is "{source}" and {option}.run {run!r}; a run goes with source run, '
            "and only with it."
        )


@dataclass(frozen=True)
class GroupOptions:
    """The candidates of a query in a training step, drawn anew in every epoch.

    A relevant document is always included, if there is one. Judged documents fill up to
    `size - mined` places, and mined documents the rest.

    Args:
        size: maximum number of candidates per query.
        mined: places reserved for mined documents: unjudged ones listed by candidates.source.
        after_rank: ranks at the top of the source that are not mined, since an unjudged document
            ranked so high may well be relevant.
        unjudged_as_negative: treat mined documents as grade 0. Unjudged does not mean irrelevant,
            so mining must be confirmed with this option.

    Raises:
        ValueError: sizes that contradict each other.
    """

    size: int = 8
    mined: int = 0
    after_rank: int = 0
    unjudged_as_negative: bool = False

    def __post_init__(self) -> None:
        check_range("groups", 2, size=self.size)
        check_range("groups", 0, self.size - 1, mined=self.mined)
        check_range("groups", 0, after_rank=self.after_rank)
        if bool(self.mined) != self.unjudged_as_negative or (self.after_rank and not self.mined):
            raise ValueError(
                "mined documents are unjudged, and count as irrelevant: groups.mined goes with "
                "groups.unjudged_as_negative=true, and groups.after_rank with both; got "
                f"{self.mined}, {self.unjudged_as_negative} and {self.after_rank}."
            )

    def sizes(self, num_judged: int, num_minable: int) -> tuple[int, int]:
        """Return how many of the judged and of the minable documents a group has."""
        judged = min(num_judged, self.size - self.mined)
        return judged, min(num_minable, self.size - judged if self.mined else 0)

    def minable(self, listed: np.ndarray, judged: np.ndarray) -> np.ndarray:
        """Return the documents of a query's list [L], best first, that may be mined: those after
        `after_rank` that are not judged [J]."""
        if not self.mined:
            return listed[:0]
        far = listed[self.after_rank :]
        return far[~np.isin(far, judged)]

    def draw(self, grades: np.ndarray, num_minable: int, rng: np.random.Generator) -> np.ndarray:
        """Return the indices of a drawn group in the judged documents, of grades [J], followed by
        the minable ones; `rng` is keyed by seed, epoch and sample."""
        num_judged, num_mined = self.sizes(len(grades), num_minable)
        order = rng.permutation(len(grades))
        relevant = np.flatnonzero(grades[order] > 0)[:1]
        order = np.concatenate([order[relevant], np.delete(order, relevant)])
        mined = rng.permutation(num_minable)[:num_mined]
        return np.concatenate([order[:num_judged], len(grades) + mined])


@dataclass(frozen=True)
class HardNegatives:
    """Hard negatives of training queries, drawn anew in every epoch.

    Documents known to be relevant are never drawn. Most documents are unjudged, so some negatives
    from bm25 or a run may in truth be relevant.

    Args:
        count: maximum number of negatives per sample.
        source: `judged` takes documents of grade 0, `bm25` the best of BM25, `run` those of a run
            file.
        run: TREC run file with the training queries, such as a prediction of a retriever writes.
        depth: ranks to draw from, counted from the best.
        skip: ranks at the top that are not drawn, since they are most likely relevant.

    Raises:
        ValueError: a number out of its range, or a run with another source.
    """

    count: int = 0
    source: Source = "judged"
    run: str | None = None
    depth: int = 100
    skip: int = 0

    def __post_init__(self) -> None:
        check_range("negatives", 0, count=self.count)
        check_range("negatives", 0, self.depth - 1, skip=self.skip)
        _check_run("negatives", self.source, self.run)


class Lists(ArrayFolder):
    """The best documents of each query, best first.

    Attributes:
        arrays: documents [Q, L] int64, padded with -1; scores [Q, L] float32, padded with 0.
    """

    @property
    def fingerprint(self) -> str:
        """Hex digest of all that determines the lists."""
        return self.folder.name

    def __getitem__(self, places: Any) -> Hits:
        """Return the list of one query, [L], or of several, [n, L]."""
        return Hits(self.arrays["documents"][places], self.arrays["scores"][places])

    def scores_of(self, places: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Return scores [n, K] float32 of documents [n, K] for queries [n]; NaN = not listed."""
        listed = self[places]
        numbers = np.where(documents == NO_DOCUMENT, NO_DOCUMENT - 1, documents)
        is_same = numbers[:, :, None] == listed.documents[:, None]
        scores = np.where(is_same, listed.scores[:, None], -np.inf).max(axis=2)
        return np.where(is_same.any(axis=2), scores, np.nan).astype(np.float32)

    def of(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents and scores of one query, without padding."""
        documents, scores = self[place]
        size = int((documents >= 0).sum())
        return np.array(documents[:size]), np.array(scores[:size])


def candidate_lists(
    options: CandidateOptions | HardNegatives,
    bm25: Bm25Options | None,
    most: int,
    collection: Collection,
    queries: Queries,
    option: str,
    among: np.ndarray | None = None,
) -> Lists | None:
    """Return the lists of `options.source`, cached at first use; `None` for judged documents.

    Args:
        most: maximum number of documents per query.
        queries: the queries; a run's other queries are ignored.
        option: name of the options, for messages.
        among: documents that BM25 searches, ascending; all by default.

    Raises:
        FileNotFoundError: the run does not exist.
        ValueError: a line of the run breaks a rule, a document is unknown, the run holds none of
            the queries, or BM25 is left out.
    """
    if options.source == "judged":
        return None
    facts: list[Any] = [LISTS_VERSION, options.source]
    run = Path(options.run or "").expanduser()
    if options.source == "run":
        check_file(run, f"{option}.run", RUN_SUFFIXES)
        facts += [collection.fingerprint, [file_digest(run)]]
    elif bm25 is None:
        raise ValueError(f"{option}.source is bm25, but data.bm25 is null; leave data.bm25 out.")
    else:
        facts += bm25.index_of(collection)

    def write(folder: Path) -> None:
        if options.source == "run" or bm25 is None:
            documents, scores = _of_run(run, collection, queries, most)
        else:
            texts = [query.text for query in queries]
            documents, scores = open_bm25(collection, bm25).search(texts, most, among)
        write_arrays(folder, {"documents": documents, "scores": scores})

    facts += [most, queries.digest, *([] if among is None else [numbers_digest(among)])]
    return Lists(made_once(cache_folder("candidates", facts), write))


def _of_run(
    path: Path, collection: Collection, queries: Queries, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return documents and scores of these queries in a run, as arrays of `Lists`."""
    places = {query.id: place for place, query in enumerate(queries)}
    documents = [np.zeros(0, np.int64)] * len(queries)
    scores = [np.zeros(0, np.float32)] * len(queries)
    for ranking in read_run(path):
        if (place := places.get(ranking.query)) is None:
            continue
        names = ranking.documents[:most]
        documents[place] = collection.documents.indices_of(names)
        scores[place] = np.array(ranking.scores[:most], np.float32)
        if (unknown := np.flatnonzero(documents[place] < 0)).size:
            raise ValueError(
                f'{path}: document "{names[unknown[0]]}" of query "{ranking.query}" is not in the '
                "collection; name a run of this collection."
            )
    if not any(map(len, documents)):
        raise ValueError(
            f"{path} ranks none of the {len(queries)} queries, such as "
            f'"{queries[0].id}"; name a run of these queries.'
        )
    return padded(documents, NO_DOCUMENT), padded(scores, NO_SCORE)
