"""Which documents of a query are ranked, and what a first stage thinks of them.

Shapes: Q queries, L most documents of one list.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from datamodules.core.store import cache_root, digest_of, file_digest, made_once, mapped_array
from datamodules.files.tables import expand_files
from datamodules.search.bm25 import BM25_VERSION, Bm25, Bm25Options, open_bm25
from datamodules.search.collection import Collection
from datamodules.search.queries import Queries
from datamodules.search.request import Files
from datamodules.search.runs import read_run
from datamodules.search.tables import NO_DOCUMENT, rows_of

LISTS_VERSION = 1
RUN_SUFFIXES = (".trec", ".run", ".txt", ".tsv")


@dataclass(frozen=True)
class CandidateOptions:
    """Which documents of a query are ranked.

    Args:
        source: the judged ones; the best of BM25; or those of a run, TREC's file of rankings.
        top: how many of BM25 or of the run; none takes 100.
        run: file of the run, or several that hold different queries.
        bm25: how BM25 scores: beside the ranker in a test, and before it where the source is no
            run; none leaves BM25 out, which spares indexing the collection.

    Raises:
        ValueError: options in conflict.
    """

    source: Literal["judged", "bm25", "run"] = "judged"
    top: int | None = None
    run: Files = None
    bm25: Bm25Options | None = Bm25Options()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if self.source == "judged" and self.top is not None:
            raise ValueError(
                f"candidates.top {self.top} has no effect on source judged, of which all are "
                "ranked; leave it out, or choose source bm25 or run."
            )
        if self.top is not None and self.top < 1:
            raise ValueError(f"candidates.top must be at least 1, got {self.top}.")
        if (self.source == "run") != bool(self.run):
            raise ValueError(
                f'candidates.source is "{self.source}" and candidates.run {self.run!r}; a run goes '
                "with source run, and only with it."
            )
        if self.source == "bm25" and self.bm25 is None:
            raise ValueError("candidates.source bm25 needs candidates.bm25; leave it as it is.")

    @property
    def most(self) -> int:
        """Candidates of a list at most."""
        return 100 if self.top is None else self.top

    @property
    def scores_first(self) -> bool:
        """Whether there is a first stage that scores the candidates."""
        return self.source == "run" or self.bm25 is not None


class Lists(NamedTuple):
    """The best documents of each query, best first.

    Args:
        documents: [Q, L] int64, -1 behind the last.
        scores: [Q, L] float32, 0 there.
        fingerprint: hex digest of all that they depend on.
    """

    documents: np.ndarray
    scores: np.ndarray
    fingerprint: str

    def of(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents and scores of one query, without what is behind the last."""
        size = int((self.documents[place] >= 0).sum())
        return np.array(self.documents[place, :size]), np.array(self.scores[place, :size])


def bm25_lists(bm25: Bm25, collection: Collection, queries: Queries, most: int) -> Lists:
    """Return what BM25 finds, kept in the cache."""
    texts = [queries.text(place) for place in range(len(queries))]
    options = asdict(bm25.options)
    facts = ["bm25", BM25_VERSION, collection.fingerprint, options, most, texts]
    key = digest_of([LISTS_VERSION, *facts])

    def make(folder: Path) -> None:
        hits = list(bm25.search(texts, most))
        _write(folder, *(np.concatenate(arrays) for arrays in zip(*hits, strict=True)))

    return _opened(made_once(cache_root() / "candidates" / key, make))


def run_lists(
    files: Files,
    collection: Collection,
    queries: Queries,
    most: int | None,
    option: str,
    may_lack_all: bool = False,
) -> Lists:
    """Return the rankings of these queries in runs, kept in the cache.

    Args:
        files: of TREC runs.
        collection: that the documents are of.
        queries: that are wanted; others in the files are passed over.
        most: documents of a query; none takes all.
        option: that names the files, for messages.
        may_lack_all: whether none of the queries needs to be in the files.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a line breaks a rule, a document is unknown, or no query is in the files.
    """
    paths, root = expand_files(files, option, RUN_SUFFIXES), cache_root()
    ids = [queries.id(place) for place in range(len(queries))]
    digests = [file_digest(path, root) for path in paths]
    key = digest_of([LISTS_VERSION, "run", collection.fingerprint, digests, most, ids])

    def make(folder: Path) -> None:
        found = rankings_of(paths, collection, ids, slice(most), option, may_lack_all)
        nothing = np.zeros(0, np.int64), np.zeros(0, np.float32)
        documents, scores = zip(
            *(found.get(place, nothing) for place in range(len(ids))), strict=True
        )
        _write(folder, rows_of(documents, NO_DOCUMENT), rows_of(scores, 0.0))

    return _opened(made_once(root / "candidates" / key, make))


