"""Candidates of queries: judged ones, lists of BM25 or of a run, groups and hard negatives.

Shapes: Q queries, L most documents of one list.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.core.batches import padded
from datamodules.core.store import (
    ArrayFolder,
    cache_folder,
    file_digest,
    made_once,
    write_arrays,
)
from datamodules.files.tables import Files, expand_files
from datamodules.search.bm25 import BM25_VERSION, Bm25Options, open_bm25
from datamodules.search.collection import Collection
from datamodules.search.queries import NO_DOCUMENT, NO_SCORE, Queries, read_run

LISTS_VERSION = 1
RUN_SUFFIXES = (".trec", ".run", ".txt", ".tsv")
Source = Literal["judged", "bm25", "run"]


@dataclass(frozen=True)
class CandidateOptions:
    """Documents that are ranked for a query.

    Args:
        source: the judged ones; the best of BM25; or those of a run, TREC's file of rankings.
        top: how many of BM25 or of the run.
        run: file of the run, or several that hold different queries.
        bm25: how BM25 scores: beside the ranker in a test, and before it where the source is no
            run; `None` leaves BM25 out, which spares indexing the collection.

    Raises:
        ValueError: a run without the source run, that source without one, or bm25 without BM25.
    """

    source: Source = "judged"
    top: int = 100
    run: Files = None
    bm25: Bm25Options | None = Bm25Options()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        _check_run("candidates", self.source, self.run)
        if self.top < 1:
            raise ValueError(f"candidates.top must be at least 1, got {self.top}.")
        if self.source == "judged" and self.top != CandidateOptions.top:
            raise ValueError(
                f"candidates.top is {self.top}, but all judged documents are ranked; leave it out, "
                "or choose candidates.source bm25 or run."
            )
        if self.source == "bm25" and self.bm25 is None:
            raise ValueError("candidates.source bm25 needs candidates.bm25; leave it as it is.")


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
        if not 0 <= self.mined < self.size or self.size < 2 or self.after_rank < 0:
            raise ValueError(
                "groups.size must be at least 2, groups.mined 0 to one less and groups.after_rank "
                f"0 or more, got {self.size}, {self.mined} and {self.after_rank}."
            )
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
        """Return the documents that may be mined: no judged one is.

        Args:
            listed: [L] documents of the source, best first.
            judged: [J] all judged documents of the query.
        """
        if not self.mined:
            return listed[:0]
        far = listed[self.after_rank :]
        return far[~np.isin(far, judged)]

    def drawn(self, grades: np.ndarray, num_minable: int, rng: np.random.Generator) -> np.ndarray:
        """Return the places of a group among its judged documents, then the minable ones.

        Args:
            grades: [J] of the judged documents.
            num_minable: documents that may be mined.
            rng: keyed by seed, epoch and sample.
        """
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
        bm25: how documents are scored.

    Raises:
        ValueError: a number out of its range, or a run without that source.
    """

    count: int = 0
    source: Source = "judged"
    run: str | None = None
    depth: int = 100
    skip: int = 0
    bm25: Bm25Options = field(default_factory=Bm25Options)

    def __post_init__(self) -> None:
        if self.count < 0 or not 0 <= self.skip < self.depth:
            raise ValueError(
                "negatives.count must be 0 or more and negatives.skip 0 to negatives.depth less "
                f"one, got {self.count}, {self.skip} and {self.depth}."
            )
        _check_run("negatives", self.source, self.run)


class Lists(ArrayFolder):
    """The best documents of each query, best first.

    Attributes:
        documents: [Q, L] int64, -1 behind the last.
        scores: [Q, L] float32, 0 there.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.documents, self.scores = self.arrays["documents"], self.arrays["scores"]

    @property
    def fingerprint(self) -> str:
        """Hex digest of all that they depend on."""
        return self.folder.name

    def of(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents and scores of one query, without what is behind the last."""
        size = int((self.documents[place] >= 0).sum())
        return np.array(self.documents[place, :size]), np.array(self.scores[place, :size])


def candidate_lists(
    options: CandidateOptions | HardNegatives,
    most: int,
    collection: Collection,
    queries: Queries,
    option: str,
) -> Lists | None:
    """Return the lists of the source of these options; `None` for judged documents.

    Args:
        most: documents of a query.
        option: name of the options, for messages.

    Raises: as of `run_lists`.
    """
    if options.source == "run":
        return run_lists(options.run, collection, queries, most, f"{option}.run")
    if options.source == "judged" or options.bm25 is None:
        return None
    bm25 = options.bm25

    def make() -> tuple[np.ndarray, np.ndarray]:
        return open_bm25(collection, bm25).search([query.text for query in queries], most)

    facts = ["bm25", BM25_VERSION, collection.fingerprint, asdict(bm25), most, queries.digest]
    return _made(facts, make)


def run_lists(
    files: Files,
    collection: Collection,
    queries: Queries,
    most: int | None,
    option: str,
) -> Lists:
    """Return the rankings of these queries in runs, kept in the cache.

    Args:
        queries: that are wanted; others in the files are passed over.
        most: documents of a query; `None` takes all.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a line breaks a rule, a document is unknown, or no query is in the files.
    """
    paths = expand_files(files, option, RUN_SUFFIXES)

    def make() -> tuple[np.ndarray, np.ndarray]:
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
                f"{option} {', '.join(map(str, paths))} ranks none of the {len(queries)} queries, "
                f'such as "{queries[0].id}"; name a run of these queries.'
            )
        return padded(documents, NO_DOCUMENT), padded(scores, NO_SCORE)

    digests = [file_digest(path) for path in paths]
    return _made(["run", collection.fingerprint, digests, most, queries.digest], make)


def _made(facts: list[Any], make: Callable[[], tuple[np.ndarray, np.ndarray]]) -> Lists:
    def write(folder: Path) -> None:
        write_arrays(folder, dict(zip(("documents", "scores"), make(), strict=True)))

    return Lists(made_once(cache_folder("candidates", [LISTS_VERSION, *facts]), write))
