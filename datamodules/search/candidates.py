"""Candidates of queries: judged ones, or lists of BM25 or of a run, kept in the cache; groups and
hard negatives.

Shapes: Q queries, L most documents of one list.

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
from datamodules.files.tables import Files, expand_files
from datamodules.search.collection import Collection
from datamodules.search.queries import NO_DOCUMENT, NO_SCORE, Queries, numbers_digest, read_run
from datamodules.text.encoding import stemmer_version, terms_by

BM25_VERSION, LISTS_VERSION = 1, 1
RUN_SUFFIXES = (".trec", ".run", ".txt", ".tsv")
DISTILLED = "distillation"  # of the losses, beside that of the queries
FIRST_DEPTH = 1000  # documents of BM25 beside those of a retriever
Source = Literal["judged", "bm25", "run"]


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
        check_range("bm25", 0, k1=self.k1)
        check_range("bm25", 0, 1, b=self.b)
        self.words()

    def words(self) -> Callable[[str], list[str]]:
        """Return the function that cuts a text into words."""
        return terms_by(self.stemmer, self.stopwords)

    def index_of(self, collection: Collection) -> list[Any]:
        """Return all that an index of a collection depends on."""
        facts = [BM25_VERSION, collection.fingerprint, asdict(self)]
        return facts + stemmer_version(self.stemmer)


class Hits(NamedTuple):
    """The best documents of each query, best first; equal scores in the order of documents."""

    documents: np.ndarray  # [Q, k] int64, -1 behind the last document that shares a word
    scores: np.ndarray  # [Q, k] float32, 0 there


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
        """Return the best k documents of these queries, or all if they are fewer, among some [D]
        ascending, or all."""
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
    """Documents that are ranked for a query.

    Args:
        source: the judged ones; the best of BM25; or those of a run, TREC's file of rankings.
        top: how many of BM25 or of the run.
        run: file of the run, or several that hold different queries.

    Raises:
        ValueError: a run without the source run, that source without one, or a top below 1.
    """

    source: Source = "judged"
    top: int = 100
    run: Files = None

    def __post_init__(self) -> None:
        _check_run("candidates", self.source, self.run)
        check_range("candidates", 1, top=self.top)


def _check_run(option: str, source: Source, run: Files) -> None:
    if (source == "run") != bool(run):
        raise ValueError(
            f'{option}.source is "{source}" and {option}.run {run!r}; a run goes with source run, '
            "and only with it."
        )


@dataclass(frozen=True)
class GroupOptions:
    """The candidates of a query in a training step, drawn anew in every epoch.

    One relevant document is always among them, if there is any. The other places go to judged
    documents, and those left, of which there are at least `mined`, to mined ones.

    Args:
        size: candidates at most.
        mined: places for unjudged documents out of the best of the candidates' source.
        after_rank: best documents of the source that are never mined, since an unjudged document
            so far up may well be relevant.
        unjudged_as_negative: give mined documents grade 0. Unjudged is not irrelevant: nothing is
            mined unless this is said.

    Raises:
        ValueError: sizes that do not go together.
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
        """Return how many judged and how many mined documents a group has, of so many."""
        judged = min(num_judged, self.size - self.mined)
        return judged, min(num_minable, self.size - judged if self.mined else 0)

    def minable(self, listed: np.ndarray, judged: np.ndarray) -> np.ndarray:
        """Return which documents of the source [L], best first, may be mined: none of all judged
        ones [J] of the query."""
        if not self.mined:
            return listed[:0]
        far = listed[self.after_rank :]
        return far[~np.isin(far, judged)]

    def drawn(self, grades: np.ndarray, num_minable: int, rng: np.random.Generator) -> np.ndarray:
        """Return the places of a group among its judged documents, of grades [J], then the minable
        ones; `rng` is keyed by seed, epoch and sample."""
        num_judged, num_mined = self.sizes(len(grades), num_minable)
        order = rng.permutation(len(grades))
        relevant = np.flatnonzero(grades[order] > 0)[:1]
        order = np.concatenate([order[relevant], np.delete(order, relevant)])
        mined = rng.permutation(num_minable)[:num_mined]
        return np.concatenate([order[:num_judged], len(grades) + mined])


