"""Token ids of a collection's documents and queries: kept in the cache, or made when asked for."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from datamodules.search.collection import Collection
from datamodules.search.queries import Queries
from datamodules.text.encoding import TextEncoding, kept_tokens
from datamodules.text.store import ReadTokens, TokenRows, Tokens

NUMBERS_AT_ONCE = 4096


@dataclass(frozen=True)
class CollectionTokens:
    """What a dataset reads of a collection.

    Args:
        documents: by their number in the collection.
        queries: by their number where they are from.
        numbers: [Q] integers, of the queries of the dataset; mapped where those of triples are.
    """

    documents: Tokens
    queries: Tokens
    numbers: np.ndarray

    def query(self, place: int) -> np.ndarray:
        """Return the token ids of a query by its place among those of the dataset."""
        return self.queries[int(self.numbers[place])]


def kept_collection(
    collection: Collection,
    encoding: TextEncoding,
    numbers: np.ndarray,
    documents: np.ndarray | None = None,
    is_whole: bool = False,
) -> CollectionTokens:
    """Return the tokens of some documents and queries, tokenised once.

    Args:
        collection: of the texts.
        encoding: of the texts.
        numbers: [Q] of the queries in the collection; some may be there several times.
        documents: [D] bool, which are read, of the D of the collection; none takes all.
        is_whole: keep what is beyond the lengths that an encoder sees, too.
    """
    chosen = is_among(collection.num_queries, numbers)
    queries = kept_queries(collection, encoding, chosen, is_whole)
    return CollectionTokens(
        kept_documents(collection, encoding, documents, is_whole), queries, numbers
    )


def is_among(count: int, *numbers: np.ndarray) -> np.ndarray:
    """Return which of the numbers below a count, [count] bool, are there.

    Args:
        count: of all.
        numbers: of any shape, mapped or not; those below 0 stand for nothing.
    """
    found = np.zeros(count, bool)
    for some in numbers:
        for first in range(0, len(some), NUMBERS_AT_ONCE):  # indices are copied as int64
            part = some[first : first + NUMBERS_AT_ONCE]
            found[part[part >= 0]] = True
    return found


def kept_documents(
    collection: Collection,
    encoding: TextEncoding,
    chosen: np.ndarray | None = None,
    is_whole: bool = False,
) -> TokenRows:
    """Return the rows of all documents; the others than the chosen ones are empty.

    Where most are chosen all are kept: then other stages read the same.
    """
    count = collection.num_documents
    if chosen is None or 2 * np.count_nonzero(chosen) > count:
        chosen = np.ones(count, bool)
    most = None if is_whole else encoding.limits.max_length
    facts = ["documents", collection.fingerprint]
    return _kept(facts, encoding, collection.document_text, chosen, most)


def kept_queries(
    collection: Collection, encoding: TextEncoding, chosen: np.ndarray, is_whole: bool = False
) -> TokenRows:
    """Return the rows of all queries; the others than the chosen ones are empty."""
    most = None if is_whole else encoding.limits.max_query_length
    facts = ["queries", collection.fingerprint]
    return _kept(facts, encoding, collection.query, chosen, most)


def _kept(
    facts: list[str],
    encoding: TextEncoding,
    text: Callable[[int], str],
    chosen: np.ndarray,
    most: int | None,
) -> TokenRows:
    def texts() -> Iterator[str]:
        return (text(number) if is_there else "" for number, is_there in enumerate(chosen))

    digest = hashlib.sha256(np.packbits(chosen).tobytes()).hexdigest()
    return kept_tokens([*facts, digest], encoding, texts, most)


def read_collection(
    collection: Collection, encode: Callable[[str], np.ndarray], queries: Queries
) -> CollectionTokens:
    """Return tokens that are made when they are asked for.

    Args:
        collection: of the documents.
        encode: a text -> its token ids.
        queries: of the collection, or of a file.
    """
    documents = ReadTokens(encode, collection.document_text)
    return CollectionTokens(documents, ReadTokens(encode, queries.text), np.arange(len(queries)))
