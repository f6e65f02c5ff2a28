"""Exact search over documents that lie on several ranks, each of which searches its own."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.search.formats import NO_DOCUMENT
from lit_models.seo.metrics import GatheredRows
from lit_models.seo.nearest.exact import ExactSearch, Found


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
