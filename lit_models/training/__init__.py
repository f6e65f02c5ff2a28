"""Shared by all families; `status(trainer)` says what runs where."""

from collections.abc import Callable
from typing import Any

from lit_models import late_names

__all__ = ["AveragedWeights", "ExactModule", "LossSum", "NonFinite", "default_callbacks", "status"]

_HOME = {
    "AveragedWeights": "lit_models.training.optim",
    "ExactModule": "lit_models.training.exact",
    "LossSum": "lit_models.training.metrics",
    "NonFinite": "lit_models.training.faults",
    "default_callbacks": "lit_models.training.callbacks",
    "status": "lit_models.training.run_facts",
}
__getattr__: Callable[[str], Any] = late_names(__name__, _HOME)
