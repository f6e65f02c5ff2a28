"""Search of any size: FAISS chooses candidates from an inverted file, whose scores are exact.

Shapes: as in `search.py`; L lists, S documents that the lists' centres are made of.
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
from lit_models.seo.search import SPARE, ExactSearch, Found, Vectors, on_device

log = logging.getLogger(__name__)
VERSION = 1  # of the index
INDEX = "index.faiss"
MOST_EXACT = 1_000_000  # documents that `auto` searches exactly
LISTS_OF_ROOT, SAMPLE_OF_LIST, ROUNDS = 4, 40, 10  # of the lists' centres
ROWS_AT_ONCE = 65_536
SEED = 0  # of the documents that the centres are made of
NUM_ASKED = 256  # queries that recall is measured with


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
        if not 0 < self.recall <= 1:
            raise ValueError(f"search.recall must be above 0 and at most 1, got {self.recall}.")

    def check(self) -> None:
        """Raise ValueError where FAISS is needed and not installed."""
        if self.kind == "ivf":
            _faiss()

    def opened(
        self, documents: Vectors, queries: Vectors, k: int, device: torch.device | str = "cpu"
    ) -> ExactSearch:
        """Return the search over encoded documents, of which `ivf` makes an index in the cache.

        Args:
            documents: [D, W] float32.
            queries: [Q, W], of which a sample decides how many lists are read.
            k: documents of each query.
        """
        is_ivf = self.kind == "ivf"
        if self.kind == "auto" and len(documents) > MOST_EXACT:
            try:
                is_ivf = _faiss() is not None
            except ValueError as error:
                log.warning("%d documents are searched exactly: %s", len(documents), error)
        if not (is_ivf and len(documents) and len(queries)):
            return ExactSearch(documents, device)
        found = IvfSearch(documents, device)
        found.tune(queries, k, self.recall)
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

    Attributes:
        facts: plain values of the index and its recall.
    """

    def __init__(self, documents: Vectors, device: torch.device | str = "cpu") -> None:
        super().__init__(np.asarray(documents), device)
        faiss, facts = _faiss(), [VERSION, _digest(self.documents), *documents.shape]
        folder = made_once(cache_folder("nearest", facts), lambda new: _write(self.documents, new))
        flags = faiss.IO_FLAG_MMAP | faiss.IO_FLAG_READ_ONLY
        self.index = faiss.read_index(str(folder / INDEX), flags)
        self.lists = ExactSearch(self.index.quantizer.reconstruct_n(0, self.index.nlist))

    def tune(self, queries: Vectors, k: int, recall: float) -> None:
        """Read as many lists as a sample of the queries needs, and say what it then finds.

        Args:
            queries: [Q, W]; k: documents of each.
            recall: share of found documents whose score is one of the k best of the exact search.
        """
        asked = on_device(
            queries[:: math.ceil(len(queries) / NUM_ASKED)], self.device, torch.float64
        )
        best = super().nearest(asked, k).scores  # [Q, k]
        share, probes, num_lists = 0.0, 1, self.index.nlist
        while True:
            self.index.nprobe = min(probes, num_lists)
            scores = self.nearest(asked, k).scores[:, : best.shape[1]]
            share = float((scores >= best[:, -1:]).double().mean())
            if share >= recall or probes >= num_lists:
                break
            probes += max(1, probes // 2)
        self.facts = {
            "kind": "ivf",
            "documents": len(self.documents),
            "lists": num_lists,
            "lists_read": self.index.nprobe,
            "k": k,
            "recall": share,
            "queries_measured": len(asked),
        }
        log.info(
            "search is approximate: recall@%d %.4f of the exact search over %d queries, reading "
            "%d of %d lists of %d documents",
            *(k, share, len(asked), self.index.nprobe, num_lists, len(self.documents)),
        )

    def nearest(self, queries: Tensor, k: int) -> Found:
        """Return the k best candidates of each query [Q, W] float64; -1 = there are fewer."""
        near = self.lists.nearest(queries.cpu(), self.index.nprobe)
        options = {"Iq": near.documents.numpy(), "Dq": near.scores.numpy()}
        single = queries.float().cpu().numpy()
        numbers = self.index.search_preassigned(single, k + SPARE, **options)[1]
        candidates = torch.from_numpy(numbers).to(queries.device).sort(dim=1).values
        found = self.scored(queries, candidates)
        return Found(found.documents[:, :k].cpu(), found.scores[:, :k].cpu())


def _digest(documents: np.ndarray) -> str:
    content = hashlib.sha256(documents.dtype.str.encode())
    for start in range(0, len(documents), ROWS_AT_ONCE):
        content.update(np.ascontiguousarray(documents[start : start + ROWS_AT_ONCE]))
    return content.hexdigest()


def _write(documents: np.ndarray, folder: Path) -> None:
    """Write the index of documents: k-means on the sphere over a sample, by exact search, then
    each document in the list of its centre."""
    faiss, (size, width) = _faiss(), documents.shape
    num_lists = min(size, round(LISTS_OF_ROOT * math.sqrt(size)))
    log.info("an index of %d lists is made for %d documents", num_lists, size)
    drawn = np.random.default_rng(SEED).choice(size, min(size, SAMPLE_OF_LIST * num_lists), False)
    sample = torch.from_numpy(documents[drawn]).float()  # [S, W] in a random order
    centres = sample[:num_lists].clone()
    for _ in range(ROUNDS):
        place = _centre_of(sample, centres)
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
        if len(wrong := (~part.isfinite()).any(1).nonzero()):
            raise ValueError(
                f"document {start + int(wrong[0])} has a vector with what is no number, and so no "
                "list; take search.kind exact, or encode it anew."
            )
        place = _centre_of(part, centres).numpy()
        rows, numbers = part.numpy(), np.arange(start, start + len(part))
        index.add_core(len(rows), *(faiss.swig_ptr(each) for each in (rows, numbers, place)))
    faiss.write_index(index, str(folder / INDEX))


def _centre_of(vectors: Tensor, centres: Tensor) -> Tensor:
    return ExactSearch(centres).search(vectors, 1).documents[:, 0].contiguous()
