"""Candidates of queries: judged ones, lists of BM25 or of a run, groups and hard negatives.

Shapes: Q queries, L most documents of one list.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from datamodules.core.store import cache_root, digest_of, file_digest, made_once, mapped_array
from datamodules.files.tables import expand_files
from datamodules.search.bm25 import BM25_VERSION, Bm25, Bm25Options, open_bm25
from datamodules.search.collection import Collection
from datamodules.search.formats import Files
from datamodules.search.queries import (
    NO_DOCUMENT,
    CollectionQueries,
    JudgedQueries,
    Queries,
    read_run,
    rows_of,
)

LISTS_VERSION = 1
RUN_SUFFIXES = (".trec", ".run", ".txt", ".tsv")
Source = Literal["judged", "bm25", "run"]


@dataclass(frozen=True)
class CandidateOptions:
    """Which documents of a query are ranked.

    Args:
        source: the judged ones; the best of BM25; or those of a run, TREC's file of rankings.
        top: how many of BM25 or of the run; `None` is 100.
        run: file of the run, or several that hold different queries.
        bm25: how BM25 scores: beside the ranker in a test, and before it where the source is no
            run; `None` leaves BM25 out, which spares indexing the collection.

    Raises:
        ValueError: options in conflict.
    """

    source: Source = "judged"
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
        unjudged_as_negative: give mined documents grade 0. Unjudged is not irrelevant: without
            this they count in no loss but a teacher's.

    Raises:
        ValueError: sizes that do not go together, or an option without an effect.
    """

    size: int = 8
    mined: int = 0
    after_rank: int = 0
    unjudged_as_negative: bool = False

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"groups.size must be at least 2, got {self.size}.")
        if not 0 <= self.mined < self.size:
            raise ValueError(
                f"groups.mined must be 0 to {self.size - 1} (groups.size less one judged document),"
                f" got {self.mined}."
            )
        if not self.mined and (self.after_rank or self.unjudged_as_negative):
            name = "after_rank" if self.after_rank else "unjudged_as_negative"
            raise ValueError(
                f"groups.{name} concerns mined documents, and groups.mined is 0; raise that, or "
                f"leave {name} out."
            )
        if self.after_rank < 0:
            raise ValueError(f"groups.after_rank must be 0 or more, got {self.after_rank}.")

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
    """Which documents come along with a query as negatives, drawn anew in every epoch.

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
        if self.source not in get_args(Source):
            names = ", ".join(get_args(Source))
            raise ValueError(f'negatives.source must be one of {names}, got "{self.source}".')
        if self.count < 0:
            raise ValueError(f"negatives.count must be 0 or more, got {self.count}.")
        if not 0 <= self.skip < self.depth:
            raise ValueError(
                f"negatives.skip must be 0 to {self.depth - 1} (negatives.depth less one), got "
                f"{self.skip}; nothing would be left to draw from."
            )
        if (self.run is not None) != (self.source == "run"):
            raise ValueError(
                f'negatives.run is {self.run} and negatives.source "{self.source}"; a run file '
                "and the source run belong together."
            )

    def check(self, judged: JudgedQueries) -> None:
        """Refuse a run that is not there, or judgements that say nothing for the source.

        Raises:
            FileNotFoundError: there is no such run.
            ValueError: nobody was found not relevant.
        """
        expand_files(self.run, "data.negatives.run", RUN_SUFFIXES)
        if self.count and self.source == "judged" and not (judged.judgements.grade <= 0).any():
            raise ValueError(
                'negatives.source is "judged", but no document was judged and found not '
                "relevant (grade 0); take bm25 or run, or set negatives.count to 0."
            )


class Lists:
    """The best documents of each query, best first; pickled is their place alone.

    Attributes:
        documents: [Q, L] int64, -1 behind the last.
        scores: [Q, L] float32, 0 there.
        fingerprint: hex digest of all that they depend on.

    Args:
        folder: in the cache.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.fingerprint = folder, folder.name
        self.documents = mapped_array(folder / "documents.npy")
        self.scores = mapped_array(folder / "scores.npy")

    def __reduce__(self) -> tuple[Any, ...]:
        return Lists, (self.folder,)

    def of(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents and scores of one query, without what is behind the last."""
        size = int((self.documents[place] >= 0).sum())
        return np.array(self.documents[place, :size]), np.array(self.scores[place, :size])


def bm25_lists(bm25: Bm25, collection: Collection, queries: Queries, most: int) -> Lists:
    """Return what BM25 finds, kept in the cache."""
    texts = [queries.text(place) for place in range(len(queries))]
    options = asdict(bm25.options)
    facts = ["bm25", BM25_VERSION, collection.fingerprint, options, most, texts]

    def make(folder: Path) -> None:
        documents, scores = zip(*bm25.search(texts, most), strict=True)
        np.save(folder / "documents.npy", np.concatenate(documents))
        np.save(folder / "scores.npy", np.concatenate(scores))

    return Lists(made_once(cache_root() / "candidates" / digest_of([LISTS_VERSION, *facts]), make))


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
        most: documents of a query; `None` takes all.
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
        places = {id: place for place, id in enumerate(ids)}
        documents: dict[int, np.ndarray] = {}
        scores: dict[int, np.ndarray] = {}
        for path in paths:
            for ranking in read_run(path):
                if (place := places.get(ranking.query)) is None:
                    continue
                if place in documents:
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
        if not (documents or may_lack_all):
            raise ValueError(
                f"{option} {', '.join(map(str, paths))} ranks none of the {len(ids)} queries, such "
                f'as "{ids[0]}"; name a run of these queries.'
            )
        none, zero = np.zeros(0, np.int64), np.zeros(0, np.float32)
        listed = [documents.get(place, none) for place in range(len(ids))]
        scored = [scores.get(place, zero) for place in range(len(ids))]
        np.save(folder / "documents.npy", rows_of(listed, NO_DOCUMENT))
        np.save(folder / "scores.npy", rows_of(scored, 0.0))

    return Lists(made_once(root / "candidates" / key, make))


class NegativePool:
    """The documents that hard negatives of a query are drawn from.

    Args:
        options: of which kind.
        collection: of the texts.
        judged: queries of the training part.

    Raises: as `HardNegatives.check` and `run_lists`.
    """

    def __init__(
        self, options: HardNegatives, collection: Collection, judged: JudgedQueries
    ) -> None:
        options.check(judged)
        self.options, self.judged = options, judged
        self.lists: Lists | None = None
        queries = CollectionQueries(collection, judged.queries)
        if options.count and options.source == "bm25":
            bm25 = open_bm25(collection, options.bm25)
            self.lists = bm25_lists(bm25, collection, queries, options.depth)
        elif options.count and options.source == "run":
            facts = (options.run, collection, queries, options.depth, "data.negatives.run")
            self.lists = run_lists(*facts)

    @property
    def fingerprint(self) -> list[Any]:
        """All that decides which negatives are drawn, as plain JSON; not where a run lies."""
        return [asdict(self.options) | {"run": None}, self.lists and self.lists.fingerprint]

    def of(self, query: int) -> np.ndarray:
        """Return documents [n] int64 for a judged query by its number; relevant ones may be there.

        Those of BM25 and of a run come in the order of their ranks.
        """
        if self.lists is None:
            return self.judged.documents_of(query, are_relevant=False)
        place = int(np.searchsorted(self.judged.queries, query))
        return self.lists.of(place)[0][self.options.skip :]


class FirstStage:
    """Candidates of some queries, and their scores before they are ranked.

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

    def moments(self, place: int, judged: np.ndarray) -> tuple[float, float]:
        """Return mean and deviation of the query's whole list: of all judged documents where there
        is no list. They do not depend on a training step's draw."""
        scores = self.scores(place, judged) if self.lists is None else self.lists.of(place)[1]
        if not len(scores):
            return 0.0, 1.0
        return float(scores.mean()), float(scores.std()) or 1.0