def rankings_of(
    paths: Sequence[Path],
    collection: Collection,
    ids: Sequence[str],
    ranks: slice,
    option: str,
    may_lack_all: bool = False,
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return place of a query in `ids` -> documents [n] int64 and scores [n] float32 of runs.

    Args: ids of the queries that are wanted; ranks that are taken; the others and the errors are
    those of `run_lists`.
    """
    places = {id: place for place, id in enumerate(ids)}
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for path in paths:
        for ranking in read_run(path):
            place = places.get(ranking.query)
            if place is None:
                continue
            if place in found:
                raise ValueError(
                    f'{path}: query "{ranking.query}" is in another of the runs too; name runs '
                    "that hold different queries."
                )
            indices = collection.documents.indices_of(names := ranking.documents[ranks])
            if (unknown := np.flatnonzero(indices < 0)).size:
                raise ValueError(
                    f'{path}: document "{names[unknown[0]]}" of query '
                    f'"{ranking.query}" is not in the collection; name a run of this collection.'
                )
            found[place] = indices, np.array(ranking.scores[ranks], np.float32)
    if not (found or may_lack_all):
        raise ValueError(
            f"{option} {', '.join(map(str, paths))} ranks none of the {len(ids)} queries, such "
            f'as "{ids[0]}"; name a run of these queries.'
        )
    return found


class FirstStage:
    """What a first stage says of the candidates of some queries.

    Args:
        options: of the candidates.
        collection: of the documents.
        queries: that are ranked for.
    """

    def __init__(self, options: CandidateOptions, collection: Collection, queries: Queries) -> None:
        self.options, self.queries = options, queries
        self.bm25 = None if options.bm25 is None else open_bm25(collection, options.bm25)
        self.lists: Lists | None = None
        if options.source == "bm25":
            assert self.bm25 is not None
            self.lists = bm25_lists(self.bm25, collection, queries, options.most)
        elif options.source == "run":
            self.lists = run_lists(options.run, collection, queries, options.most, "candidates.run")

    @property
    def names(self) -> list[str]:
        """What a test shows beside a ranker: `first`, a run, and `bm25`."""
        is_run, has_bm25 = self.options.source == "run", self.bm25 is not None
        return [name for name, there in (("first", is_run), ("bm25", has_bm25)) if there]

    def listed(self, place: int) -> np.ndarray:
        """Return the documents of a query's list, best first; none where the source is judged."""
        return np.zeros(0, np.int64) if self.lists is None else self.lists.of(place)[0]

    def scores(self, place: int, documents: np.ndarray) -> np.ndarray:
        """Return what the first stage gives documents, [n] float32, 0 where there is none.

        A document that a run does not list has the lowest score of the query's list.
        """
        if self.options.source != "run":
            return self.bm25_scores(place, documents)
        assert self.lists is not None
        listed, values = self.lists.of(place)
        if not len(listed):
            return np.zeros(len(documents), np.float32)
        order = np.argsort(listed)
        near = order[np.minimum(np.searchsorted(listed[order], documents), len(listed) - 1)]
        return np.where(listed[near] == documents, values[near], values.min())

    def bm25_scores(self, place: int, documents: np.ndarray) -> np.ndarray:
        """Return what BM25 gives documents, [n] float32; 0 where BM25 is left out."""
        if self.bm25 is None:
            return np.zeros(len(documents), np.float32)
        return self.bm25.scores(self.queries.text(place), documents).astype(np.float32)

    def moments(self, place: int, judged: np.ndarray) -> np.ndarray:
        """Return mean and deviation of the query's whole list, [2] float32: of all judged
        documents where there is no list. They do not depend on a training step's draw."""
        scores = self.scores(place, judged) if self.lists is None else self.lists.of(place)[1]
        deviation = float(scores.std()) if len(scores) else 0.0
        return np.array([scores.mean() if len(scores) else 0.0, deviation or 1.0], np.float32)


def _write(folder: Path, documents: np.ndarray, scores: np.ndarray) -> None:
    np.save(folder / "documents.npy", documents)
    np.save(folder / "scores.npy", scores)


def _opened(folder: Path) -> Lists:
    documents, scores = (mapped_array(folder / f"{name}.npy") for name in ("documents", "scores"))
    return Lists(documents, scores, folder.name)
