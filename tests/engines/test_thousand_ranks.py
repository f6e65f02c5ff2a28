"""Bytes and collectives of the first of many ranks, while the others do not exist.

pytest -m benchmark -s tests/engines/test_thousand_ranks.py prints them for 1,024 ranks.
"""

import json
import shutil
import timeit
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from datamodules.core.plan import PlanRequest, deal, make_plan
from lit_models.run_files import MARKER, damage
from lit_models.training import LastCheckpoint, default_callbacks
from lit_models.training.checkpoints import write_folder
from lit_models.training.run import status
from lit_models.training.strategies import FullyShardedStrategy
from tests.toy import LitToy, ToyData, ledger_lines, toy_trainer


class Sent(TorchDispatchMode, Callback):
    """Counts collective calls, and bytes that this rank sends and receives, by purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.purpose = "start"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            self.counts[f"calls, {self.purpose}"] += 1
            self.counts[f"bytes, {self.purpose}"] += sum(one.nbytes for one in tensors)
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, *_: Any) -> None:
        self.purpose = "four steps"

    def on_save_checkpoint(self, *_: Any) -> None:
        self.purpose = "two saves"

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self.purpose = "topology"
        self.counts["bytes of topology.json"] = len(json.dumps(status(trainer)))


def counted(size: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the counts of a world of this size: four steps of one row a rank, and a save to which
    each rank adds a file, `folder / "sharded"`."""
    monkeypatch.setenv("LOCAL_RANK", "0")  # another program starts the others
    sharded = folder / "sharded"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        with Sent() as sent:
            trainer = toy_trainer(
                folder / "run",
                **{"num_nodes": size, "strategy": FullyShardedStrategy(), "precision": "32-true"},
                **{"max_steps": 4, "limit_val_batches": 0, "log_every_n_steps": 1},
                callbacks=[*default_callbacks(), LastCheckpoint(every_n_steps=2), sent],
            )
            trainer.fit(LitToy(), ToyData(4 * size, size))
            sent.purpose = "sharded save"
            write_folder({"state_dict": {}}, {"w": torch.zeros(2)}, sharded)
    finally:
        dist.destroy_process_group()
    content = torch.load(sharded / MARKER, weights_only=True)
    (first,) = content["files"]
    for number in range(2, size + 1):  # files of other ranks
        name = f"shard-{number:05d}-of-{size:05d}.safetensors"
        content["files"][name] = content["files"][first]
        shutil.copy(sharded / first, sharded / name)
    torch.save(content, sharded / MARKER)
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    sent.counts["files of the run folder"] = len(files)
    sent.counts |= {f"bytes of {p.name}": p.stat().st_size for p in [*files, sharded / MARKER]}
    return sent.counts


def test_nothing_of_a_rank_grows_faster_than_the_number_of_ranks(tmp_path, monkeypatch) -> None:
    some, twice = (counted(size, tmp_path / str(size), monkeypatch) for size in (64, 128))
    assert {*some} == {*twice}
    for name, number in some.items():
        assert twice[name] <= (2 * number if name.startswith("bytes") else number), name
    for name in ("throughput.jsonl", "ledger.jsonl", "last.ckpt"):
        assert twice[f"bytes of {name}"] <= 1.02 * some[f"bytes of {name}"], name


@pytest.mark.benchmark
def test_a_thousand_ranks_and_four_million_tokens_a_step(tmp_path, monkeypatch) -> None:
    counts, lengths = counted(1024, tmp_path, monkeypatch), np.full(10**7, 4096)
    request = PlanRequest("", len(lengths), 1024, 0, 50)
    ids = make_plan(request, lengths, 0).step_ids(0)
    steps = [line["seconds"] for line in ledger_lines(tmp_path / "run")]
    counts["μs, step of the toy, all included"] = round(1e6 * min(steps))
    for what, work in {
        "plan of ten million rows": lambda: make_plan(request, lengths, 0),
        "deal of a step": lambda: deal(ids, lengths, 1024, 7, 1),
        "sharded checkpoint found whole": lambda: damage(tmp_path / "sharded", every_byte=False),
    }.items():
        counts[f"μs, {what}"] = round(1e6 * min(timeit.repeat(work, number=1, repeat=3)))
    print("", *(f"{name:34} {number:12,}" for name, number in counts.items()), sep="\n")
    assert damage(tmp_path / "sharded") is None
