"""Token ids of a collection's documents and queries: kept in the cache, or made when asked for."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from datamodules.encoded_texts import TextEncoding, kept_tokens
from datamodules.relevance.collection import Collection
from datamodules.relevance.queries import Queries, hash_digest
from datamodules.token_rows import ReadTokens, TokenRows, Tokens


@dataclass(frozen=True)
class CollectionTokens:
    """What a dataset reads of a collection.

    Args:
        documents: by their number in the collection.
        queries: by their row.
        rows: [Q] int64, row of each query.
    """

    documents: Tokens
    queries: Tokens
    rows: np.ndarray

    def query(self, place: int) -> np.ndarray:
        """Return the token ids of a query by its place among those of the dataset."""
        return self.queries[self.rows[place]]


def kept_collection(
    collection: Collection, encoding: TextEncoding, numbers: np.ndarray, is_whole: bool = False
) -> CollectionTokens:
    """Return the tokens of all documents and of some queries, tokenised once.

    Args:
        collection: of the texts.
        encoding: of the texts.
        numbers: [Q] of the queries in the collection; some may be there several times.
        is_whole: keep what is beyond the lengths that an encoder sees, too.
    """
    limits = encoding.limits
    of_documents = None if is_whole else limits.max_length
    of_queries = None if is_whole else limits.max_query_length
    distinct, rows = np.unique(numbers, return_inverse=True)
    facts = ["queries", collection.fingerprint, hash_digest(distinct)]
    texts = partial(map, collection.query, distinct.tolist())
    queries = kept_tokens(facts, encoding, texts, of_queries)
    return CollectionTokens(kept_documents(collection, encoding, of_documents), queries, rows)


def kept_documents(collection: Collection, encoding: TextEncoding, most: int | None) -> TokenRows:
    """Return the tokens of all documents, of each the first `most`."""
    texts = partial(map, collection.document_text, range(collection.num_documents))
    return kept_tokens(["documents", collection.fingerprint], encoding, texts, most)


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
