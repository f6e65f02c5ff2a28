"""Queries moved towards the documents that they found: those speak the collection's language.

Shapes: Q queries, D documents, W width of vectors.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_models.seo.search import Found, Vectors, search


@dataclass(frozen=True)
class Feedback:
    """How far a query is moved, and by which documents. No judgement is used.

    Args:
        documents: best documents of a first search.
        weight: of their mean beside the query, which has 1.
        temperature: of the softmax over their scores; low ones listen to the best alone.

    Raises:
        ValueError: one of them is not above 0.

    Source: of the idea, Rocchio 1971, "Relevance feedback in information retrieval".
    """

    documents: int = 5
    weight: float = 0.6
    temperature: float = 0.1

    def __post_init__(self) -> None:
        for name in ("documents", "weight", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"feedback.{name} must be above 0, got {getattr(self, name)}.")


def searched(
    queries: Vectors,
    documents: Vectors,
    k: int,
    device: torch.device | str,
    feedback: Feedback | None,
) -> Found:
    """Return what `search` finds, with queries that were moved first where that is wanted."""
    if feedback is not None:
        queries = moved(queries, documents, device, feedback)
    return search(queries, documents, k, device)


def moved(
    queries: Vectors, documents: Vectors, device: torch.device | str, feedback: Feedback
) -> Tensor:
    """Return unit vectors [Q, W] float64, on the CPU.

    Args:
        queries: [Q, W] unit vectors.
        documents: [D, W] unit vectors; of a memory-mapped matrix only those found are read.
        device: where the first search is computed.
        feedback: how far.
    """
    found = search(queries, documents, feedback.documents, device)
    shares = (found.scores.double() / feedback.temperature).softmax(1)  # [Q, k]
    rows = documents[found.documents.numpy().ravel()]
    best = torch.as_tensor(rows).cpu().double().unflatten(0, tuple(found.documents.shape))
    mean = (shares[..., None] * best).sum(1)
    own = torch.as_tensor(queries).cpu().double()
    return F.normalize(own + feedback.weight * mean, dim=-1)
