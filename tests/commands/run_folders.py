"""Hand-made run folders: every value in them is known, and their proof is valid."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.plan import PlanRequest, digest_ids, make_plan
from datamodules.shards.order import plan_hash
from lit_models.commands.report import report
from lit_models.run_files import chained

STEPS_PER_EPOCH, SAMPLES = 3, 24
STARTS = ("2026-11-21T23:59:58+00:00", "2026-11-22T10:00:00+02:00", "2026-11-23T10:00:00+00:00")
ATTEMPTS = ((1, 0, 4), (2, 2, 6))  # world size, resumed from, last step: steps 3 and 4 occur twice
TOPOLOGY: dict[str, Any] = {
    "strategy": "ddp",
    "backend": "gloo",
    "world_size": 2,
    "num_nodes": 1,
    "host_rank_device": ["here:0:cpu", "here:1:cpu"],
    "memory": [{"resident_bytes": 1 << 30, "allocated_bytes": None}],
    "precision": "32-true",
    "plan": {
        "global_batch_size": 8,
        "num_replicas": 2,
        "micro_batch_size": 4,
        "accumulate_grad_batches": 1,
    },
    "exactness": {"level": "gradient"},
    "versions": {"torch": "2.13"},
    "warnings": ["two devices share a core"],
    "command": "unisono fit --config a.yaml",
    "code": {"version": "0.1.0", "digest": "abc"},
    "monitor": {"name": "val/f1", "mode": "max"},
    "is_over": True,
}
CONFIG = """
seed_everything: 1
model:
  class_path: lit_models.LitOccupationCoder
  init_args: {optimizer: {class_path: torch.optim.AdamW, init_args: {lr: 0.003}}}
trainer: {max_epochs: 2, max_steps: -1, default_root_dir: runs/a}
"""
METRICS = """step,epoch,train/loss,val/f1,val/loss
1,0,1.0,,
2,0,0.5,,
2,0,,0.25,0.75
5,1,,0.5,0.625
0,0,,0.75,0.5
"""


def run_folder(
    folder: Path,
    losses: dict[int, float] | None = None,
    topology: dict[str, Any] | None = None,
    config: str = CONFIG,
    metrics: str = METRICS,
    attempts: tuple[tuple[int, int, int], ...] = ATTEMPTS,
) -> Path:
    """Write a run folder and return it.

    Args:
        folder: to make.
        losses: step -> loss in the latest attempt; 1 / step for other steps.
        topology: values that replace those of topology.json.
        config: content of config.yaml.
        metrics: content of metrics.csv.
        attempts: world size, first and last step of each; an earlier attempt has a loss of 9 at
            steps that a later one repeats.
    """
    folder.mkdir(parents=True)
    lengths = np.ones(SAMPLES, np.int64)
    request = PlanRequest("data", SAMPLES, 8, 1, 1)
    np.save(folder / "plan_lengths.npy", lengths)
    plan = {
        "request": vars(request),
        "steps_per_epoch": STEPS_PER_EPOCH,
        "repeats_first_epoch": False,
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    start = {"plan_digest": request.digest(), "plan_hash": plan_hash(vars(request), False, lengths)}
    lines: list[dict[str, Any]] = []
    for number, (world, begin, end) in enumerate(attempts, 1):
        begun = {"attempt": number, "resumed_from_step": begin, "world_size": world}
        begun |= {"num_replicas": world, "started_at": STARTS[number - 1]}
        lines.append({**begun, **start})
        repeated = min((later[1] for later in attempts[number:]), default=end)
        for step in range(begin + 1, end + 1):
            loss = (losses or {}).get(step, 1 / step)
            lines.append(_step(step, number, world, 9.0 if step > repeated else loss, request))
    lines.append({"event": "ended", "after_step": attempts[-1][2], "attempt": len(attempts)})
    before = ""
    for line in lines:
        before = line["hash"] = chained(line, before)
    ledger = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "ledger.jsonl").write_text(ledger)
    (folder / "topology.json").write_text(json.dumps({**TOPOLOGY, **(topology or {})}))
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.csv").write_text(metrics)
    return folder


def _step(step: int, attempt: int, world: int, loss: float, request: PlanRequest) -> dict[str, Any]:
    epoch, place = divmod(step - 1, STEPS_PER_EPOCH)
    ids = make_plan(request, np.ones(SAMPLES, np.int64), epoch).step_ids(place)
    return {
        "epoch": epoch,
        "step": step,
        "step_in_epoch": place,
        "attempt": attempt,
        "grad_norm": 2.0,
        "learning_rate": 0.003,
        "seconds": 0.5,
        "world_size": world,
        "digest": f"{digest_ids(ids):016x}",
        "samples": len(ids),
        "targets": {"a": 8.0},
        "loss": loss,
        "terms": {"a": loss},
        "is_finite": True,
    }


def page_of(folder: Path, **options: Any) -> str:
    """Write the report of a run folder and return it."""
    assert report(folder, **options) == 0
    return (folder / "report.html").read_text(encoding="utf-8")


def text_of(page: str) -> str:
    """Return the text that a reader sees, without markup and scripts."""
    body = page.partition("<body>")[2].partition("<script>")[0]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())
