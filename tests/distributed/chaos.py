"""A run that is killed again and again, each time going on with other devices.

python -m tests.distributed.chaos FOLDER --seed 1 prints what was killed when, and the proof.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.distributed.launch import MARK, ROOT, processes_of

EPOCHS, STEPS_PER_EPOCH = 16, 40
# Processes take seconds to start on two cores: few of them are drawn more often than many.
WORLDS = [*[(1, "auto"), (1, "fsdp"), (2, "ddp"), (2, "fsdp")] * 2, (3, "ddp")]
MOMENTS = ["seconds"] * 11 + ["checkpoint"] * 5 + ["validation"] * 2 + ["epoch end"] * 2
ENDS_WITHIN_S = 30.0
# At its debug rate of 0.003 the ranker's steps make 1e-9 of the rounding in 640 steps, on two
# devices that nobody disturbs as well; at this one 1e-14, and what a kill left would be seen.
CALM = {"seo/ranker": ("--model.optimizer.lr=0.0003",)}


@dataclass
class Kill:
    """One SIGKILL: when, whom, and under which world."""

    moment: str
    devices: int
    strategy: str
    whom: str
    after_s: float
    step: int
    ended_after_s: float


def config_of(family: str) -> str:
    """Return the debug config of a family, or of one module of it, such as seo/scorer."""
    return f"{family}_debug.yaml" if "/" in family else f"{family}/debug.yaml"


def command(folder: Path, family: str, devices: int, strategy: str) -> list[str]:
    """Return the command of every attempt: the same but for the devices."""
    return [
        *(sys.executable, "-m", "lit_models", "fit", "--config", config_of(family)),
        *("--ckpt_path=auto", f"--trainer.default_root_dir={folder}", "--trainer.precision=64"),
        *(f"--trainer.max_epochs={EPOCHS}", f"--trainer.limit_train_batches={STEPS_PER_EPOCH}"),
        *(f"--trainer.devices={devices}", f"--trainer.strategy={strategy}"),
        "--trainer.callbacks+=lit_models.training.LastCheckpoint",
        "--trainer.callbacks.every_n_steps=7",
        *CALM.get(family, ()),
    ]


def start(folder: Path, family: str, devices: int, strategy: str, mark: str) -> subprocess.Popen:
    """Return the running command; its output goes to a file beside the run."""
    environ = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "NODE_RANK")}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", MARK: mark}
    with open(folder.with_suffix(".log"), "a", encoding="utf-8") as log:
        return subprocess.Popen(
            command(folder, family, devices, strategy),
            cwd=ROOT,
            env=environ,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def steps_of(folder: Path) -> list[dict]:
    """Return the ledger's whole lines."""
    path = folder / "ledger.jsonl"
    content = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in content.split("\n")[:-1]]


def wait_for(is_there: Callable[[], bool], process: subprocess.Popen, limit_s: float) -> bool:
    """Return whether it came to be before the process ended."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and process.poll() is None:
        if is_there():
            return True
        time.sleep(0.002)
    return False


def wait_for_moment(
    moment: str, folder: Path, process: subprocess.Popen, begun: int, delay_s: float
) -> bool:
    """Wait until the run is at a moment to be killed; false where it ended before.

    Args:
        moment: one of MOMENTS.
        folder: of the run.
        process: of the attempt.
        begun: lines of the ledger before this attempt.
        delay_s: seconds from the first step on; of the other moments, until they are looked for.
    """
    if not wait_for(lambda: len(steps_of(folder)) > begun + 1, process, 120):
        return False
    time.sleep(delay_s)
    checkpoints = folder / "checkpoints"

    def is_writing() -> bool:
        return any(checkpoints.glob(".*.unfinished"))

    def is_at(step_in_epoch: int) -> bool:
        return steps_of(folder)[-1].get("step_in_epoch") == step_in_epoch

    looks = {
        "seconds": lambda: True,
        "checkpoint": is_writing,
        "validation": lambda: is_at(STEPS_PER_EPOCH - 1) or is_writing(),
        "epoch end": lambda: is_at(STEPS_PER_EPOCH - 1),
    }
    return wait_for(looks[moment], process, 60)


def attempt(
    folder: Path, family: str, world: tuple[int, str], moment: str, rng: np.random.Generator
) -> Kill:
    """Start the run in one world, kill it at a moment, and wait for its end."""
    mark, begun, began_at = uuid.uuid4().hex, len(steps_of(folder)), time.monotonic()
    process = start(folder, family, *world, mark)
    delay_s = float(rng.uniform(0, 1.0))
    try:
        if not wait_for_moment(moment, folder, process, begun, delay_s):
            log = folder.with_suffix(".log").read_text(encoding="utf-8")
            raise RuntimeError(f"the attempt ended before it was killed: {log[-2000:]}")
        ranks = processes_of(mark)
        whom = "all" if rng.random() < 0.5 or len(ranks) == 1 else "one rank"
        victims = ranks if whom == "all" else [int(rng.choice(ranks))]
        killed_at = time.monotonic()
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        step = max((line.get("step", 0) for line in steps_of(folder)), default=0)
        while processes_of(mark) and time.monotonic() < killed_at + ENDS_WITHIN_S:
            process.poll()
            time.sleep(0.05)
        ended_after_s = time.monotonic() - killed_at
        if processes_of(mark):
            raise RuntimeError(f"ranks were left {ENDS_WITHIN_S:.0f} s after {whom} was killed")
        return Kill(moment, *world, whom, killed_at - began_at, step, ended_after_s)
    finally:
        for pid in processes_of(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def finish(folder: Path, family: str, world: tuple[int, str]) -> None:
    """Let the run go on to its end."""
    process = start(folder, family, *world, uuid.uuid4().hex)
    if process.wait(timeout=600):
        raise RuntimeError(folder.with_suffix(".log").read_text(encoding="utf-8")[-4000:])


def chaos(
    folder: Path, family: str, seed: int, worlds: list[tuple[int, str]], moments: list[str]
) -> list[Kill]:
    """Kill a run once per moment, in random worlds and order, then let it end.

    Args:
        folder: of the run.
        family: whose debug.yaml is run.
        seed: of the order, worlds, delays and victims.
        worlds: devices and strategies to draw from; the last attempt takes the first one.
        moments: when to kill.
    """
    rng = np.random.default_rng(seed)
    kills = []
    for moment in rng.permutation(moments):
        world = worlds[int(rng.integers(len(worlds)))]
        kill = attempt(folder, family, world, str(moment), rng)
        print(kill, flush=True)
        kills.append(kill)
    finish(folder, family, worlds[0])
    return kills


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", default="occupation_coder")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.folder.parent.mkdir(parents=True, exist_ok=True)
    chaos(args.folder, args.family, args.seed, WORLDS, MOMENTS)
    subprocess.run([sys.executable, "-m", "lit_models", "verify", str(args.folder)])


if __name__ == "__main__":
    main()
