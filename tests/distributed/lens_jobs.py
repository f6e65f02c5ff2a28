"""Many small runs of the consistency lens in one world of processes, or in this one.

torchrun --nproc_per_node=2 -m tests.distributed.lens_jobs FOLDER JOBS.json
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from datamodules import ActivationDumpDataModule
from datamodules.core.planned import LoaderOptions
from lit_models import LitSubject
from lit_models.training import default_callbacks
from lit_models.training.predictions import PredictionWriter
from lit_models.training.strategies import ReplicatedStrategy
from tests.distributed.jobs import run_job
from tests.distributed.lens_family import LENS_SUBJECT, lens_documents
from tests.toy import toy_trainer


class Interrupted(Callback):
    """Ends a prediction in the middle, as a kill would: nothing is tidied up."""

    def __init__(self, at_batch: int) -> None:
        self.at_batch = at_batch

    def on_predict_batch_start(self, *args: Any, **kwargs: Any) -> None:
        if args[3] == self.at_batch:
            raise RuntimeError("interrupted")


def world() -> dict[str, Any]:
    """Return the trainer's options for the processes that there are."""
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {"devices": devices, "strategy": ReplicatedStrategy() if devices > 1 else "auto"}


def dump(folder: Path, job: dict[str, Any]) -> None:
    """Write a store, or a part of one.

    Args:
        folder: of the job.
        job: perhaps `to` (another job's name whose store it writes) and `until` (a batch).
    """
    store = folder.parent / job.get("to", job["name"]) / "store"
    torch.set_num_threads(job.get("threads", 1))  # the dump takes one in any case
    documents = lens_documents(folder, min_position=1)
    batches = {"global_batch_size": 1, "loader": LoaderOptions(num_workers=0)}
    data = ActivationDumpDataModule(str(store), **documents, **batches)
    callbacks = [c for c in default_callbacks() if not isinstance(c, PredictionWriter)]
    callbacks += [PredictionWriter(part_batches=4), Interrupted(job.get("until", -1))]
    trainer = toy_trainer(folder, **world(), precision=32, callbacks=callbacks)
    trainer.predict(LitSubject(LENS_SUBJECT), data, return_predictions=False)


KINDS = {"dump": dump, "fit": run_job}


def run_here(folder: Path, jobs: list[dict[str, Any]]) -> None:
    """Run jobs in this process, one after the other."""
    for job in jobs:
        (folder / job["name"]).mkdir(parents=True, exist_ok=True)
        KINDS[job["kind"]](folder / job["name"], job)


def main() -> None:
    torch.set_num_threads(1)
    run_here(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
