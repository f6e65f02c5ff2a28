"""Nearest documents: exact search, also over the documents of all ranks, and approximate search.

Approximate search scores the candidates of a FAISS index exactly. Shapes: Q queries, D documents,
W width of vectors, k documents found per query, C candidates, L lists, S documents in the sample
for the lists' centres.
"""

import importlib
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.core.plan import check_range
from datamodules.core.store import array_digest, cache_folder, made_once
from datamodules.search.formats import NO_DOCUMENT
from lit_models.seo.metrics import GatheredRows

log = logging.getLogger(__name__)
DOCUMENTS_AT_ONCE, QUERIES_AT_ONCE = 8_192, 512  # per chunk of a search, to bound its memory
NUMBERS_AT_ONCE = 2**18  # components of vectors per chunk of float64 scores
SPARE = 32  # candidates beyond the k best; their lower scores prove that none is missed
LOST = {"none": 2**-24, "ieee": 2**-24, "tf32": 2**-11}  # PyTorch's precision -> rounding error
VERSION = 1  # of the index
LISTS_OF_ROOT, SAMPLE_OF_LIST, ROUNDS = 4, 32, 6  # lists / sqrt(D), sample per list, k-means rounds
ROWS_AT_ONCE = 16_384
SEED = 0  # of the sample for the centres
NUM_TUNED = 256  # queries to measure recall with
MOST_WORK = 0.25  # share of lists as slow as exact search

Vectors: TypeAlias = Tensor | np.ndarray


@dataclass(frozen=True)
class Feedback:
    """Pseudo-relevance feedback: moves a query towards the best documents of a first search.

    Args:
        documents: number of best documents in the first search.
        weight: of their mean; the query has weight 1.
        temperature: of the softmax over their scores; at low values only the best documents count.

    Source of the idea: Rocchio 1971, "Relevance feedback in information retrieval".
    """

    documents: int = 5
    weight: float = 0.6
    temperature: float = 0.1


class Found(NamedTuple):
    """The best documents of each query, best first; ties in the order of documents.

    Args:
        documents: [Q, k] int64, rows of the searched matrix, padded with -1.
        scores: [Q, k] float32, padded with -inf.
    """

    documents: Tensor
    scores: Tensor


