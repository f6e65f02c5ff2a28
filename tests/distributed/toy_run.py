"""One toy run as a script, for the tests beside it: fit, test and predict with a plain Trainer.

python -m tests.distributed.toy_run FOLDER --devices 2 --strategy ddp [--kill_at 9] [--resume]
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lit_models.errors import run_guarded
from lit_models.training import default_callbacks
from lit_models.training.checkpoints import LastCheckpoint
from lit_models.training.strategies import ReplicatedStrategy, replicated
from tests.toy import LitToy, ToyData, toy_trainer


class KilledAt(Callback):
    """SIGKILL to the last rank, as a cluster does it: no handler runs, the others must notice."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


class SignalledAt(Callback):
    """A signal to one rank, while the others are at another place: rank 0 is slower."""

    def __init__(self, step: int, signal_name: str, rank: int) -> None:
        self.step, self.signum, self.rank = step, signal.Signals[signal_name], rank

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_rank == 0:
            time.sleep(0.02)
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.signum)


class FailsAt(Callback):
    """The last rank raises an error, hangs, is stopped or loses a loader worker.

    Where it is to `stall`, all of them hang.
    """

    def __init__(self, step: int, how: str) -> None:
        self.step, self.how = step, how

    def on_train_batch_end(self, trainer, *_):
        is_mine = trainer.global_rank == trainer.world_size - 1 or self.how == "stall"
        if trainer.global_step == self.step and is_mine:
            if self.how == "raise":
                raise LookupError("a word that no dictionary has")
            if self.how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif self.how == "lose a worker":
                multiprocessing.active_children()[0].kill()
            self.hang_for_ever()

    def hang_for_ever(self):
        while True:
            time.sleep(1)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--by_name", action="store_true")
    parser.add_argument("--precision", default="64")
    parser.add_argument("--micro", type=int)
    parser.add_argument("--kill_at", type=int)
    parser.add_argument("--signal_at", type=int)
    parser.add_argument("--signal", default="SIGTERM")
    parser.add_argument("--signal_rank", type=int, default=0)
    parser.add_argument("--fail_at", type=int)
    parser.add_argument("--fail_how", choices=["raise", "hang"])
    parser.add_argument("--timeout_s", type=float)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--fit_only", action="store_true")
    return parser.parse_args()


def callbacks_of(args: argparse.Namespace) -> list[Callback]:
    callbacks = [c for c in default_callbacks() if not isinstance(c, LastCheckpoint)]
    callbacks.append(LastCheckpoint(every_n_steps=4, every_epoch=False))
    if args.kill_at:
        callbacks.append(KilledAt(args.kill_at))
    if args.signal_at:
        callbacks.append(SignalledAt(args.signal_at, args.signal, args.signal_rank))
    if args.fail_at:
        callbacks.append(FailsAt(args.fail_at, args.fail_how))
    return callbacks


def main() -> None:
    args = options()
    torch.set_num_threads(1)
    if args.timeout_s:
        args.strategy = ReplicatedStrategy(timeout=timedelta(seconds=args.timeout_s))
    elif not args.by_name:  # as the command line does; a name is Lightning's own strategy
        args.strategy = replicated(args.strategy) or args.strategy
    trainer = toy_trainer(
        args.folder,
        devices=args.devices,
        strategy=args.strategy,
        precision=args.precision,
        max_epochs=4,
        max_steps=28,
        callbacks=callbacks_of(args),
    )
    last = args.folder / "checkpoints" / "last.ckpt"
    module = LitToy()
    data = ToyData(micro_batch_size=args.micro)
    trainer.fit(module, data, ckpt_path=last if args.resume else None)
    if args.fit_only:
        return
    data = ToyData(micro_batch_size=args.micro, predict_output=str(args.folder / "toy.csv"))
    (result,) = trainer.test(module, data, verbose=False)
    trainer.predict(module, data, return_predictions=False)
    if trainer.is_global_zero:
        (args.folder / "test.json").write_text(json.dumps(result))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(run_guarded(main))
