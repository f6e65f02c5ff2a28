"""Exact search: the documents whose vectors have the largest products with a query's.

Shapes: Q queries, D documents, W width of vectors, k documents found of each.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lit_models.blocks import rounds_to_float32

DOCUMENTS_AT_ONCE = 8_192
QUERIES_AT_ONCE = 256
PAIRS_AT_ONCE = 8_192  # of a query and a document
MOST_NEAR = 4  # times k: where more documents of a chunk come near, all are computed exactly
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

    Scores are taken in float64, pair by pair, and rounded to float32: the size of the chunks does
    not decide between documents, and equal documents have equal scores. Which pairs to look at, a
    product of matrices tells: of the first chunk in float64, of later ones on a CPU in float32, by
    the bound of whose error most documents cannot be among the best (N. Higham, Accuracy and
    Stability of Numerical Algorithms, 3.1).

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
        torch.full((num_queries, kept), -torch.inf, dtype=torch.float32),
    )
    for start in range(0, documents.shape[0], documents_at_once):
        part = _on(documents[start : start + documents_at_once], device)
        for first in range(0, num_queries, queries_at_once):
            rows = slice(first, first + queries_at_once)
            some = _on(queries[rows], device)
            top = _better(some, part, best.scores[rows, -1:], MOST_NEAR * kept)
            if top is None:
                top = _scored_alike(some, part, _best((some @ part.T).float(), kept))
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
    """Return the k largest of each row [Q, k], or all, equal ones in the order of columns.

    `topk` finds the right values, but which of several equal ones at the end it takes is not
    said: rows where that matters are sorted as a whole.
    """
    k = min(k, scores.shape[1])
    values, columns = scores.topk(k, dim=1)
    columns, order = columns.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    columns = columns.gather(1, order)
    is_open = (scores >= values[:, -1:]).sum(1) > k
    if is_open.any():
        whole = scores[is_open].sort(dim=1, descending=True, stable=True)
        values[is_open], columns[is_open] = whole.values[:, :k], whole.indices[:, :k]
    return Found(columns, values)


def _scored_alike(queries: Tensor, part: Tensor, found: Found) -> Found:
    """Return the same documents by their scores as `_better` takes them [Q, k]."""
    documents = found.documents.sort(1).values
    row = torch.arange(len(queries), device=documents.device).repeat_interleave(documents.shape[1])
    scores = _scores(queries, part, row, documents.flatten()).view_as(documents)
    order = scores.argsort(dim=1, descending=True, stable=True)
    return Found(documents.gather(1, order), scores.gather(1, order))


def _scores(queries: Tensor, part: Tensor, row: Tensor, document: Tensor) -> Tensor:
    """Return the products of pairs [P], float32. Args: row, document [P], of `queries`, `part`."""
    pairs = zip(row.split(PAIRS_AT_ONCE), document.split(PAIRS_AT_ONCE), strict=True)
    return torch.cat([(queries[some] * part[others]).sum(1).float() for some, others in pairs])


def _better(queries: Tensor, part: Tensor, worst: Tensor, most: int) -> Found | None:
    """Return the documents of a chunk whose scores may be above the worst one kept, in their order
    [Q, at most `most`]; -1 and -inf where there are fewer. None: there are too many, or float32
    does not tell.

    Args:
        queries: [Q, W] float64.
        part: [N, W] float64.
        worst: the lowest score that each query has kept [Q, 1] float32, -inf for none.
        most: documents of one query.
    """
    is_float32 = rounds_to_float32() and not torch.is_autocast_enabled("cpu")
    if part.device.type != "cpu" or not is_float32 or not torch.isfinite(worst).all():
        return None
    lengths, longest = queries.norm(dim=1, keepdim=True), part.norm(dim=1).max()
    if not (_is_tame(lengths) and _is_tame(longest)):
        return None
    products = queries.float() @ part.float().T
    is_near = products > (worst - 2 * _error(lengths, longest, part.shape[1])).float()
    counts = is_near.sum(1)
    if counts.max() > most:
        return None
    row, document = is_near.nonzero(as_tuple=True)
    column = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    found = Found(
        torch.full((len(queries), int(counts.max())), -1, dtype=torch.int64),
        torch.full((len(queries), int(counts.max())), -torch.inf, dtype=torch.float32),
    )
    found.documents[row, column] = document
    found.scores[row, column] = _scores(queries, part, row, document)
    return found


def _error(lengths: Tensor, longest: Tensor, width: int) -> Tensor:
    """Return a bound on what a product in float32 and a score differ by [Q, 1]: of `width` products
    and as many sums, both factors rounded, and the score rounded in the end."""
    return (width + 4) * torch.finfo(torch.float32).eps * lengths * longest


def _is_tame(lengths: Tensor) -> bool:
    """Whether products of such vectors neither overflow nor vanish in float32; not of NaN."""
    return bool(((lengths == 0) | ((lengths > 1e-12) & (lengths < 1e12))).all())


def _merged(best: Found, found: Found, k: int) -> Found:
    """Return the best of both; all documents of the first come before those of the second."""
    scores = torch.cat([best.scores, found.scores], 1)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    documents = torch.cat([best.documents, found.documents], 1)
    return Found(documents.gather(1, order), scores.gather(1, order))
