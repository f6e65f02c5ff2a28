"""A step of each family with everything on, beside a plain loop: same network, same batches.

pytest -m benchmark tests/benchmarks/test_family_steps.py

The two take turns of a few steps within one process, on one network and one heap. Each waits for
the batches of its own loader; the two alternate in asking first for a batch, since whatever a
dataset keeps of a text, such as its tokens, speeds up the second. Several batches are made
at once, so the median step never waits. Another row gives the share of our steps spent waiting, on
average over as many steps as there are batches made at once.
"""

import itertools
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from datamodules.core.plan import iterate_micro_batches
from datamodules.core.planned import PlannedDataModule, PlannedLoader
from lit_models.cli import built
from lit_models.config_files import find_config
from lit_models.training import default_callbacks
from lit_models.training.run import ProgressLine
from lit_models.training.throughput import FILE_NAME
from tests.benchmarks.figures import Aim, Figures
from tests.benchmarks.language_models import trainer_of
from tests.toy import json_rows

CONFIGS = {  # family -> config and an even number of turns: 15 to 70 s of steps
    "occupation_coder": ("occupation_coder/demo.yaml", 16),
    "causal_lm": ("causal_lm/demo.yaml", 10),
    "consistency_lens": ("consistency_lens/fit.yaml", 40),
    "seo, scorer": ("seo/scorer_demo.yaml", 40),
    "seo, ranker": ("seo/ranker_demo.yaml", 12),
    "seo, retriever": ("seo/retriever_demo.yaml", 48),
    "seo, writer": ("seo/writer_demo.yaml", 32),
}
TURN, MOST_PER_CENT, MOST_WAIT = 8, 102, 0.01  # steps of a turn; % of a plain step; share of a step
pytestmark = [pytest.mark.benchmark, pytest.mark.filterwarnings("ignore")]


class Turns(Callback):
    """Lets a plain loop train the same network between every few steps of the run.

    Attributes:
        ours: milliseconds of a step, the median of each turn; the first turn is warm-up.
        theirs: the same for the plain loop.
    """

    def __init__(self, clip: float | None) -> None:
        self.clip = clip
        self.ours: list[float] = []
        self.theirs: list[float] = []
        self._ends: list[float] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plain = plain_steps(pl_module, trainer.datamodule, self.clip)
        self._ends = [time.perf_counter()]

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._ends.append(time.perf_counter())
        if len(self._ends) <= TURN:
            return
        # The first step of a turn is left out: the other loop's data is in the caches.
        self.ours.append(1e3 * float(np.median(np.diff(self._ends)[1:])))
        if len(self.ours) % 2:  # this turn's batches, then the next turn's before ours reads them
            for _ in range(2):
                taken = list(itertools.islice(self._plain, TURN))
                self.theirs.append(1e3 * statistics.median(taken[1:]))
        self._ends = [time.perf_counter()]


def plain_steps(module: Any, data: PlannedDataModule, clip: float | None) -> Iterator[float]:
    """Yield the seconds of each step of a hand-written loop."""
    found = module.configure_optimizers()
    optimizer = found["optimizer"] if isinstance(found, dict) else found
    schedule = found["lr_scheduler"]["scheduler"] if isinstance(found, dict) else None
    batches = (batch for epoch in itertools.count() for batch in epoch_of(data, epoch))
    while True:
        begun = time.perf_counter()
        terms = module.training_terms(next(batches))
        loss = sum(t.total / t.count for t in terms.values() if t.total.requires_grad)
        optimizer.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        loss.item()  # as a loop that prints its loss
        yield time.perf_counter() - begun


def epoch_of(data: PlannedDataModule, epoch: int) -> PlannedLoader:
    """Return the training batches of an epoch, independent of the run's position."""
    plan, dataset = data.plan("train", epoch), data.datasets["train"]
    dealt = (plan, dataset.lengths, dataset.target_counts, data.batching, 1, 0, epoch)
    return PlannedLoader(dataset, partial(iterate_micro_batches, *dealt), data.steps_per_epoch, {})


def trained(config: dict[str, Any], num_steps: int, folder: Path, beside: Turns) -> None:
    """Train with ledger, checkpoints, loggers, progress, and one more callback."""
    seed_everything(1, verbose=False)
    module, data = built(config, "model"), built(config, "data")
    on = [*default_callbacks(), ProgressLine(), beside]
    steps = {"max_steps": num_steps, "log_every_n_steps": TURN, "gradient_clip_val": beside.clip}
    trainer_of(folder, on, **steps).fit(module, data)


def config_of(path: str) -> dict[str, Any]:
    """Return a config. A lens gets its demo's subject with random weights, and reads the stories in
    every step, in our run and in the plain loop."""
    config = yaml.safe_load(find_config(path).read_text("utf-8"))
    if path == CONFIGS["consistency_lens"][0]:
        subject = yaml.safe_load(find_config("consistency_lens/subject.yaml").read_text("utf-8"))
        network = subject["model"]["init_args"]["network"]
        config["model"]["init_args"]["subject"]["network"] = network
        config["data"]["init_args"]["tokenizer"] = {"kind": "words"}
    return config


@pytest.mark.parametrize("family", CONFIGS)
def test_a_step_beside_a_plain_loop(family: str, tmp_path: Path, figures: Figures) -> None:
    torch.set_num_threads(1)
    path, turns = CONFIGS[family]
    config = config_of(path)
    beside = Turns(config["trainer"].get("gradient_clip_val"))
    trained(config, TURN * turns, tmp_path, beside)
    ours, theirs = beside.ours[1:], beside.theirs[1:]
    table, name = family.partition(",")[0], Path(path).stem.replace("_", " ")
    name = "demo" if name == "fit" else name
    per_cent = [100 * a / b for a, b in zip(ours, theirs, strict=True)]
    aim = Aim(MOST_PER_CENT, of="value")
    figures.add(table, f"a step of {name}, all on", "% of a plain loop's", per_cent, aim=aim)
    _, *lines = json_rows(tmp_path / FILE_NAME)
    # Mean wait per step in each log interval but the first, as a share of our median step.
    waits_ms = [1e3 * line["split"]["data"] / line["steps"] for line in lines]
    shares = [wait / statistics.median(ours) for wait in waits_ms]
    aim = Aim(MOST_WAIT, of="value")
    figures.add(table, f"data wait of {name}", "of a step", shares, aim=aim)
