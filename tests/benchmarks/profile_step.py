"""What the training steps of a config compute: operators by their share of the time.

python -m tests.benchmarks.profile_step seo/retriever_demo.yaml consistency_lens/debug.yaml

It trains as `tests.benchmarks.test_family_steps` does, and prints a table for each config. An
operator counts for what it does by itself, without those that it calls. What is left is Python,
autograd's engine and the profiler itself, which takes a microsecond or two for each operator: where
operators are small, their share is larger without it. Shares hardly change with other load.
"""

import argparse
import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile

from lit_models.config_files import find_config
from tests.benchmarks.test_family_steps import trained

WARM_UP, STEPS, SHOWN = 16, 32, 10
OPERATOR = re.compile(r"(?!autograd::|torch::autograd::)\w+::\w+")  # as aten::mm


class StepProfile(Callback):
    """Profiles some steps, each from the beginning of its batch to that of the next.

    Attributes:
        shares: operator -> its own part of the wall clock of these steps, the largest first.
    """

    def __init__(self) -> None:
        self.shares: dict[str, float] = {}
        self._profile = profile(activities=[ProfilerActivity.CPU])
        self._step, self._begun = 0, 0.0

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if self._step == WARM_UP:
            self._profile.start()
            self._begun = time.perf_counter()
        elif self._step == WARM_UP + STEPS:
            wall_s = time.perf_counter() - self._begun
            self._profile.stop()
            self.shares = shares_of(self._profile, wall_s)
        self._step += 1


def shares_of(found: profile, wall_s: float) -> dict[str, float]:
    """Return operator -> its own part of the wall clock, the largest first.

    Args:
        found: a profile of what one thread did on a CPU.
        wall_s: of all that was profiled.
    """
    own_s = {
        event.key: event.self_cpu_time_total / 1e6
        for event in found.key_averages()
        if OPERATOR.match(event.key)
    }
    ranked = sorted(own_s.items(), key=lambda item: -item[1])
    return {name: seconds / wall_s for name, seconds in ranked}


def table(shares: dict[str, float]) -> str:
    """Return the largest shares, then the other operators' and what is outside all, as text."""
    largest, others = list(shares.items())[:SHOWN], list(shares.values())[SHOWN:]
    rows = [
        *largest,
        (f"{len(others)} other operators", sum(others)),
        ("outside operators", 1 - sum(shares.values())),
    ]
    return "\n".join(f"{share:6.1%}  {name}" for name, share in rows)


def profiled(config: str) -> dict[str, float]:
    """Return `StepProfile.shares` of a config, with one thread."""
    torch.set_num_threads(1)
    content, found = yaml.safe_load(find_config(config).read_text("utf-8")), StepProfile()
    with TemporaryDirectory() as folder:
        trained(content, WARM_UP + STEPS + 1, Path(folder), found)
    return found.shares


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("configs", nargs="+", help="such as seo/retriever_demo.yaml")
    for name in parser.parse_args().configs:
        print(f"{name}\n{table(profiled(name))}\n", flush=True)
