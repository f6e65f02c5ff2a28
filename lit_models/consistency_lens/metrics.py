"""How well activations are rebuilt: exact over ranks, with a bootstrap interval.

Shapes: B samples, D features, R replicates.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from datamodules.activations.documents import ALL
from datamodules.core.batches import ActivationBatch
from lit_models.training.dropout import mixed
from lit_models.training.metrics import SumCount

REPLICATES = 500
_POISSON = 2  # key of the bootstrap's draws
_MANTISSA = 24


class Fidelity(NamedTuple):
    """What one sample's rebuilt activation is worth; all [B] float64.

    error, spread: squared distance from the true activation, of the rebuilt one and of the
    training mean. unit_error, unit_spread: the same at length 1, with the training mean of those.
    The others as in `Effect`.
    """

    error: Tensor
    spread: Tensor
    unit_error: Tensor
    unit_spread: Tensor
    nats: Tensor
    following_nats: Tensor
    num_following: Tensor
    next_nats: Tensor


SUMMED = (*Fidelity._fields, "count")
# What is reported of a row. fve: fraction of variance explained; excess: what it is above that of
# the current-token mean; unit_fve: at length 1; kl_recovered, following_recovered: share of the
# nats of the training mean that is saved, at the position and after it; kl_recovered_zero: of
# those of a zero; nats, following_nats, next_nats: means; count: samples.
REPORTED = (
    *("fve", "excess", "unit_fve", "kl_recovered", "following_recovered", "kl_recovered_zero"),
    *("nats", "following_nats", "next_nats", "count"),
)
COMPARED = ("mean", "zero", "token_mean")  # rows that others are reported against


class FidelityTable(Metric):
    """Sums for each row, over all documents and over each file's; and the same over samples drawn
    with replacement in R replicates, from which every value has an interval.

    A document is drawn as a whole, as often as a Poisson variable of mean 1 says that is keyed by
    the document: replicates need no list of samples, and are the same on any devices.

    Args:
        rows: names, those of `COMPARED` among them.
        groups: names of the files; one alone is all documents.
        options: of `Metric`.

    Raises:
        ValueError: two files have one name, or one that means all of them.

    Source: Chamandy et al. 2012, "Estimating uncertainty for massive data streams", section 3.
    """

    full_state_update = False
    sums: Tensor
    replicates: Tensor

    def __init__(self, rows: Sequence[str], groups: Sequence[str], **options: Any) -> None:
        super().__init__(**options)
        self.rows, self.files = list(rows), list(groups) if len(groups) > 1 else []
        self.groups = [ALL, *self.files]
        if len(set(self.groups)) < len(self.groups):
            raise ValueError(
                f"the files of the test part are called {', '.join(self.files)}, and each needs a "
                f'name of its own other than "{ALL}"; dump the activations again, which names them '
                "by their folders, too."
            )
        shape = (len(self.groups), len(self.rows), len(SUMMED))
        empty = torch.zeros(shape, dtype=torch.float64)
        self.add_state("sums", empty, dist_reduce_fx="sum")
        replicates = torch.zeros(REPLICATES, *shape, dtype=torch.float64)
        self.add_state("replicates", replicates, dist_reduce_fx="sum")

    def set_dtype(self, dst_type: torch.dtype | str) -> "FidelityTable":
        """Keep float64 whatever the precision of the module."""
        return self

    def update(self, found: dict[str, Fidelity], batch: ActivationBatch) -> None:
        """Add one batch. Args: found: row -> values of each sample; batch: with weights."""
        one = torch.ones_like(batch["weight"], dtype=torch.float64)
        values = torch.stack([torch.stack([*found[row], one], -1) for row in self.rows], 1)
        member = torch.stack(self.weights(batch), dim=1)  # [B, G]
        draws = poisson(batch["document"]).double()  # [B, R]
        self.sums = self.sums + torch.einsum("bg,bcf->gcf", member, values)
        self.replicates = self.replicates + torch.einsum(
            "brg,bcf->rgcf", draws[:, :, None] * member[:, None], values
        )

    def weights(self, batch: ActivationBatch) -> list[Tensor]:
        """Return for each group the weights [B] float64 of a batch: 0 for what is not of it."""
        weight = batch["weight"].double()
        return [weight, *(weight * (batch["group"] == n) for n in range(len(self.files)))]

    def compute(self) -> Tensor:
        """Return [G, C, K, 3] float64: value, lower and upper end of its 95 % interval of each row
        and value of `REPORTED`; 0 where nothing was counted."""
        ends = torch.tensor([0.025, 0.975], dtype=torch.float64, device=self.sums.device)
        interval = torch.quantile(self._reported(self.replicates), ends, dim=0)
        return torch.stack([self._reported(self.sums), *interval], dim=-1)

    def computed(self) -> dict[str, dict[str, dict[str, float]]]:
        """Return group -> row -> value -> number, with `fve_low` and `fve_high` for the interval
        of `fve` and so on; a collective."""
        values = self.compute().tolist()
        return {
            group: {row: _named(values[g][c]) for c, row in enumerate(self.rows)}
            for g, group in enumerate(self.groups)
        }

    def _reported(self, sums: Tensor) -> Tensor:
        """[..., C, K] from sums [..., C, F]."""
        by_name = dict(zip(SUMMED, sums.unbind(-1), strict=True))
        mean, zero, token = (self.rows.index(name) for name in COMPARED)
        fve = _saved(by_name["error"], by_name["spread"])
        nats, following, count = (by_name[n] for n in ("nats", "following_nats", "count"))
        found = (
            fve,
            fve - fve[..., token, None],
            _saved(by_name["unit_error"], by_name["unit_spread"]),
            _saved(nats, nats[..., mean, None]),
            _saved(following, following[..., mean, None]),
            _saved(nats, nats[..., zero, None]),
            nats / count.clamp(min=1),
            following / by_name["num_following"].clamp(min=1),
            by_name["next_nats"] / count.clamp(min=1),
            count,
        )
        return torch.stack(found, dim=-1)


def _saved(cost: Tensor, base: Tensor) -> Tensor:
    """1 - cost / base; 0 where there is nothing to save."""
    return torch.where(base > 0, 1 - cost / base.clamp(min=1e-300), 0.0)


def _named(values: list[list[float]]) -> dict[str, float]:
    found = {}
    for name, (value, low, high) in zip(REPORTED, values, strict=True):
        found[name] = value
        if name != "count":
            found |= {f"{name}_low": low, f"{name}_high": high}
    return found


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


class Explained(SumCount):
    """Fraction of variance explained: `update(error, spread)` adds squared distances."""

    def compute(self) -> Tensor:
        """Return 1 - error / spread, [] float64; 0 where nothing was counted."""
        return _saved(self.total, self.count)


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
        share = len(keys.unique()) / max(1, len(keys))
        return torch.tensor(share, dtype=torch.float64, device=keys.device)


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


class AttributeRecall(Metric):
    """Share of the known attributes that are named, for each attribute.

    Args:
        num_attributes: A.
    """

    full_state_update = False
    named: Tensor
    known: Tensor

    def __init__(self, num_attributes: int) -> None:
        super().__init__()
        empty = torch.zeros(num_attributes, dtype=torch.float64)
        self.add_state("named", empty, dist_reduce_fx="sum")
        self.add_state("known", empty.clone(), dist_reduce_fx="sum")

    def set_dtype(self, dst_type: torch.dtype | str) -> "AttributeRecall":
        """Keep float64 whatever the precision of the module."""
        return self

    def update(self, attributes: Tensor, token_ids: Tensor, weight: Tensor) -> None:
        """Add a batch.

        Args:
            attributes: [B, A] int64, tokens; -1 = not known.
            token_ids: [B, t] int64, of the texts.
            weight: [B], 0 for what does not count.
        """
        is_known = (attributes >= 0).double() * weight.double()[:, None]
        is_named = (attributes[:, :, None] == token_ids[:, None, :]).any(-1)
        self.named = self.named + (is_named * is_known).sum(0)
        self.known = self.known + is_known.sum(0)

    def compute(self) -> Tensor:
        """Return [1 + A, 2] float64: share and number known, of all attributes, then of each."""
        named, known = (torch.cat([x.sum()[None], x]) for x in (self.named, self.known))
        return torch.stack([named / known.clamp(min=1), known], dim=1)


class SampleErrors(Metric):
    """The error of each sample, wherever it was computed."""

    full_state_update = False
    sample_id: list[Tensor]
    error: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sample_id", [], dist_reduce_fx="cat")
        self.add_state("error", [], dist_reduce_fx="cat")

    def update(self, sample_id: Tensor, error: Tensor, weight: Tensor) -> None:
        """Add a batch. Args: sample_id [B] int64; error [B]; weight [B], 0 = does not count."""
        self.sample_id.append(sample_id[weight > 0])
        self.error.append(error[weight > 0].float())

    def compute(self) -> Tensor:
        """Return the sample ids [N] int64 by rising error; equal errors by id."""
        number, error = dim_zero_cat(self.sample_id), dim_zero_cat(self.error)
        number, order = number.sort()
        return number[error[order].sort(stable=True).indices]
