"""Callbacks of a run."""

from lightning.pytorch import Callback

from lit_models.training.bitwise import BitwiseSum
from lit_models.training.callbacks.error_table import ErrorTable
from lit_models.training.callbacks.predictions import PredictionWriter
from lit_models.training.checkpoints import BestCheckpoint, LastCheckpoint
from lit_models.training.dropout import ExactDropout
from lit_models.training.faults import FailureReport, NonFinite, Preemption
from lit_models.training.ledger import Ledger
from lit_models.training.memory import Rehearsal
from lit_models.training.optim import AveragedWeights
from lit_models.training.throughput import Throughput

__all__ = [
    "AveragedWeights",
    "BestCheckpoint",
    "BitwiseSum",
    "ErrorTable",
    "ExactDropout",
    "FailureReport",
    "LastCheckpoint",
    "Ledger",
    "NonFinite",
    "PredictionWriter",
    "Preemption",
    "Rehearsal",
    "Throughput",
    "default_callbacks",
]


def default_callbacks() -> list[Callback]:
    """Return what every run has; one that the user's configuration names replaces its equal."""
    return [
        Ledger(),
        Throughput(),
        NonFinite(),
        Preemption(),
        Rehearsal(),
        FailureReport(),
        LastCheckpoint(),
        BestCheckpoint(),
        PredictionWriter(),
        ErrorTable(),
    ]
