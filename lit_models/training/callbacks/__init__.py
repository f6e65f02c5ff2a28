"""Callbacks: cross-cutting work, one per file."""

from lightning.pytorch import Callback

from lit_models.training.callbacks.averaged_weights import AveragedWeights
from lit_models.training.callbacks.best_checkpoint import BestCheckpoint
from lit_models.training.callbacks.bitwise import BitwiseSum
from lit_models.training.callbacks.error_table import ErrorTable
from lit_models.training.callbacks.exact_dropout import ExactDropout
from lit_models.training.callbacks.failure import FailureReport
from lit_models.training.callbacks.last_checkpoint import LastCheckpoint
from lit_models.training.callbacks.ledger import Ledger
from lit_models.training.callbacks.non_finite import NonFinite
from lit_models.training.callbacks.predictions import PredictionWriter
from lit_models.training.callbacks.preemption import Preemption
from lit_models.training.callbacks.rehearsal import Rehearsal
from lit_models.training.callbacks.throughput import Throughput
