"""Training code shared by all families; `status(trainer)` reports what runs where."""

from collections.abc import Callable
from typing import Any

from lit_models import late_names

_HOME = {
    "AveragedWeights": "lit_models.training.optim",
    "BestCheckpoint": "lit_models.training.checkpoints",
    "BitwiseSum": "lit_models.training.bitwise",
    "ExactDropout": "lit_models.training.dropout",
    "ExactModule": "lit_models.training.exact",
    "FailureReport": "lit_models.training.faults",
    "LastCheckpoint": "lit_models.training.checkpoints",
    "Ledger": "lit_models.training.ledger",
    "LossSum": "lit_models.training.metrics",
    "NonFinite": "lit_models.training.faults",
    "Preemption": "lit_models.training.faults",
    "ErrorTable": "lit_models.training.predictions",
    "PredictionWriter": "lit_models.training.predictions",
    "Rehearsal": "lit_models.training.memory",
    "Throughput": "lit_models.training.throughput",
    "status": "lit_models.training.run",
}
__all__ = [*sorted(_HOME), "default_callbacks"]
__getattr__: Callable[[str], Any] = late_names(__name__, _HOME)


def default_callbacks() -> list[Any]:
    """Return the callbacks of every run of the command line; one in the user's configuration
    replaces that of its class. Scripts get only those of `ExactModule.own_callbacks`."""
    names = ["Ledger", "Throughput", "NonFinite", "Preemption", "Rehearsal", "FailureReport"]
    names += ["LastCheckpoint", "BestCheckpoint", "PredictionWriter", "ErrorTable"]
    return [__getattr__(name)() for name in names]
