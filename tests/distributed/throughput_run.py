"""Toy runs of two processes, one after the other, as a script for the test beside it: without
Throughput, with it and a slow rank 1, and sharded.

python -m tests.distributed.throughput_run FOLDER
"""

import json
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from lit_models.errors import run_guarded
from lit_models.training.callbacks import Throughput, default_callbacks
from tests.toy import LitToy, ToyData, toy_trainer

STEPS, NAP_S = 16, 0.15  # long beside what a busy machine adds to a step


class Slow(LitToy):
    """Rank 1 sleeps in each forward pass."""

    nap_s = 0.0

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1:
            time.sleep(self.nap_s)
        return super().training_step(batch, batch_idx)


def train(folder: Path, strategy: str, nap_s: float, own: list[Throughput]) -> None:
    """Train; rank 0 writes how many all-reduces there were, and what was warned of."""
    said, calls, all_reduce = [], [], dist.all_reduce
    warnings.simplefilter("always")
    warnings.showwarning = lambda message, *_: said.append(str(message))

    def counted(*arguments, **options):
        calls.append(arguments)
        return all_reduce(*arguments, **options)

    dist.all_reduce = counted
    callbacks = [c for c in default_callbacks() if not isinstance(c, Throughput)]
    module = Slow()
    module.nap_s = nap_s
    trainer = toy_trainer(
        folder,
        devices=2,
        strategy=strategy,
        max_epochs=-1,
        max_steps=STEPS,
        log_every_n_steps=4,
        limit_val_batches=0,
        callbacks=[callbacks[0], *own, *callbacks[1:]],
    )
    trainer.fit(module, ToyData())
    dist.all_reduce = all_reduce
    if trainer.is_global_zero:
        facts = {"calls": len(calls), "said": [text for text in said if "is slow" in text]}
        (folder / "facts.json").write_text(json.dumps(facts))


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    train(folder / "without", "ddp", 0.0, [])
    train(folder / "slow", "ddp", NAP_S, [Throughput(measures_ceiling=True)])
    train(folder / "fsdp", "fsdp", 0.0, [Throughput(measures_ceiling=True)])


if __name__ == "__main__":
    sys.exit(run_guarded(main))
