"""The rehearsal of one number of devices in a process of its own.

What an earlier rehearsal leaves behind, in the allocator and in the caches of compiled products,
would count as the program of the next one.
"""

from typing import Any

from lightning.pytorch import LightningModule

from lit_models.forecasting.orders import Order, answer_of
from lit_models.forecasting.probe import Probe, forecast
from lit_models.forecasting.rehearsal import Rehearsed


def rehearsed(order: Order) -> tuple[Rehearsed, str]:
    """Return what a device's part of a step takes on this machine, and what its process said.

    The process has the threads of this one, and no time limit: a step may take minutes.

    Args:
        order: for a number of devices; no strategy, no steps, no folder.

    Raises:
        RanksFailed: the process failed.
        UsageError: a value of the config cannot be written down.
    """
    answer, (said,) = answer_of(order, ranks=1, timeout_s=None)
    return Rehearsed(**answer), said


def rehearse(order: Order, module: LightningModule, data: Any) -> Rehearsed:
    """Rehearse in this process.

    Args:
        order: what `rehearsed` was given.
        module: built from it.
        data: likewise.
    """
    probe = Probe([order.devices], rehearses=True)
    # In the order's folder, which is removed even where this process is killed.
    (world,) = forecast(module, data, order.trainer, probe, order.folder).worlds
    assert world.rehearsed is not None
    return world.rehearsed
