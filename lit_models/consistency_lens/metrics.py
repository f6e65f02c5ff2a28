"""How well activations are rebuilt: exact over ranks, with a bootstrap interval.

Shapes: B samples, D features, R replicates.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from datamodules.batches import ActivationBatch
from lit_models.training.keyed_dropout import mixed
from lit_models.training.metrics import SumCount

REPLICATES = 500
ALL = "all"
_POISSON = 2  # key of the bootstrap's draws
_MANTISSA = 24


class Fidelity(NamedTuple):
    """What one sample's rebuilt activation is worth; all [B] float64.

    error, spread: squared distance from the true activation, of the rebuilt one and of the
    training mean. unit_error, unit_spread: the same at length 1. nats: KL(true || patched) of the
    subject's next word at the position. following_nats: mean over the positions after it.
    next_nats: nats of the next word by which the patched subject is worse than the true one.
    """

    error: Tensor
    spread: Tensor
    unit_error: Tensor
    unit_spread: Tensor
    nats: Tensor
    following_nats: Tensor
    next_nats: Tensor


# What `FidelitySums` computes: fraction of variance explained, its 95 % interval, the fraction at
# length 1, means of the nats, and the number of samples.
REPORTED = ("fve", "low", "high", "unit_fve", *Fidelity._fields[4:], "count")


class FidelitySums(Metric):
    """Sums over samples, and over samples drawn with replacement in R replicates.

    A document is drawn as a whole, as often as a Poisson variable of mean 1 says that is keyed by
    the document: replicates need no list of samples, and are the same on any devices.

    Source: Chamandy et al. 2012, "Estimating uncertainty for massive data streams", section 3.
    """

    full_state_update = False
    sums: Tensor
    replicates: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        width = len(Fidelity._fields)
        self.add_state("sums", torch.zeros(width, dtype=torch.float64), dist_reduce_fx="sum")
        replicates = torch.zeros(REPLICATES, width, dtype=torch.float64)
        self.add_state("replicates", replicates, dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def set_dtype(self, dst_type: torch.dtype | str) -> "FidelitySums":
        """Keep float64 whatever the precision of the module."""
        return self

    def update(self, found: Fidelity, document: Tensor, weight: Tensor) -> None:
        """Add one batch.

        Args:
            found: of each sample.
            document: [B] int64, key of its document.
            weight: [B], 0 for samples that do not count.
        """
        values = torch.stack([value.double() for value in found], dim=1) * weight[:, None]
        self.sums = self.sums + values.sum(0)
        self.replicates = self.replicates + poisson(document).T.double() @ values
        self.count = self.count + weight.double().sum()

    def compute(self) -> Tensor:
        """Return the values of `REPORTED`, float64; 0 where nothing was counted."""
        ends = torch.tensor([0.025, 0.975], dtype=torch.float64, device=self.sums.device)
        means = self.sums / self.count.clamp(min=1)
        return torch.cat(
            [
                _explained(self.sums, False)[None],
                torch.quantile(_explained(self.replicates, False), ends),
                _explained(self.sums, True)[None],
                means[4:],
                self.count[None],
            ]
        )


def _explained(sums: Tensor, unit: bool) -> Tensor:
    error, spread = (sums[..., 2 * unit + i] for i in (0, 1))
    return torch.where(spread > 0, 1 - error / spread.clamp(min=1e-300), 0.0)


def poisson(key: Tensor) -> Tensor:
    """Return [B, R] int64 draws of a Poisson variable of mean 1, keyed by `key` [B] int64."""
    replicate = torch.arange(REPLICATES, device=key.device)
    bits = mixed(mixed(key, _POISSON)[:, None], replicate) & ((1 << _MANTISSA) - 1)
    uniform = (bits.double() + 0.5) / (1 << _MANTISSA)
    total = term = torch.exp(torch.tensor(-1.0, dtype=torch.float64, device=key.device))
    bounds = []
    for number in range(1, 12):  # P(more than 11) is below 1e-9
        bounds.append(total)
        term = term / number
        total = total + term
    return torch.searchsorted(torch.stack(bounds), uniform)


class FidelityTable(nn.ModuleDict):
    """Sums for each row of the table, over all documents and over each file's.

    Args:
        rows: names.
        groups: names of the files; one alone is all documents.
    """

    def __init__(self, rows: Sequence[str], groups: Sequence[str]) -> None:
        self.groups = list(groups) if len(groups) > 1 else []
        names = [ALL, *self.groups]
        super().__init__({n: nn.ModuleDict({r: FidelitySums() for r in rows}) for n in names})

    def add(self, row: str, found: Fidelity, batch: ActivationBatch) -> None:
        """Add a batch to a row."""
        document, weight = batch["document"], batch["weight"]
        self[ALL][row].update(found, document, weight)
        for number, group in enumerate(self.groups):
            self[group][row].update(found, document, weight * (batch["group"] == number))

    def computed(self) -> dict[str, dict[str, Tensor]]:
        """Return group -> row -> values of `REPORTED`; a collective."""
        return {g: {r: m.compute() for r, m in rows.items()} for g, rows in self.items()}


class Explained(SumCount):
    """Fraction of variance explained: `update(error, spread)` adds squared distances."""

    def compute(self) -> Tensor:
        """Return 1 - error / spread, [] float64."""
        return 1 - super().compute()


class DistinctShare(Metric):
    """Distinct texts among all, as a share."""

    full_state_update = False
    keys: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("keys", [], dist_reduce_fx="cat")

    def update(self, token_ids: Tensor, weight: Tensor) -> None:
        """Add a batch. Args: token_ids [B, t] int64; weight [B], 0 for what does not count."""
        key = torch.zeros_like(token_ids[:, 0])
        for place in range(token_ids.shape[1]):
            key = mixed(key, token_ids[:, place])
        self.keys.append(key[weight > 0])

    def compute(self) -> Tensor:
        """Return the share, [] float64; 0 without any text."""
        keys = dim_zero_cat(self.keys) if len(self.keys) else torch.zeros(0)
        return torch.tensor(len(keys.unique()) / max(1, len(keys)), dtype=torch.float64)


class Settled(Metric):
    """A number that is already that of all ranks, in a form that is logged as it is.

    Args:
        value: equal on every rank.
    """

    full_state_update = False

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value
        self.update()

    def update(self) -> None:
        """Nothing is added."""

    def compute(self) -> Tensor:
        """Return the number, [] float64."""
        return torch.tensor(self.value, dtype=torch.float64)
