"""Documents near to a query: exact search, also over those of all ranks, and search of any size.

The latter lets an index of FAISS choose candidates, whose scores are exact. Shapes: Q queries, D
documents, W width of vectors, k documents found of each query, C candidates, L lists, S documents
that the lists' centres are made of.
"""

import hashlib
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
from datamodules.core.store import cache_folder, made_once
from datamodules.search.formats import NO_DOCUMENT
from lit_models.seo.metrics import GatheredRows

log = logging.getLogger(__name__)
DOCUMENTS_AT_ONCE, QUERIES_AT_ONCE = 8_192, 512  # of a search, which bound its memory
NUMBERS_AT_ONCE = 2**18  # of vectors whose scores are taken in float64
SPARE = 32  # documents beyond the k best, whose distance is the proof
LOST = {"none": 2**-24, "ieee": 2**-24, "tf32": 2**-11}  # of a factor, as torch is set
VERSION = 1  # of the index
MOST_EXACT = 1_000_000  # documents that `auto` searches exactly
LISTS_OF_ROOT, SAMPLE_OF_LIST, ROUNDS = 4, 32, 6  # of the lists' centres
ROWS_AT_ONCE = 16_384
SEED = 0  # of the documents that the centres are made of
NUM_ASKED = 256  # queries that recall is measured with
MOST_WORK = 0.25  # of all lists, or of a graph's candidates, 64 documents each: as exact search
DEGREE, WIDTH_OF_MAKING = 32, 80  # of a graph

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
        """Return the k best documents of each query [Q, W], moved first where there is feedback; a
        ValueError where k is below 1, or queries and documents are not of one width."""
        check_range("search", 1, k=k)
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
        if queries.shape[1] != width:
            numbers = f"queries have {queries.shape[1]} numbers and documents {width}"
            raise ValueError(f"{numbers}: encode both by one model, with one model.size.")
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


def gathered(**columns: Tensor) -> SimpleNamespace:
    """Return the rows of all ranks in the order of their `id`; a collective."""
    rows = GatheredRows(*(name for name in columns if name != "id"))  # in one order on all ranks
    rows.update(torch.ones_like(columns["id"], dtype=torch.bool), **columns)
    return rows.take()


