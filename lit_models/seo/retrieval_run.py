"""The run of a prediction: encoded texts are searched with their queries, in TREC's format."""

from collections.abc import Iterator

import numpy as np
import torch

from datamodules.relevance.bm25 import open_bm25
from datamodules.relevance.encoded_collection import RUN_FILE, EncodedCollection
from datamodules.relevance.retrieval import RetrievalDataModule
from datamodules.relevance.runs import Ranking
from datamodules.relevance.runs import write_run as write_rankings
from lit_models.seo.feedback import Feedback, searched
from lit_models.seo.fusion import fused
from lit_models.seo.search import Found

TAG = "unisono"
QUERIES_AT_ONCE = 1024


def write_run(
    encoded: EncodedCollection,
    data: RetrievalDataModule,
    fusion_weight: float | None,
    device: torch.device,
    feedback: Feedback | None = None,
) -> None:
    """Write the best documents of each query into the folder of encoded texts.

    Args:
        encoded: of the data's collection.
        data: with the options of the run and of BM25.
        fusion_weight: of BM25; none leaves it out.
        device: where products are computed.
        feedback: how queries are moved before they search.
    """
    rankings = _rankings(encoded, data, fusion_weight, device, feedback)
    write_rankings(encoded.folder / RUN_FILE, rankings, TAG)


def _rankings(
    encoded: EncodedCollection,
    data: RetrievalDataModule,
    fusion_weight: float | None,
    device: torch.device,
    feedback: Feedback | None,
) -> Iterator[Ranking]:
    names, ids = encoded.query_ids, encoded.document_ids
    depth = (
        data.predict_depth if fusion_weight is None else max(data.predict_depth, data.bm25_depth)
    )
    for start in range(0, len(names), QUERIES_AT_ONCE):
        chunk = names[start : start + QUERIES_AT_ONCE]
        queries = encoded.queries[start : start + QUERIES_AT_ONCE]
        found = searched(np.asarray(queries), encoded.documents, depth, device, feedback)
        if fusion_weight is not None:
            found = _with_bm25(found, chunk, data, fusion_weight)
        for name, rows, scores in zip(chunk, found.documents, found.scores, strict=True):
            kept = rows[rows >= 0][: data.predict_depth].tolist()
            yield Ranking(name, [ids[row] for row in kept], scores[: len(kept)].tolist())


def _with_bm25(found: Found, names: list[str], data: RetrievalDataModule, weight: float) -> Found:
    """Fuse as evaluation does. Rows of the matrix are numbers of documents: all are encoded."""
    assert data.bm25 is not None
    index, collection = open_bm25(data.collection, data.bm25), data.collection
    texts = [collection.query(collection.query_index(name)) for name in names]
    hits = list(index.search(texts, data.bm25_depth))
    first = torch.from_numpy(np.concatenate([part.documents for part in hits]))
    first_scores = torch.from_numpy(np.concatenate([part.scores for part in hits]))
    documents, scores = fused(found.documents, found.scores, first, first_scores, weight)
    scores = scores.masked_fill(documents < 0, -torch.inf)
    order = scores.argsort(dim=1, descending=True, stable=True)  # they come in document order
    return Found(documents.gather(1, order), scores.gather(1, order))
