"""Search of any size: FAISS chooses candidates from an inverted file, whose scores are exact.

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
MOST_READ = 0.25  # of the lists, which take as long as exact search


@dataclass(frozen=True)
class SearchOptions:
    """How documents are found in prediction, on the page and from Python; evaluation is exact.

    Args:
        kind: `exact` reads all documents; `ivf` lets FAISS choose candidates, whose scores are
            exact, and may miss some; `auto` is exact up to `MOST_EXACT` documents, and above them
            `ivf` where FAISS is installed.
        recall: share of the documents of the exact search that `ivf` is to find; it reads as many
            lists as a sample of the queries needs for it.
    """

    kind: Literal["exact", "ivf", "auto"] = "exact"
    recall: float = 0.99

    def __post_init__(self) -> None:
        if self.kind == "ivf":
            _faiss()
        if not 0 < self.recall <= 1:
            raise ValueError(f"search.recall must be above 0 and at most 1, got {self.recall}.")

    def opened(
        self, documents: Vectors, queries: Vectors, k: int, device: Any, feedback: Feedback | None
    ) -> ExactSearch:
        """Return the search over documents [D, W]. `ivf` makes an index in the cache, and reads as
        many lists as a sample of the queries [Q, W] needs for k documents; the exact search is no
        slower where that is more than a quarter of them."""
        exact, is_ivf = ExactSearch(documents, device), self.kind == "ivf"
        if self.kind == "auto" and len(documents) > MOST_EXACT:
            try:
                is_ivf = _faiss() is not None
            except ValueError as error:
                log.warning("%d documents are searched exactly: %s", len(documents), error)
        if not (is_ivf and len(documents) and len(queries)):
            return exact
        found = IvfSearch(documents, device)
        found.tune(queries, k, self.recall, feedback)
        if found.index.nprobe > MOST_READ * found.index.nlist:
            log.warning("so many lists take longer than exact search, which is taken.")
            return exact
        return found


def _faiss() -> Any:
    try:
        return importlib.import_module("faiss")
    except ModuleNotFoundError as error:
        raise ValueError(
            "model.search.kind ivf needs FAISS: pip install 'unisono[search]', or take exact."
        ) from error


class IvfSearch(ExactSearch):
    """Documents in lists around centres. Of the lists next to a query, FAISS takes k + `SPARE`
    candidates by their codes of 8 bits a number; their scores are those of the exact search.
    Nothing of it depends on the number of threads, or on which queries are asked together.
    """

    facts: dict[str, Any]  # plain values of the index and its recall, once it is tuned

    def __init__(self, documents: Vectors, device: torch.device | str = "cpu") -> None:
        single = documents.cpu().numpy() if isinstance(documents, Tensor) else documents
        super().__init__(single, device)
        digest, faiss = hashlib.sha256(np.ascontiguousarray(single).data).hexdigest(), _faiss()
        faiss.omp_set_num_threads(torch.get_num_threads())
        place = cache_folder("nearest", [VERSION, digest, str(single.dtype), *single.shape])
        folder = made_once(place, lambda new: _write(single, new))
        flags = faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY
        self.index = faiss.read_index(str(folder / "index.faiss"), flags)
        self.lists = ExactSearch(self.index.quantizer.reconstruct_n(0, self.index.nlist))

    def tune(self, queries: Vectors, k: int, recall: float, feedback: Feedback | None) -> None:
        """Read as many lists as a sample of the queries [Q, W] needs, and say what it then finds.

        Args:
            recall: share of k found documents whose score is one of the k best of the exact search.
        """
        asked, num_lists = queries[:: math.ceil(len(queries) / NUM_ASKED)], self.index.nlist
        best = ExactSearch(self.documents, self.device).search(asked, k, feedback).scores  # [Q, k]
        self.index.nprobe, share = 0, 0.0
        while share < recall and self.index.nprobe < num_lists:
            self.index.nprobe = min(num_lists, 1 + self.index.nprobe * 3 // 2)
            scores = self.search(asked, k, feedback).scores[:, : best.shape[1]]
            share = float((scores >= best[:, -1:]).double().mean())
        self.facts = {"kind": "ivf", "documents": len(self.documents), "lists": num_lists}
        self.facts |= {"lists_read": self.index.nprobe, "k": k, "recall": share}
        log.warning("search is approximate, measured with %d queries: %s", len(asked), self.facts)

    def nearest(self, queries: Tensor, k: int) -> Found:
        """Return the k best candidates of each query [Q, W] float64; -1 = there are fewer."""
        near = self.lists.nearest(queries.cpu(), self.index.nprobe)
        options = {"Iq": near.documents.numpy(), "Dq": near.scores.numpy()}
        single = queries.float().cpu().numpy()
        _, numbers = self.index.search_preassigned(single, k + SPARE, **options)
        found = self.scored(queries, torch.from_numpy(numbers).to(self.device).sort(dim=1).values)
        return Found(*(each[:, :k].cpu() for each in found))


def _write(documents: np.ndarray, folder: Path) -> None:
    """Write the index of documents: k-means on the sphere over a sample, by exact search, then
    each document in the list of its centre."""
    faiss, (size, width) = _faiss(), documents.shape
    num_lists = min(size, round(LISTS_OF_ROOT * math.sqrt(size)))
    log.warning("search: an index of %d lists is made of %d documents", num_lists, size)
    drawn = np.random.default_rng(SEED).choice(size, min(size, SAMPLE_OF_LIST * num_lists), False)
    sample = torch.from_numpy(documents[drawn]).float()  # [S, W] in a random order
    centres = sample[:num_lists].clone()
    for _ in range(ROUNDS):
        place = ExactSearch(centres).search(sample, 1).documents[:, 0]
        sums = torch.zeros_like(centres, dtype=torch.float64).index_add_(0, place, sample.double())
        is_empty = place.bincount(minlength=num_lists) == 0
        centres = torch.where(is_empty[:, None], centres, F.normalize(sums, dim=1).float())
    quantizer, code = faiss.IndexFlatIP(width), faiss.ScalarQuantizer.QT_8bit
    quantizer.add(centres.numpy())
    metric = faiss.METRIC_INNER_PRODUCT
    index = faiss.IndexIVFScalarQuantizer(quantizer, width, num_lists, code, metric, False)
    index.train(sample.numpy())  # the range of each number; the centres are there
    for start in range(0, size, ROWS_AT_ONCE):
        part = on_device(documents[start : start + ROWS_AT_ONCE], "cpu", torch.float32)
        place = ExactSearch(centres).search(part, 1).documents[:, 0].contiguous()
        columns = (part.numpy(), np.arange(start, start + len(part)), place.numpy())
        index.add_core(len(part), *map(faiss.swig_ptr, columns))
    faiss.write_index(index, str(folder / "index.faiss"))
