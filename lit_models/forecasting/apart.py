"""The rehearsal of one number of devices in a process of its own.

What an earlier rehearsal leaves behind, in the allocator and in the caches of compiled products,
would count as the program of the next one.
"""

from typing import Any

from lightning.pytorch import LightningModule

from lit_models.forecasting.orders import Order, answer_of
from lit_models.forecasting.probe import Probe, forecast
from lit_models.forecasting.rehearsal import Rehearsed


def rehearsed(order: Order) -> Rehearsed:
    """Return what a device's part of a step takes on this machine.

    Args:
        order: without a strategy.

    Raises:
        RanksFailed: the process failed; it has the threads and the environment of this one, and
            as much time as it needs.
    """
    return Rehearsed(**answer_of(order, ranks=1, timeout_s=None))


def rehearse(order: Order, module: LightningModule, data: Any) -> Rehearsed:
    """Rehearse in this process.

    Args:
        order: what `rehearsed` was given.
        module: built from it.
        data: likewise.
    """
    (world,) = forecast(module, data, order.trainer, Probe([order.devices], True)).worlds
    assert world.rehearsed is not None
    return world.rehearsed
