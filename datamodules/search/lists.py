"""Lists of documents for queries, out of BM25 or of TREC's files of rankings, kept in the cache."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.batches import padded
from datamodules.core.store import ArrayFolder, cache_folder, file_digest, made_once, write_arrays
from datamodules.files.tables import expand_files
from datamodules.search.candidates import (
    BM25_VERSION,
    Bm25Options,
    CandidateOptions,
    HardNegatives,
    open_bm25,
)
from datamodules.search.collection import Collection
from datamodules.search.queries import NO_DOCUMENT, NO_SCORE, Queries, read_run

LISTS_VERSION = 1
RUN_SUFFIXES = (".trec", ".run", ".txt", ".tsv")


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

    def scores_of(self, places: np.ndarray, documents: np.ndarray) -> np.ndarray:
        """Return the scores [n, K] float32 of documents [n, K] of queries [n]; NaN = not listed."""
        asked = np.where(documents == NO_DOCUMENT, NO_DOCUMENT - 1, documents)
        is_same = asked[:, :, None] == self.documents[places][:, None]
        scores = np.where(is_same, self.scores[places][:, None], -np.inf).max(axis=2)
        return np.where(is_same.any(axis=2), scores, np.nan).astype(np.float32)

    def of(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents and scores of one query, without what is behind the last."""
        size = int((self.documents[place] >= 0).sum())
        return np.array(self.documents[place, :size]), np.array(self.scores[place, :size])


def teacher_lists(lists: Lists | None, options: HardNegatives) -> Lists:
    """Return the lists of a run, whose scores are learnt.

    Raises:
        ValueError: the negatives do not come from a run.
    """
    if lists is None or options.source != "run":
        raise ValueError(
            "model.distillation learns the scores of a ranker's run; give data.negatives.source="
            "run, data.negatives.run and data.negatives.count, or leave the distillation out."
        )
    return lists


def candidate_lists(
    options: CandidateOptions | HardNegatives,
    bm25: Bm25Options | None,
    most: int,
    collection: Collection,
    queries: Queries,
    option: str,
) -> Lists | None:
    """Return the lists of the source of these options, kept in the cache; `None` for judged
    documents.

    Args:
        most: documents of a query.
        queries: others in a run are passed over.
        option: name of the options, for messages.

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
        facts += [BM25_VERSION, collection.fingerprint, asdict(bm25)]

    def write(folder: Path) -> None:
        if options.source == "run" or bm25 is None:
            documents, scores = _of_run(paths, collection, queries, most)
        else:
            asked = [query.text for query in queries]
            documents, scores = open_bm25(collection, bm25).search(asked, most)
        write_arrays(folder, {"documents": documents, "scores": scores})

    return Lists(made_once(cache_folder("candidates", [*facts, most, queries.digest]), write))


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