@dataclass(frozen=True)
class HardNegatives:
    """Negatives that come along with a query, drawn anew in every epoch.

    Nobody has judged most documents, and some of those may be relevant: negatives that are
    looked for, by bm25 or in a run, are wrong now and then. Documents known to be relevant never
    are among them.

    Args:
        count: most negatives of one sample.
        source: `judged` takes documents that people found not relevant, `bm25` those that share
            most words with the query, `run` those of a file.
        run: TREC run file with the training queries, such as a prediction of a retriever writes.
        depth: best ranks that are drawn from.
        skip: best ranks that are passed over, since they are most likely relevant.

    Raises:
        ValueError: a number out of its range, or a run without that source.
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
        arrays: documents [Q, L] int64, -1 behind the last; scores [Q, L] float32, 0 there.
    """

    @property
    def fingerprint(self) -> str:
        """Hex digest of all that they depend on."""
        return self.folder.name

    def __getitem__(self, places: Any) -> Hits:
        """Return those of one query, [L], or of several."""
        return Hits(self.arrays["documents"][places], self.arrays["scores"][places])

    def scores_of(self, places: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Return the scores [n, K] float32 of documents [n, K] of queries [n]; NaN = not listed."""
        asked, listed = np.where(documents == NO_DOCUMENT, NO_DOCUMENT - 1, documents), self[places]
        is_same = asked[:, :, None] == listed.documents[:, None]
        scores = np.where(is_same, listed.scores[:, None], -np.inf).max(axis=2)
        return np.where(is_same.any(axis=2), scores, np.nan).astype(np.float32)

    def of(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents and scores of one query, without what is behind the last."""
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
    """Return the lists of the source of these options, kept in the cache; `None` for judged
    documents.

    Args:
        most: documents of a query.
        queries: others in a run are passed over.
        option: name of the options, for messages.
        among: documents that BM25 searches, ascending; all by default.

    Raises:
        FileNotFoundError: a file of a run is not there.
        ValueError: a line of a run breaks a rule, a document is unknown, none of the queries is in
            the files, or there is no BM25.
    """
    if options.source == "judged":
        return None
    facts: list[Any] = [LISTS_VERSION, options.source]
    if options.source == "run":
        paths = expand_files(options.run, f"{option}.run", RUN_SUFFIXES)
        facts += [collection.fingerprint, [file_digest(path) for path in paths]]
    elif bm25 is None:
        raise ValueError(f"{option}.source is bm25, and data.bm25 null leaves it out.")
    else:
        facts += bm25.index_of(collection)

    def write(folder: Path) -> None:
        if options.source == "run" or bm25 is None:
            documents, scores = _of_run(paths, collection, queries, most)
        else:
            asked = [query.text for query in queries]
            documents, scores = open_bm25(collection, bm25).search(asked, most, among)
        write_arrays(folder, {"documents": documents, "scores": scores})

    facts += [most, queries.digest, *([] if among is None else [numbers_digest(among)])]
    return Lists(made_once(cache_folder("candidates", facts), write))


def _of_run(
    paths: Sequence[Path], collection: Collection, queries: Queries, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return documents and scores of these queries in the files of a run, as of `Lists`."""
    places = {query.id: place for place, query in enumerate(queries)}
    documents = [np.zeros(0, np.int64)] * len(queries)
    scores = [np.zeros(0, np.float32)] * len(queries)
    for path in paths:
        for ranking in read_run(path):
            if (place := places.get(ranking.query)) is None:
                continue
            if len(documents[place]):
                raise ValueError(
                    f'{path}: query "{ranking.query}" is in another of the runs too; name runs '
                    "that hold different queries."
                )
            names = ranking.documents[:most]
            documents[place] = collection.documents.indices_of(names)
            scores[place] = np.array(ranking.scores[:most], np.float32)
            if (unknown := np.flatnonzero(documents[place] < 0)).size:
                raise ValueError(
                    f'{path}: document "{names[unknown[0]]}" of query "{ranking.query}" is '
                    "not in the collection; name a run of this collection."
                )
    if not any(map(len, documents)):
        raise ValueError(
            f"{', '.join(map(str, paths))} ranks none of the {len(queries)} queries, such as "
            f'"{queries[0].id}"; name a run of these queries.'
        )
    return padded(documents, NO_DOCUMENT), padded(scores, NO_SCORE)
