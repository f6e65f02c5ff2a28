"""The trainer's limits and intervals in global steps, on any number of devices."""

import math
from typing import TYPE_CHECKING

from lightning.pytorch import Trainer

from datamodules.core.batching import Batching

if TYPE_CHECKING:
    from datamodules.core.planned import PlannedDataModule


class RunLimits:
    """The trainer's limits and intervals, which users give in global steps.

    Lightning counts micro-batches of one rank. The values as given are kept here, so that a
    second stage converts them anew instead of converting what is converted.
    """

    _NAMES = (
        "limit_train_batches",
        "limit_val_batches",
        "limit_test_batches",
        "limit_predict_batches",
        "val_check_interval",
    )

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.accumulate_grad_batches = trainer.accumulate_grad_batches
        self.given = {name: getattr(trainer, name) for name in self._NAMES}

    def convert(self, data: "PlannedDataModule") -> None:
        """Set the trainer's limits to micro-batches of this many devices."""
        stages: dict[str, str] = {
            "limit_train_batches": "train",
            "val_check_interval": "train",
            "limit_val_batches": "validation",
            "limit_test_batches": "test",
        }
        for name, stage in stages.items():
            if stage not in data.datasets or self.given[name] in (None, 0, 0.0):
                continue
            if isinstance(self.given[name], float) and self.given[name] == 1.0:
                continue
            is_training = stage == "train"
            batching = data.batching if is_training else data.evaluation_batching
            num_steps = data.plan(stage, 0).num_steps
            setattr(self.trainer, name, self._micro_batches(name, num_steps, batching))
        if isinstance(self.given["limit_predict_batches"], int):
            per_replica = math.ceil(self.given["limit_predict_batches"] / data.num_replicas)
            self.trainer.limit_predict_batches = per_replica

    def needed(self, stage: str) -> float:
        """Return how many micro-batches a loader that begins now is asked for at most."""
        trainer = self.trainer
        name = {"validation": "val"}.get(stage, stage)
        limit = getattr(trainer, f"limit_{name}_batches")
        needed = limit if isinstance(limit, int) else math.inf
        if stage == "validation" and trainer.sanity_checking:
            return min(needed, trainer.num_sanity_val_steps)
        if stage == "train" and trainer.max_steps >= 0:
            steps = trainer.max_steps - trainer.global_step
            return min(needed, steps * trainer.accumulate_grad_batches)
        return needed

    def _micro_batches(self, name: str, num_steps: int, batching: Batching) -> int:
        given = self.given[name]
        steps = given if isinstance(given, int) else max(1, int(num_steps * given))
        return steps * batching.accumulate_grad_batches
