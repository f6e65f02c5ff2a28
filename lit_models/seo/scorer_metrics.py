"""How well a head predicts, from all predictions of a split at once, exact over ranks.

Predictions are gathered, put in the order of the sample ids and measured in float64, so that any
number of devices gives the same number. Shapes: B texts in the batch, P predictions, L labels.
"""

import logging
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torchmetrics import Metric

from lit_models.seo.measures import NAMES, measures

log = logging.getLogger(__name__)


class HeadOutputs(Metric):
    """Predictions and labels of one head over a split, and every measure of them.

    Args:
        kind: of the head.
        label: name of the head in warnings; none says nothing.
    """

    full_state_update = False
    sample_id: list[Tensor]
    prediction: list[Tensor]
    target: list[Tensor]

    def __init__(self, kind: str, label: str | None = None) -> None:
        super().__init__()
        self.kind, self.label = kind, label
        for name in ("sample_id", "prediction", "target"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def set_dtype(self, dst_type: torch.dtype | str) -> "HeadOutputs":
        """Keep float64 whatever the precision of the module."""
        return self

    def update(
        self, prediction: Tensor, target: Tensor, is_labelled: Tensor, batch: dict[str, Any]
    ) -> None:
        """Add a batch: predictions [B, P], labels [B] or [B, L], which of them are there, and
        `sample_id` and `weight` of the batch. A batch without any still adds an empty row set, so
        that a rank which never had one takes part in the gathering."""
        target, is_labelled = target.reshape(len(target), -1), is_labelled.reshape(len(target), -1)
        kept = is_labelled.any(1) & (batch["weight"] > 0)
        self.sample_id.append(batch["sample_id"][kept])
        self.prediction.append(prediction.detach().double()[kept])
        self.target.append(target.double().masked_fill(~is_labelled, torch.nan)[kept])

    def compute(self) -> dict[str, Tensor]:
        """Return each measure, [] float64."""
        order = _joined(self.sample_id).cpu().argsort()
        prediction, target = _joined(self.prediction).cpu(), _joined(self.target).cpu()
        found = measures(self.kind, prediction[order], target[order], self._say)
        return {name: value.to(self.device) for name, value in found.items()}

    def _say(self, name: str, why: str) -> None:
        if self.label is not None:
            _warn(f"{self.label}_{name} is undefined: {why}.")


class Figure(Metric):
    """One measure of a head's outputs, as Lightning logs single numbers."""

    full_state_update = False

    def __init__(self, outputs: HeadOutputs, name: str) -> None:
        super().__init__()
        self._outputs, self._name = [outputs], name  # in a list: it is no part of this metric

    def update(self) -> None:
        """Nothing: the outputs are updated."""

    def compute(self) -> Tensor:
        """Return the measure, [] float64."""
        return self._outputs[0].compute()[self._name]

    def reset(self) -> None:
        """Forget the outputs, too."""
        super().reset()
        for outputs in getattr(self, "_outputs", []):
            outputs.reset()


class HeadMetrics(nn.Module):
    """The measures of one head over a split.

    Args:
        kind: of the head.
        label: how it is called in warnings; none says nothing.
        names: measures that are logged; none is all of the kind.
    """

    def __init__(
        self, kind: str, label: str | None = None, names: tuple[str, ...] | None = None
    ) -> None:
        super().__init__()
        self.outputs = HeadOutputs(kind, label)
        wanted = NAMES[kind] if names is None else names
        self.figures = nn.ModuleDict({name: Figure(self.outputs, name) for name in wanted})

    def update(
        self, prediction: Tensor, target: Tensor, is_labelled: Tensor, batch: dict[str, Any]
    ) -> None:
        """Add a batch, see `HeadOutputs.update`."""
        self.outputs.update(prediction, target, is_labelled, batch)
        for figure in self.figures.values():
            figure.update()


class WeightedLoss(Metric):
    """The sum of the heads' mean losses times their weights, as training adds them up."""

    full_state_update = False
    totals: Tensor
    counts: Tensor

    def __init__(self, weights: dict[str, float]) -> None:
        super().__init__()
        self.weights = weights
        zeros = torch.zeros(len(weights), dtype=torch.float64)
        self.add_state("totals", zeros, dist_reduce_fx="sum")
        self.add_state("counts", zeros.clone(), dist_reduce_fx="sum")

    def set_dtype(self, dst_type: torch.dtype | str) -> "WeightedLoss":
        """Keep float64 whatever the precision of the module."""
        return self

    def update(self, terms: dict[str, Any]) -> None:
        """Add a batch: head -> LossSum, in the order of the weights."""
        self.totals = self.totals + torch.stack([terms[n].total.double() for n in self.weights])
        self.counts = self.counts + torch.stack([terms[n].count.double() for n in self.weights])

    def compute(self) -> Tensor:
        """Return the loss, [] float64; a head without labels adds 0."""
        weights = torch.tensor(list(self.weights.values())).to(self.totals)
        return (weights * self.totals / self.counts.clamp(min=1)).sum()


def _joined(parts: Any) -> Tensor:
    return parts if isinstance(parts, Tensor) else torch.cat(parts)


@rank_zero_only
def _warn(message: str) -> None:
    log.warning(message)
