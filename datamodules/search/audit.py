"""What is in a collection, and what is wrong with it."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from datamodules.files.bad_rows import BadRow
from datamodules.files.splitting import PART_NAMES
from datamodules.search.collection import Collection, open_collection
from datamodules.search.request import CollectionRequest
from datamodules.search.texts import TextRecord

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class PartAudit:
    """The judgements of one part.

    Attributes:
        num_queries: with a judgement.
        num_relevant: judgements above 0.
        num_without: queries of it that have no document above 0, which no ranking can serve.
        grades: grade -> number of judgements, ascending.
    """

    part: str
    num_queries: int
    num_judgements: int
    num_relevant: int
    num_without: int
    grades: dict[float, int]


@dataclass
class Audit:
    """Findings over a collection.

    Attributes:
        parts: those with judgements.
        bad_rows: every one, in order.
        document_lengths: [documents] bytes of title and text.
        query_lengths: [queries] bytes.
        num_empty: documents without title and text.
        num_unjudged: queries in no part.
        num_repeated_texts: documents whose words an earlier document has, too.
        num_merged_queries: that stand in two files alike.
        num_merged_judgements: that were said twice.
        num_fractional_grades: that are no whole numbers; they are taken as they are.
        num_triples: of ids.
        overlap: names of two parts -> queries with the same words in both.
    """

    format: str
    parts: list[PartAudit]
    bad_rows: list[BadRow]
    document_lengths: np.ndarray
    query_lengths: np.ndarray
    num_empty: int
    num_unjudged: int
    num_repeated_texts: int
    num_merged_queries: int
    num_merged_judgements: int
    num_fractional_grades: int
    num_triples: int
    overlap: dict[tuple[str, str], int] = field(default_factory=dict)

    def show(self, console: "Console") -> None:
        """Print the findings."""
        from datamodules.search.audit_view import show_audit

        show_audit(console, self)


def audit_collection(request: CollectionRequest) -> Audit:
    """Read all files of a collection and return what is in them.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file cannot be read at all.
    """
    collection = open_collection(request, "reject")
    facts = collection.facts
    judged = [collection.judgements(part) for part in range(len(PART_NAMES))]
    queries = [np.unique(judgements.query) for judgements in judged]
    contents = collection.documents.column("contents")
    is_empty = contents == np.uint64(TextRecord("", "", "").content_hash)
    num_with_words = int(np.count_nonzero(~is_empty))
    return Audit(
        format=request.layout,
        parts=[_part_audit(collection, part) for part in range(len(PART_NAMES))],
        bad_rows=collection.bad_rows,
        document_lengths=np.asarray(collection.document_lengths),
        query_lengths=np.asarray(collection.query_lengths),
        num_empty=int(np.count_nonzero(is_empty)),
        num_unjudged=collection.num_queries - len(np.unique(np.concatenate(queries))),
        num_repeated_texts=num_with_words - len(np.unique(contents[~is_empty])),
        num_merged_queries=facts["queries"]["num_merged"],
        num_merged_judgements=facts["num_merged_judgements"],
        num_fractional_grades=facts["num_fractional_grades"],
        num_triples=facts["num_triples"],
        overlap=_overlap(collection, queries),
    )


def _part_audit(collection: Collection, part: int) -> PartAudit:
    judgements = collection.judgements(part)
    queries = np.unique(judgements.query)
    is_relevant = judgements.grade > 0
    values, counts = np.unique(judgements.grade, return_counts=True)
    return PartAudit(
        part=PART_NAMES[part],
        num_queries=len(queries),
        num_judgements=len(judgements.query),
        num_relevant=int(is_relevant.sum()),
        num_without=len(queries) - len(np.unique(judgements.query[is_relevant])),
        grades=dict(zip(values.tolist(), counts.tolist(), strict=True)),
    )


def _overlap(collection: Collection, queries: list[np.ndarray]) -> dict[tuple[str, str], int]:
    """Count queries of two parts with the same words, case and spacing aside."""
    hashes = [np.unique(collection.queries.column("contents")[numbers]) for numbers in queries]
    found = {}
    for first in range(len(PART_NAMES)):
        for second in range(first + 1, len(PART_NAMES)):
            count = len(np.intersect1d(hashes[first], hashes[second], assume_unique=True))
            if count:
                found[PART_NAMES[first], PART_NAMES[second]] = count
    return found
