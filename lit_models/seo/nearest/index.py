"""Search of any size: an index of FAISS chooses candidates, whose scores are exact.

Shapes: as in `exact.py`; L lists, S documents that the lists' centres are made of.
"""

import hashlib
import importlib
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.core.store import cache_folder, made_once
from lit_models.seo.nearest.exact import SPARE, ExactSearch, Feedback, Found, Vectors, on_device

log = logging.getLogger(__name__)
VERSION = 1  # of the index
MOST_EXACT = 1_000_000  # documents that `auto` searches exactly
LISTS_OF_ROOT, SAMPLE_OF_LIST, ROUNDS = 4, 32, 6  # of the lists' centres
ROWS_AT_ONCE = 16_384
SEED = 0  # of the documents that the centres are made of
NUM_ASKED = 256  # queries that recall is measured with
MOST_WORK = 0.25  # of all lists, or of a graph's candidates, 64 documents each: as exact search
DEGREE, WIDTH_OF_MAKING = 32, 80  # of a graph


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
        self, documents: Vectors, queries: Vectors, k: int, device: Any, feedback: Feedback | None
    ) -> ExactSearch:
        """Return the search over documents [D, W]. An index is made in the cache, and takes as much
        work as a sample of the queries [Q, W] needs for k documents; where the exact search takes
        no more, it is that."""
        exact, kind = ExactSearch(documents, device), self.kind
        if kind == "auto":
            kind = "ivf" if len(documents) > MOST_EXACT else "exact"
            try:
                _ = kind == "exact" or _faiss()
            except ValueError as error:
                log.warning("%d documents are searched exactly: %s", len(documents), error)
                kind = "exact"
        if kind == "exact" or not (len(documents) and len(queries)):
            return exact
        found = IndexSearch(documents, kind, device)
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
        centres = _centres(sample, num_lists)
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


def _centres(sample: Tensor, number: int) -> Tensor:
    centres = sample[:number].clone()
    for _ in range(ROUNDS):
        place = ExactSearch(centres).search(sample, 1).documents[:, 0]
        sums = torch.zeros_like(centres, dtype=torch.float64).index_add_(0, place, sample.double())
        is_empty = place.bincount(minlength=number) == 0
        centres = torch.where(is_empty[:, None], centres, F.normalize(sums, dim=1).float())
    return centres