class ExactSearch:
    """Exact search by inner product over encoded documents [D, W] on a device; a memory-mapped
    matrix is read in chunks."""

    def __init__(self, documents: Vectors, device: torch.device | str = "cpu") -> None:
        self.documents, self.device = documents, device

    def search(self, queries: Vectors, k: int, feedback: Feedback | None = None) -> Found:
        """Return the k best documents of each query [Q, W], after moving queries by `feedback`.
        ValueError if k is below 1, or queries and documents differ in width."""
        check_range("search", 1, k=k)
        exact = on_device(queries, self.device, torch.float64)
        if feedback is not None:  # unit vectors [Q, W] moved towards the documents they find
            first = self.nearest(exact, feedback.documents)
            shares = (first.scores.double() / feedback.temperature).softmax(1)  # [Q, k]
            mean = (shares[..., None] * self.vectors(first.documents)).sum(1)
            exact = F.normalize(exact.cpu() + feedback.weight * mean, dim=-1).to(self.device)
        return self.nearest(exact, k)

    def vectors(self, numbers: Tensor) -> Tensor:
        """Return the vectors [Q, k, W] float64 of documents [Q, k], on the CPU."""
        return on_device(self.documents[numbers.numpy()], "cpu", torch.float64)

    def scored(self, queries: Tensor, numbers: Tensor) -> Found:
        """Return candidates [Q, C] sorted by their scores for queries [Q, W]. Each pair's score is
        computed separately in float64 and rounded to float32, so that its bits depend only on the
        pair. Args: numbers: candidates in ascending order, -1 = no candidate."""
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

        The result does not depend on the size of chunks, and equal documents have equal scores, see
        `scored`. Float32 matrix products choose the candidates; by the bound of their error (N.
        Higham, Accuracy and Stability of Numerical Algorithms, 3.1), no other document can be among
        the best. Queries for which the bound does not prove this are searched again in float64.
        """
        (num_documents, width), most = self.documents.shape, k + min(SPARE, 7 * k)
        if queries.shape[1] != width:
            numbers = f"queries have {queries.shape[1]} numbers and documents {width}"
            raise ValueError(f"{numbers}: encode both by one model, with one model.size.")
        with torch.autocast(queries.device.type, enabled=False):
            near, longest = _nearest(queries.float(), self.documents, most)
        numbers = near.documents.sort(dim=1).values[:, max(0, most - num_documents) :]
        best = Found(*(each[:, :k] for each in self.scored(queries, numbers)))
        backend = torch.backends.cuda if queries.is_cuda else torch.backends.mkldnn
        rounding = LOST.get(backend.matmul.fp32_precision, 2**-8)  # else bfloat16's
        share = 2 * rounding + rounding**2 + (width + 8) * 2**-23
        # The last term covers underflow; after an overflow the sum is not finite.
        error = share * (queries.float().norm(dim=1) * longest) + width * 2**-125
        is_open = ~((near.scores[:, -1] + error)[:, None] < best.scores).all(1)
        if is_open.any():
            near, _ = _nearest(queries[is_open], self.documents, min(most, num_documents))
            again = self.scored(queries[is_open], near.documents.sort(dim=1).values)
            best.documents[is_open], best.scores[is_open] = (each[:, :k] for each in again)
        return Found(*(each.cpu() for each in best))


def _nearest(queries: Tensor, documents: Vectors, k: int) -> tuple[Found, Tensor]:
    """Return the best documents by matrix products in the queries' dtype, ties in the order of
    documents, and the largest norm of a document."""
    device = queries.device
    best = Found(
        torch.full((len(queries), k), NO_DOCUMENT, device=device),
        torch.full((len(queries), k), -torch.inf, dtype=torch.float32, device=device),
    )
    longest, at_once = queries.new_zeros(()), max(DOCUMENTS_AT_ONCE, k)
    for start in range(0, documents.shape[0], at_once):
        part = on_device(documents[start : start + at_once], device, queries.dtype)
        longest = torch.maximum(longest, part.norm(dim=1).max())
        for first in range(0, len(queries), QUERIES_AT_ONCE):
            rows = slice(first, first + QUERIES_AT_ONCE)
            scores = (queries[rows] @ part.T).float()
            limit = best.scores[rows, -1:]
            if start == 0:
                limit = scores.topk(min(k, len(part))).values[:, -1:].nextafter(limit)
            row, column = (~(scores <= limit)).nonzero(as_tuple=True)
            starts = torch.searchsorted(row, torch.arange(len(scores) + 1, device=device))
            place = k + torch.arange(len(row), device=device) - starts[row]
            values = scores.new_full((len(scores), k + int(starts.diff().max())), -torch.inf)
            numbers = torch.full_like(values, NO_DOCUMENT, dtype=torch.int64)
            # Documents of earlier chunks come first, and so win ties.
            values[:, :k], numbers[:, :k] = best.scores[rows], best.documents[rows]
            values[row, place], numbers[row, place] = scores[row, column], column + start
            values, order = values.sort(dim=1, descending=True, stable=True)
            best.scores[rows] = values[:, :k]
            best.documents[rows] = numbers.gather(1, order[:, :k])
    return best, longest


def on_device(values: Vectors, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    """Return an array or a tensor as a tensor of this dtype on the device."""
    if isinstance(values, np.ndarray):
        # Copies a read-only memory map, of which PyTorch would warn.
        values = torch.from_numpy(np.require(values, requirements="W"))
    return values.to(device, dtype)


def gathered(**columns: Tensor) -> SimpleNamespace:
    """Return the rows of all ranks in the order of their `id`; a collective."""
    rows = GatheredRows(*(name for name in columns if name != "id"))  # same order on all ranks
    rows.update(torch.ones_like(columns["id"], dtype=torch.bool), **columns)
    return rows.take()


class ShardedSearch(ExactSearch):
    """Exact search over the documents of all ranks: each rank searches its part, and the result is
    the same as on one rank with all documents, including ties. Found documents are named by `ids`,
    ascending ids of this rank's documents [D, W].
    """

    def __init__(self, ids: Tensor, documents: Tensor) -> None:
        super().__init__(documents, documents.device)
        self.ids, self.all_ids = ids, gathered(id=ids).id  # ascending, too

    def nearest(self, queries: Tensor, k: int) -> Found:
        """Return the result of `ExactSearch.nearest` over all ranks' documents; a collective."""
        k, own = min(k, len(self.all_ids)), super().nearest(queries, k)
        query = torch.arange(len(queries), device=self.device)
        padding = (0, k - own.scores.shape[1])
        number = F.pad(self.ids[own.documents.to(self.device)], padding, value=NO_DOCUMENT)
        score = F.pad(own.scores.to(self.device), padding, value=-torch.inf)
        ranks = gathered(id=query, number=number, score=score)  # rows of a query are adjacent
        num_ranks = max(1, len(ranks.id) // max(1, len(queries)))
        shape = (len(queries), num_ranks * k)
        numbers, order = ranks.number.view(shape).sort(dim=1)
        scores = ranks.score.view(shape).gather(1, order)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        return Found(numbers.gather(1, order)[:, :k].cpu(), scores[:, :k].cpu())

    def vectors(self, numbers: Tensor) -> Tensor:
        """Return the vectors [Q, k, W] float64 of documents [Q, k] of all ranks; a collective."""
        flat = numbers.flatten().to(self.device)
        places = torch.isin(flat, self.ids).nonzero()[:, 0]  # each place on exactly one rank
        own = self.documents[torch.searchsorted(self.ids, flat[places])]
        rows = gathered(id=places, vector=own).vector
        return rows.view(*numbers.shape, rows.shape[1]).double().cpu()


@dataclass(frozen=True)
class SearchOptions:
    """Search in prediction, on the page and from Python; evaluation is always exact.

    Args:
        kind: `exact` reads all documents; `ivf` scores candidates of a FAISS index exactly, but may
            miss documents.
        recall: share of the exact search's documents that an index must find; the number of lists
            is tuned on a sample of the queries.
    """

    kind: Literal["exact", "ivf"] = "exact"
    recall: float = 0.99

    def __post_init__(self) -> None:
        if self.kind != "exact":
            _faiss()
        if not 0 < self.recall <= 1:
            raise ValueError(f"search.recall must be above 0 and at most 1, got {self.recall}.")

    def opened(
        self, exact: ExactSearch, queries: Vectors, k: int, feedback: Feedback | None
    ) -> ExactSearch:
        """Return a search over the documents of an exact search. An index is built in the cache and
        tuned on a sample of the queries [Q, W] for k documents; if it would take longer than the
        exact search, that is returned."""
        if self.kind == "exact" or not (len(exact.documents) and len(queries)):
            return exact
        index = IndexSearch(exact.documents, exact.device)
        index.tune(queries, k, self.recall, feedback)
        if index.work > MOST_WORK * index.most:
            log.warning("search is exact, since an index would take longer: %s", index.facts)
            return exact
        log.warning("search is approximate: %s", index.facts)
        return index


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ModuleNotFoundError as error:
        raise ValueError(
            "model.search.kind needs FAISS: pip install 'unisono[search]', or take exact."
        ) from error


class IndexSearch(ExactSearch):
    """Approximate search over lists around centres.

    FAISS takes k + `SPARE` candidates by 8-bit codes, which `scored` then scores exactly. Results
    do not depend on the number of threads or on the other queries of a batch.
    """

    facts: dict[str, Any]  # plain values of the index and its recall, once it is tuned

    def __init__(self, documents: Vectors, device: torch.device | str = "cpu") -> None:
        single = documents.cpu().numpy() if isinstance(documents, Tensor) else documents
        super().__init__(single, device)
        digest, faiss = array_digest(single), _faiss()
        faiss.omp_set_num_threads(torch.get_num_threads())
        place = cache_folder("nearest", [VERSION, "ivf", digest, str(single.dtype), *single.shape])
        path = made_once(place, lambda folder: _write(single, folder)) / "index.faiss"
        self.index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY)
        self.most, self.work = self.index.nlist, 0
        self.lists = ExactSearch(self.index.quantizer.reconstruct_n(0, self.most))

    def tune(self, queries: Vectors, k: int, recall: float, feedback: Feedback | None) -> None:
        """Increase `work`, the number of lists read, until a sample of the queries [Q, W] reaches
        `recall`, the share of k found documents whose scores are among the exact search's k best;
        set `facts`."""
        sample, share = queries[:: math.ceil(len(queries) / NUM_TUNED)], 0.0
        best = ExactSearch(self.documents, self.device).search(sample, k, feedback).scores  # [Q, k]
        self.work = 0
        while share < recall and self.work < self.most:
            self.work = min(self.most, 1 + self.work * 3 // 2)
            scores = self.search(sample, k, feedback).scores[:, : best.shape[1]]
            share = float((scores >= best[:, -1:]).double().mean())
        self.facts = {"kind": "ivf", "documents": len(self.documents), "work": self.work}
        self.facts |= {"most_work": self.most, "k": k, "recall": share, "queries": len(sample)}

    def nearest(self, queries: Tensor, k: int) -> Found:
        """Return the k best candidates of each query [Q, W] float64, padded with -1."""
        near, self.index.nprobe = self.lists.nearest(queries.cpu(), self.work), self.work
        columns = {"Iq": near.documents.numpy(), "Dq": near.scores.numpy()}
        single = queries.float().cpu().numpy()
        _, numbers = self.index.search_preassigned(single, k + SPARE, **columns)
        best = self.scored(queries, torch.from_numpy(numbers).to(self.device).sort(dim=1).values)
        return Found(*(each[:, :k].cpu() for each in best))


def _write(documents: np.ndarray, folder: Path) -> None:
    """Write an index of lists, with centres from spherical k-means on a sample, and each document
    in the list of its nearest centre, both by exact search."""
    faiss, (size, width) = _faiss(), documents.shape
    num_lists = min(size, round(LISTS_OF_ROOT * math.sqrt(size)))
    log.warning("search: an index of %d documents is made", size)
    drawn = np.random.default_rng(SEED).choice(size, min(size, SAMPLE_OF_LIST * num_lists), False)
    sample = torch.from_numpy(documents[drawn]).float()  # [S, W] in random order
    centres = sample[:num_lists].clone()
    for _ in range(ROUNDS):
        place = ExactSearch(centres).search(sample, 1).documents[:, 0]
        sums = torch.zeros_like(centres, dtype=torch.float64)
        sums.index_add_(0, place, sample.double())
        is_empty = place.bincount(minlength=num_lists) == 0
        centres = torch.where(is_empty[:, None], centres, F.normalize(sums, dim=1).float())
    quantizer = faiss.IndexFlatIP(width)
    quantizer.add(centres.numpy())
    code, metric = faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
    index = faiss.IndexIVFScalarQuantizer(quantizer, width, num_lists, code, metric, False)
    index.train(sample.numpy())  # only the range of each component, as the centres exist
    for start in range(0, size, ROWS_AT_ONCE):
        part = on_device(documents[start : start + ROWS_AT_ONCE], "cpu", torch.float32)
        place = ExactSearch(centres).search(part, 1).documents[:, 0].contiguous()
        columns = (part.numpy(), np.arange(start, start + len(part)), place.numpy())
        index.add_core(len(part), *map(faiss.swig_ptr, columns))
    faiss.write_index(index, str(folder / "index.faiss"))
