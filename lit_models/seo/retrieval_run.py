"""The run of a prediction: encoded texts are searched with their queries, in TREC's format."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from datamodules.search.bm25 import Hits, open_bm25
from datamodules.search.datamodule import NUM_FOUND
from datamodules.search.queries import Ranking
from datamodules.search.queries import write_run as write_rankings
from datamodules.search.retrieval import (
    RUN_FILE,
    EncodedCollection,
    RetrievalDataModule,
    TextsDataset,
)
from lit_models.seo.feedback import Feedback, searched
from lit_models.seo.fusion import fused
from lit_models.seo.search import Found

TAG, FOUND_FILE = "unisono", "found.csv"
QUERIES_AT_ONCE = 8192  # each chunk reads the whole matrix once more


def write_run(
    encoded: EncodedCollection,
    data: RetrievalDataModule,
    fusion_weight: float | None,
    device: torch.device,
    feedback: Feedback | None = None,
) -> None:
    """Write the best documents of each query into the folder of encoded texts; where people ask,
    as a table, too.

    Args:
        encoded: of the data's collection.
        data: with the options of the run and of BM25.
        fusion_weight: of BM25; none leaves it out.
        device: where products are computed.
        feedback: how queries are moved before they search.
    """
    rankings = _rankings(encoded, data, fusion_weight, device, feedback)
    best: list[Ranking] = []

    def noted() -> Iterator[Ranking]:
        for ranking in rankings:
            if data.shows_found:
                documents, scores = ranking.documents[:NUM_FOUND], ranking.scores[:NUM_FOUND]
                best.append(Ranking(ranking.query, documents, scores))
            yield ranking

    write_rankings(encoded.folder / RUN_FILE, noted(), TAG)
    if data.shows_found:
        dataset = data.datasets["predict"]
        assert isinstance(dataset, TextsDataset)
        data.write_found(encoded.folder / FOUND_FILE, best, dataset.queries)


def _rankings(
    encoded: EncodedCollection,
    data: RetrievalDataModule,
    fusion_weight: float | None,
    device: torch.device,
    feedback: Feedback | None,
) -> Iterator[Ranking]:
    names = encoded.query_ids
    bm25 = (
        None
        if data.bm25 is None or fusion_weight is None
        else open_bm25(data.collection, data.bm25)
    )
    depth = data.predict_depth if bm25 is None else max(data.predict_depth, data.bm25_depth)
    ids, dataset = encoded.document_ids, data.datasets["predict"]
    assert isinstance(dataset, TextsDataset)
    for start in range(0, len(names), QUERIES_AT_ONCE):
        chunk = names[start : start + QUERIES_AT_ONCE]
        queries = encoded.queries[start : start + QUERIES_AT_ONCE]
        found = searched(np.asarray(queries), encoded.documents, depth, device, feedback)
        if bm25 is not None and fusion_weight is not None:
            texts = [dataset.queries.text(place) for place in range(start, start + len(chunk))]
            found = _with_bm25(found, bm25.search(texts, data.bm25_depth), fusion_weight)
        for name, rows, scores in zip(chunk, found.documents, found.scores, strict=True):
            kept = rows[rows >= 0][: data.predict_depth].tolist()
            yield Ranking(name, [ids[row] for row in kept], scores[: len(kept)].tolist())


def _with_bm25(found: Found, hits: Iterable[Hits], weight: float) -> Found:
    """Fuse as evaluation does. Rows of the matrix are numbers of documents: all are encoded."""
    documents, scores = zip(*hits, strict=True)
    first, first_scores = (torch.from_numpy(np.concatenate(part)) for part in (documents, scores))
    return Found(*fused(found.documents, found.scores, first, first_scores, weight))
