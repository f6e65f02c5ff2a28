"""Exact search over encoded documents, and queries that are moved by what they found.

Shapes: Q queries, D documents, W width of vectors, k documents found of each query, C candidates.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.search.formats import NO_DOCUMENT

DOCUMENTS_AT_ONCE, QUERIES_AT_ONCE = 8_192, 512  # of a search, which bound its memory
NUMBERS_AT_ONCE = 2**18  # of vectors whose scores are taken in float64
SPARE = 32  # documents beyond the k best, whose distance is the proof
LOST = {"none": 2**-24, "ieee": 2**-24, "tf32": 2**-11}  # of a factor, as torch is set

Vectors: TypeAlias = Tensor | np.ndarray


@dataclass(frozen=True)
class Feedback:
    """How far a query is moved, and by which documents. No judgement is used.

    Args:
        documents: best documents of a first search.
        weight: of their mean beside the query, which has 1.
        temperature: of the softmax over their scores; low ones listen to the best alone.

    Source: of the idea, Rocchio 1971, "Relevance feedback in information retrieval".
    """

    documents: int = 5
    weight: float = 0.6
    temperature: float = 0.1


class Found(NamedTuple):
    """The best documents of each query, best first; equal scores in the order of documents.

    Args:
        documents: [Q, k] int64, rows of the searched matrix; -1 = fewer were fused or found.
        scores: [Q, k] float32, -inf where there is none.
    """

    documents: Tensor
    scores: Tensor


class ExactSearch:
    """Encoded documents [D, W], of which the k best of each query are found by inner product on a
    device; a memory-mapped matrix is read in chunks."""

    def __init__(self, documents: Vectors, device: torch.device | str = "cpu") -> None:
        self.documents, self.device = documents, device

    def search(self, queries: Vectors, k: int, feedback: Feedback | None = None) -> Found:
        """Return the k best documents of each query [Q, W], moved first where there is feedback."""
        exact = on_device(queries, self.device, torch.float64)
        if feedback is not None:  # unit vectors [Q, W], nearer to what unit vectors find
            found = self.nearest(exact, feedback.documents)
            shares = (found.scores.double() / feedback.temperature).softmax(1)  # [Q, k]
            mean = (shares[..., None] * self.vectors(found.documents)).sum(1)
            exact = F.normalize(exact.cpu() + feedback.weight * mean, dim=-1).to(self.device)
        return self.nearest(exact, k)

    def vectors(self, numbers: Tensor) -> Tensor:
        """Return the vectors [Q, k, W] float64 of documents [Q, k], on the CPU."""
        return on_device(self.documents[numbers.numpy()], "cpu", torch.float64)

    def scored(self, queries: Tensor, numbers: Tensor) -> Found:
        """Return documents [Q, C], given in ascending order, -1 = none, in that of their scores for
        queries [Q, W]: taken in float64, pair by pair, and rounded to float32, so that nothing but
        the pair decides the bits."""
        at_once = 1 + NUMBERS_AT_ONCE // (numbers.shape[1] * queries.shape[1] + 1)
        scores = torch.empty(numbers.shape, dtype=torch.float32, device=queries.device)
        for start in range(0, len(queries), at_once):
            part = slice(start, start + at_once)
            pairs = self.documents[numbers[part].cpu().numpy()]
            vectors = on_device(pairs, self.device, torch.float64)  # [queries, C, W]
            scores[part] = (queries[part, None] * vectors).sum(-1).float()
        scores[numbers < 0] = -torch.inf
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        return Found(numbers.gather(1, order), scores)

    def nearest(self, queries: Tensor, k: int) -> Found:
        """Return the k best documents of each query [Q, W] float64, at most D.

        The size of the chunks does not decide between documents, and equal documents have equal
        scores, see `scored`. Which pairs to take, products of matrices in float32 tell: what they
        leave out cannot be among the best, by the bound of their error (N. Higham, Accuracy and
        Stability of Numerical Algorithms, 3.1). Queries of which this cannot be said are searched
        again in float64.
        """
        (num_documents, width), tried = self.documents.shape, k + min(SPARE, 7 * k)
        with torch.autocast(queries.device.type, enabled=False):
            near, longest = _nearest(queries.float(), self.documents, tried)
        numbers = near.documents.sort(dim=1).values[:, max(0, tried - num_documents) :]
        best = Found(*(each[:, :k] for each in self.scored(queries, numbers)))
        backend = torch.backends.cuda if queries.is_cuda else torch.backends.mkldnn
        lost = LOST.get(backend.matmul.fp32_precision, 2**-8)  # of bfloat16
        share = 2 * lost + lost**2 + (width + 8) * 2**-23
        # What products lose below the normal numbers; where they overflow, the sum is no number.
        error = share * (queries.float().norm(dim=1) * longest) + width * 2**-125
        is_open = ~((near.scores[:, -1] + error)[:, None] < best.scores).all(1)
        if is_open.any():
            near, _ = _nearest(queries[is_open], self.documents, min(tried, num_documents))
            again = self.scored(queries[is_open], near.documents.sort(dim=1).values)
            best.documents[is_open], best.scores[is_open] = (each[:, :k] for each in again)
        return Found(*(each.cpu() for each in best))


def _nearest(queries: Tensor, documents: Vectors, kept: int) -> tuple[Found, Tensor]:
    """Return the best by products of matrices in the dtype of the queries, equal ones in the order
    of documents, and the length of the longest document."""
    device = queries.device
    best = Found(
        torch.full((len(queries), kept), NO_DOCUMENT, device=device),
        torch.full((len(queries), kept), -torch.inf, dtype=torch.float32, device=device),
    )
    longest, at_once = queries.new_zeros(()), max(DOCUMENTS_AT_ONCE, kept)
    for start in range(0, documents.shape[0], at_once):
        part = on_device(documents[start : start + at_once], device, queries.dtype)
        longest = torch.maximum(longest, part.norm(dim=1).max())
        for first in range(0, len(queries), QUERIES_AT_ONCE):
            rows = slice(first, first + QUERIES_AT_ONCE)
            scores = (queries[rows] @ part.T).float()
            limit = best.scores[rows, -1:]
            if start == 0:
                limit = scores.topk(min(kept, len(part))).values[:, -1:].nextafter(limit)
            row, column = (~(scores <= limit)).nonzero(as_tuple=True)
            starts = torch.searchsorted(row, torch.arange(len(scores) + 1, device=device))
            place = kept + torch.arange(len(row), device=device) - starts[row]
            values = scores.new_full((len(scores), kept + int(starts.diff().max())), -torch.inf)
            numbers = torch.full_like(values, NO_DOCUMENT, dtype=torch.int64)
            # Those of earlier chunks stand first, and so come first among equals.
            values[:, :kept], numbers[:, :kept] = best.scores[rows], best.documents[rows]
            values[row, place], numbers[row, place] = scores[row, column], column + start
            values, order = values.sort(dim=1, descending=True, stable=True)
            best.scores[rows] = values[:, :kept]
            best.documents[rows] = numbers.gather(1, order[:, :kept])
    return best, longest


def on_device(values: Vectors, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Return an array or a tensor as a tensor of this dtype there."""
    if isinstance(values, np.ndarray):
        # Of a read-only map, which torch warns of, a copy.
        values = torch.from_numpy(np.require(values, requirements="W"))
    return values.to(device, dtype)