class ShardedSearch(ExactSearch):
    """Documents of all ranks, of which each rank holds a part and searches that: what is found is
    what one rank with all of them finds, equal scores included. Found documents have their ids,
    which are given, ascending, for the [D, W] of this rank.
    """

    def __init__(self, ids: Tensor, documents: Tensor) -> None:
        super().__init__(documents, documents.device)
        self.ids, self.all_ids = ids, gathered(id=ids).id  # ascending, too

    def nearest(self, queries: Tensor, k: int) -> Found:
        """Return what `ExactSearch` does, of the documents of all ranks; a collective."""
        k, own = min(k, len(self.all_ids)), super().nearest(queries, k)
        asked = torch.arange(len(queries), device=self.device)
        padding = (0, k - own.scores.shape[1])
        number = F.pad(self.ids[own.documents.to(self.device)], padding, value=NO_DOCUMENT)
        score = F.pad(own.scores.to(self.device), padding, value=-torch.inf)
        ranks = gathered(id=asked, number=number, score=score)  # those of a query stand together
        num_ranks = max(1, len(ranks.id) // max(1, len(queries)))
        shape = (len(queries), num_ranks * k)
        numbers, order = ranks.number.view(shape).sort(dim=1)
        scores = ranks.score.view(shape).gather(1, order)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        return Found(numbers.gather(1, order)[:, :k].cpu(), scores[:, :k].cpu())

    def vectors(self, numbers: Tensor) -> Tensor:
        """Return the vectors [Q, k, W] float64 of documents [Q, k] of all ranks; a collective."""
        flat = numbers.flatten().to(self.device)
        places = torch.isin(flat, self.ids).nonzero()[:, 0]  # each on one rank
        own = self.documents[torch.searchsorted(self.ids, flat[places])]
        rows = gathered(id=places, vector=own).vector
        return rows.view(*numbers.shape, rows.shape[1]).double().cpu()


@dataclass(frozen=True)
class SearchOptions:
    """How documents are found in prediction, on the page and from Python; evaluation is exact.

    Args:
        kind: `exact` reads all documents; `ivf` and `hnsw` let FAISS choose candidates in lists or
            along a graph, whose scores are exact, and may miss some; `auto` is exact up to
            `MOST_EXACT` documents, and above them `ivf` where FAISS is installed.
        recall: share of the documents of the exact search that an index is to find; it takes as
            many lists or steps as a sample of the queries needs for it.
    """

    kind: Literal["exact", "ivf", "hnsw", "auto"] = "exact"
    recall: float = 0.99

    def __post_init__(self) -> None:
        if self.kind in ("ivf", "hnsw"):
            _faiss()
        if not 0 < self.recall <= 1:
            raise ValueError(f"search.recall must be above 0 and at most 1, got {self.recall}.")

    def opened(
        self, exact: ExactSearch, queries: Vectors, k: int, feedback: Feedback | None
    ) -> ExactSearch:
        """Return the search over the documents of an exact one. An index is made in the cache, and
        takes as much work as a sample of the queries [Q, W] needs for k documents; where the exact
        search takes no more, it is that."""
        documents, kind = exact.documents, self.kind
        if kind == "auto":
            kind = "ivf" if len(documents) > MOST_EXACT else "exact"
            try:
                _ = kind == "exact" or _faiss()
            except ValueError as error:
                log.warning("%d documents are searched exactly: %s", len(documents), error)
                kind = "exact"
        if kind == "exact" or not (len(documents) and len(queries)):
            return exact
        found = IndexSearch(documents, kind, exact.device)
        found.tune(queries, k, self.recall, feedback)
        if found.work > MOST_WORK * found.most:
            log.warning("search is exact, since an index would take longer: %s", found.facts)
            return exact
        log.warning("search is approximate: %s", found.facts)
        return found


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ModuleNotFoundError as error:
        raise ValueError(
            "model.search.kind needs FAISS: pip install 'unisono[search]', or take exact."
        ) from error


class IndexSearch(ExactSearch):
    """Documents in lists around centres, or in a graph of neighbours. From the lists next to a
    query, or on its way, FAISS takes k + `SPARE` candidates by their codes of 8 bits a number;
    their scores are those of the exact search. Nothing of it depends on the number of threads, or
    on which queries are asked together.
    """

    facts: dict[str, Any]  # plain values of the index and its recall, once it is tuned

    def __init__(self, documents: Vectors, kind: str, device: torch.device | str = "cpu") -> None:
        single = documents.cpu().numpy() if isinstance(documents, Tensor) else documents
        super().__init__(single, device)
        digest, faiss = hashlib.sha256(np.ascontiguousarray(single).data).hexdigest(), _faiss()
        faiss.omp_set_num_threads(torch.get_num_threads())
        place = cache_folder("nearest", [VERSION, kind, digest, str(single.dtype), *single.shape])
        folder = made_once(place, lambda new: _write(single, kind, new))
        flag = faiss.IO_FLAG_MMAP if kind == "ivf" else faiss.IO_FLAG_MMAP_IFC
        self.kind, path = kind, str(folder / "index.faiss")
        self.index = faiss.read_index(path, flag | faiss.IO_FLAG_READ_ONLY)
        self.most, self.work = 1 + len(single) // 64, 0
        if kind == "ivf":
            self.most = self.index.nlist
            self.lists = ExactSearch(self.index.quantizer.reconstruct_n(0, self.most))

    def tune(self, queries: Vectors, k: int, recall: float, feedback: Feedback | None) -> None:
        """Take as much work as a sample of the queries [Q, W] needs for a recall, the share of k
        found documents whose score is one of the k best of the exact search; keep its `facts`."""
        asked, share = queries[:: math.ceil(len(queries) / NUM_ASKED)], 0.0
        best = ExactSearch(self.documents, self.device).search(asked, k, feedback).scores  # [Q, k]
        self.work = 0
        while share < recall and self.work < self.most:
            self.work = min(self.most, 1 + self.work * 3 // 2)
            scores = self.search(asked, k, feedback).scores[:, : best.shape[1]]
            share = float((scores >= best[:, -1:]).double().mean())
        self.facts = {"kind": self.kind, "documents": len(self.documents), "work": self.work}
        self.facts |= {"most_work": self.most, "k": k, "recall": share, "queries": len(asked)}

    def nearest(self, queries: Tensor, k: int) -> Found:
        """Return the k best candidates of each query [Q, W] float64; -1 = there are fewer."""
        single = queries.float().cpu().numpy()
        if self.kind == "ivf":
            near, self.index.nprobe = self.lists.nearest(queries.cpu(), self.work), self.work
            columns = {"Iq": near.documents.numpy(), "Dq": near.scores.numpy()}
            _, numbers = self.index.search_preassigned(single, k + SPARE, **columns)
        else:
            self.index.hnsw.efSearch = self.work
            _, numbers = self.index.search(single, k + SPARE)
        found = self.scored(queries, torch.from_numpy(numbers).to(self.device).sort(dim=1).values)
        return Found(*(each[:, :k].cpu() for each in found))


def _write(documents: np.ndarray, kind: str, folder: Path) -> None:
    """Write the index of documents: a graph; or lists, by k-means on the sphere over a sample, by
    exact search, then each document in the list of its centre."""
    faiss, (size, width) = _faiss(), documents.shape
    num_lists = min(size, round(LISTS_OF_ROOT * math.sqrt(size)))
    log.warning("search: an index of %d documents is made", size)
    drawn = np.random.default_rng(SEED).choice(size, min(size, SAMPLE_OF_LIST * num_lists), False)
    sample = torch.from_numpy(documents[drawn]).float()  # [S, W] in a random order
    code, metric = faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
    if kind == "ivf":
        centres = sample[:num_lists].clone()
        for _ in range(ROUNDS):
            place = ExactSearch(centres).search(sample, 1).documents[:, 0]
            sums = torch.zeros_like(centres, dtype=torch.float64)
            sums.index_add_(0, place, sample.double())
            is_empty = place.bincount(minlength=num_lists) == 0
            centres = torch.where(is_empty[:, None], centres, F.normalize(sums, dim=1).float())
        quantizer = faiss.IndexFlatIP(width)
        quantizer.add(centres.numpy())
        options = (quantizer, width, num_lists, code, metric, False)
        index = faiss.IndexIVFScalarQuantizer(*options)
    else:
        index = faiss.IndexHNSWSQ(width, code, DEGREE, metric)
        index.hnsw.efConstruction = WIDTH_OF_MAKING
    index.train(sample.numpy())  # the range of each number; the centres are there
    for start in range(0, size, ROWS_AT_ONCE):
        part = on_device(documents[start : start + ROWS_AT_ONCE], "cpu", torch.float32)
        if kind == "ivf":
            place = ExactSearch(centres).search(part, 1).documents[:, 0].contiguous()
            columns = (part.numpy(), np.arange(start, start + len(part)), place.numpy())
            index.add_core(len(part), *map(faiss.swig_ptr, columns))
        else:
            index.add(part.numpy())
    faiss.write_index(index, str(folder / "index.faiss"))
