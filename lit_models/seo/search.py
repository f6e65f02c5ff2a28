"""Exact search: the documents whose vectors have the largest products with a query's.

Shapes: Q queries, D documents, W width of vectors, k documents found of each.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

DOCUMENTS_AT_ONCE = 8_192
QUERIES_AT_ONCE = 256
Vectors: TypeAlias = Tensor | np.ndarray


class Found(NamedTuple):
    """The best documents of each query, best first; equal scores in the order of documents.

    Args:
        documents: [Q, k] int64, rows of the searched matrix; -1 = there are fewer.
        scores: [Q, k] float32, -inf where there is none.
    """

    documents: Tensor
    scores: Tensor


def search(
    queries: Vectors,
    documents: Vectors,
    k: int,
    device: torch.device | str = "cpu",
    documents_at_once: int = DOCUMENTS_AT_ONCE,
    queries_at_once: int = QUERIES_AT_ONCE,
) -> Found:
    """Return the k best documents of each query by inner product.

    Products are taken in float64 and rounded to float32: neither the size of the chunks nor the
    order of a sum then decides between documents, and equal documents have equal scores.

    Args:
        queries: [Q, W].
        documents: [D, W]; a memory-mapped matrix is read in chunks.
        k: documents per query, at most D are found.
        device: where it is computed.
        documents_at_once: rows of a chunk, which bounds the memory together with the next.
        queries_at_once: the same for queries.

    Raises:
        ValueError: k below 1, or widths that differ.
    """
    _check(queries, documents, k)
    kept, num_queries = min(k, documents.shape[0]), queries.shape[0]
    best = Found(
        torch.full((num_queries, kept), -1, dtype=torch.int64),
        torch.full((num_queries, kept), -torch.inf),
    )
    for start in range(0, documents.shape[0], documents_at_once):
        part = _on(documents[start : start + documents_at_once], device).T
        for first in range(0, num_queries, queries_at_once):
            rows = slice(first, first + queries_at_once)
            scores = (_on(queries[rows], device) @ part).float()
            top = _best(scores, min(kept, scores.shape[1]))
            found = Found(top.documents.cpu() + start, top.scores.cpu())
            merged = _merged(Found(best.documents[rows], best.scores[rows]), found, kept)
            best.documents[rows], best.scores[rows] = merged
    return best


def _check(queries: Vectors, documents: Vectors, k: int) -> None:
    if k < 1:
        raise ValueError(f"k must be 1 or more, got {k}.")
    if queries.shape[1] != documents.shape[1]:
        raise ValueError(
            f"queries have {queries.shape[1]} dimensions and documents {documents.shape[1]}; "
            "encode both with the same model."
        )


def _on(values: Vectors, device: torch.device | str) -> Tensor:
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(np.array(values))  # of a read-only map, which torch warns of
    return values.to(device, torch.float64)


def _best(scores: Tensor, k: int) -> Found:
    """Return the k largest of each row [Q, k], equal ones in the order of columns.

    `topk` finds the right values, but which of several equal ones at the end it takes is not
    said: rows where that matters are sorted as a whole.
    """
    values, columns = scores.topk(k, dim=1)
    columns, order = columns.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    columns = columns.gather(1, order)
    is_open = (scores >= values[:, -1:]).sum(1) > k
    if is_open.any():
        whole = scores[is_open].sort(dim=1, descending=True, stable=True)
        values[is_open], columns[is_open] = whole.values[:, :k], whole.indices[:, :k]
    return Found(columns, values)


def _merged(best: Found, found: Found, k: int) -> Found:
    """Return the best of both; all documents of the first come before those of the second."""
    scores = torch.cat([best.scores, found.scores], 1)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    documents = torch.cat([best.documents, found.documents], 1)
    return Found(documents.gather(1, order), scores.gather(1, order))
