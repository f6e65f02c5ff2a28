"""Options of the strategies, each in a short fit; all of them share one world of processes.

torchrun --nproc_per_node=2 -m tests.distributed.option_run FOLDER; each fit leaves what every rank
saw in FOLDER/NAME/facts-RANK.json.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.strategies import StrategyRegistry
from torch import nn

from lit_models.training import default_callbacks
from lit_models.training.exact import LossSum
from lit_models.training.strategies import ReplicatedStrategy
from tests.toy import LitToy, ToyData, toy_trainer

Job = dict[str, Any]
NORMED: Job = {"module": {"is_normed": True}, "data": {"global_batch_size": 7, "num_samples": 46}}
UNUSED: Job = {"module": {"has_unused": True}}
JOBS: dict[str, Job] = {
    "plain": {},
    "small buckets": {"strategy": {"bucket_cap_mb": 5e-5}},
    "views": {"strategy": {"gradient_as_bucket_view": True}},
    "own buffers": {"strategy": {"broadcast_buffers": False}},
    "unused": UNUSED,
    "unused found": {**UNUSED, "strategy": {"find_unused_parameters": True}},
    "unused, static": {**UNUSED, "strategy": {"static_graph": True}},
    "norms": NORMED,
}


class LitOptions(LitToy):
    """The toy with a buffer, perhaps with a layer that no loss depends on, or a batch norm."""

    def __init__(self, has_unused: bool = False, is_normed: bool = False) -> None:
        super().__init__()
        self.has_unused, self.is_normed = has_unused, is_normed
        self.register_buffer("place", torch.zeros(1))
        self.places: list[float] = []

    def build(self, recipe: dict[str, Any], data: Any) -> None:
        super().build(recipe, data)
        self.unused = nn.Linear(2, 2) if self.has_unused else None
        if self.is_normed:
            self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 1)
            nn.init.constant_(self.head.weight, 0.5)
            nn.init.zeros_(self.head.bias)

    def losses(self, batch: dict[str, Any]) -> dict[str, LossSum]:
        terms = super().losses(batch)
        if self.training:
            self.places.append(float(self.place))
        if not self.is_normed:
            return terms
        values, mask = batch["values"] * batch["mask"], batch["mask"].to(batch["values"])
        features = torch.stack([values.sum(1), (values**2).sum(1), mask.sum(1)], 1)
        features = features.to(self.head.weight)
        guess = self.head(self.norm(features)).squeeze(1)
        more = ((guess - features[:, 1]) ** 2 * batch["weight"]).sum()
        return {**terms, "sum": LossSum(terms["sum"].total + more, terms["sum"].count)}


class Seen(Callback):
    """What DDP and the module looked like after a step."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def on_train_start(self, trainer, module):
        module.place.fill_(trainer.global_rank)

    def on_train_batch_end(self, trainer, module, *_):
        wrapped = trainer.strategy.model
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            logged = wrapped._get_ddp_logging_data()
            sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
            self.facts["num_buckets"] = len(str(sizes).split(","))
            self.facts["static_graph"] = bool(logged.get("static_graph"))
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        if all(isinstance(g, torch.Tensor) and hasattr(g, "untyped_storage") for g in grads):
            storages = {g.untyped_storage().data_ptr() for g in grads if type(g) is torch.Tensor}
            self.facts["num_storages"], self.facts["num_grads"] = len(storages), len(grads)


def fit(folder: Path, job: Job, **trainer_options: Any) -> dict[str, Any]:
    """Fit as a job says and return what this rank saw."""
    folder.mkdir(parents=True, exist_ok=True)
    seed_everything(1, verbose=False)
    seen = Seen()
    options = {"max_steps": 10, "max_epochs": 9, "limit_val_batches": 0, **job.get("trainer", {})}
    callbacks = [*default_callbacks(), seen]
    trainer = toy_trainer(folder, callbacks=callbacks, **options, **trainer_options)
    module = LitOptions(**job.get("module", {}))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, ToyData(**job.get("data", {})))
        except RuntimeError as error:
            seen.facts["error"] = str(error)
    seen.facts["warnings"] = [str(warning.message) for warning in heard]
    return {**seen.facts, "places": module.places[2:], "steps": trainer.global_step}


def main() -> None:
    torch.set_num_threads(1)
    for name, job in JOBS.items():
        # By a name, since Lightning refuses float64 to objects of a sharding strategy.
        strategy = f"options-{name}"
        StrategyRegistry.register(strategy, ReplicatedStrategy, **job.get("strategy", {}))
        folder = Path(sys.argv[1]) / name
        facts = fit(folder, job, devices=2, strategy=strategy)
        (folder / f"facts-{os.environ['RANK']}.json").write_text(json.dumps(facts))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
