"""Hard negatives: documents that look right for a query and are not."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from datamodules.core.store import cache_root, file_digest
from datamodules.search.bm25 import Bm25, Bm25Options, open_bm25
from datamodules.search.candidates import rankings_of
from datamodules.search.collection import Collection
from datamodules.search.judged_queries import JudgedQueries

Source = Literal["judged", "bm25", "run"]
MOST_KEPT = 200_000  # queries whose negatives a process remembers


@dataclass(frozen=True)
class HardNegatives:
    """Which documents come along with a query as negatives, drawn anew in every epoch.

    Nobody has judged most documents, and some of those may be relevant: negatives that are
    looked for, by bm25 or in a run, are wrong now and then. Documents known to be relevant never
    are among them. A negative of a triple comes first.

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

    def run_path(self) -> Path | None:
        """Return the file of the run, if there is to be one.

        Raises:
            FileNotFoundError: there is none.
        """
        if self.run is None:
            return None
        path = Path(self.run).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"negatives.run {self.run} is no file; make it with unisono predict of a "
                "retriever, or correct the path."
            )
        return path

    def facts(self) -> dict[str, Any]:
        """Return what decides which negatives are drawn, as plain JSON; not where a run lies."""
        path = self.run_path()
        return {**asdict(self), "run": path and file_digest(path, cache_root())}


class NegativePool:
    """The documents that hard negatives of a query are drawn from.

    Args:
        options: of which kind.
        collection: of the texts.
        judged: queries of the training part.

    Raises:
        FileNotFoundError: there is no such run.
        ValueError: nobody was found not relevant, or the run is of another collection or has
            no training query.
    """

    def __init__(
        self, options: HardNegatives, collection: Collection, judged: JudgedQueries
    ) -> None:
        self.options, self.collection, self.judged = options, collection, judged
        self._bm25: Bm25 | None = None
        self._known: dict[int, np.ndarray] = {}
        check_negatives(options, collection, judged)
        path = options.run_path()
        if options.count and path is not None:
            self._known = self._of_run(path)

    def of(self, query: int) -> np.ndarray:
        """Return documents [n] int64 in the order of their ranks; relevant ones may be there."""
        if query not in self._known and self.options.source != "run":
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            self._known[query] = self._looked_up(query)
        return self._known.get(query, np.zeros(0, np.int64))

    def _looked_up(self, query: int) -> np.ndarray:
        if self.options.source == "judged":
            return self.judged.irrelevant_of(query)
        if self._bm25 is None:
            self._bm25 = open_bm25(self.collection, self.options.bm25)
        (hits,) = self._bm25.search([self.collection.query(query)], self.options.depth)
        return hits.documents[0][hits.documents[0] >= 0][self.options.skip :]

    def _of_run(self, path: Path) -> dict[int, np.ndarray]:
        """The run's documents of the training queries, those of triples too."""
        queries, triples = self.judged.queries, self.collection.triples
        if triples is not None:
            queries = np.union1d(queries, triples.query)
        ids = [self.collection.query_id(int(query)) for query in queries]
        ranks = slice(self.options.skip, self.options.depth)
        found = rankings_of([path], self.collection, ids, ranks, "data.negatives.run")
        return {int(queries[place]): documents for place, (documents, _) in found.items()}


def check_negatives(options: HardNegatives, collection: Collection, judged: JudgedQueries) -> None:
    """Refuse options that the judgements have nothing for, or a run that is not there.

    Raises: as `NegativePool`, but for what is in a run.
    """
    options.run_path()
    needs_judged = options.count and options.source == "judged" and collection.triples is None
    if needs_judged and not any(len(judged.irrelevant_of(int(q))) for q in judged.queries):
        raise ValueError(
            'negatives.source is "judged", but no document was judged and found not '
            "relevant (grade 0); take bm25 or run, or set negatives.count to 0."
        )
