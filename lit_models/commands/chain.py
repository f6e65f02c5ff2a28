"""Run stages one after the other, each on its own devices."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from lit_models.errors import UsageError, say
from lit_models.stage_records import (
    Record,
    State,
    made_from,
    outputs_digest,
    read_record,
    remove_predictions,
    state_of,
    write_record,
)
from lit_models.stages import Stage, chosen_stages, read_stages

PREFIX = (sys.executable, "-m", "lit_models")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
NUM_SIGNALS_BEFORE_KILL = 3


# Plain `dict`: see check.py. Changes stand beside the stages, since an option such as
# --stages.dump.devices=2 would replace what the YAML says of the whole stage.
def chain(
    *,
    stages: dict | None = None,
    to: str = "runs/chain-{seed}",
    seed: int = 1,
    start: str | None = None,
    only: str | list[str] | None = None,
    change: dict | None = None,
    launcher: str = "",
) -> int:
    """Run the stages of a chain one after the other; a stage that is complete is not run again.

    An interrupted stage goes on where it was. Nothing is overwritten that was made from other
    options, another config, other files that an option names or other outputs of earlier stages;
    the number of devices is free.

    Args:
        stages: NAME: {verb, config, checkpoint, options, devices} for each, in their order; in
            options, "{NAME}" is the folder of a stage, "{seed}" the seed.
        to: folder of the chain, with one in it for each stage.
        seed: of every stage that trains or evaluates.
        start: the first stage to run; those before it must be complete, and are taken as they are.
        only: one stage or several; those that they take are taken as they are.
        change: values that win over those of stages: --change.NAME.devices=2,
            --change.NAME.options.data.micro_batch_size=4.
        launcher: words before the command of each stage, such as srun in a SLURM job.

    Returns:
        0, or the exit status of the stage that failed.

    Raises:
        UsageError: stages or options name something that there is not.
    """
    names = [only] if isinstance(only, str) else only
    folder = Path(to.replace("{seed}", str(seed))).expanduser()
    prefix = (*shlex.split(launcher), *PREFIX)
    try:
        read = read_stages(stages or {}, change)
        chosen = chosen_stages(read, start, names)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    return run_stages(read, chosen, folder, seed, prefix)


def run_stages(
    stages: Sequence[Stage],
    chosen: Sequence[Stage],
    folder: Path,
    seed: int,
    prefix: Sequence[str] = PREFIX,
) -> int:
    """Run those of the chosen stages that are not complete.

    Args:
        stages: all, in their order.
        chosen: which of them.
        folder: of the chain.
        seed: of the chain.
        prefix: of every command.

    Returns:
        0, or the exit status of the stage that failed.

    Raises:
        ValueError: an output was made from something else, or a stage that is taken is not there.
    """
    check_outputs(stages, chosen, folder, seed)
    outputs: dict[str, str | None] = {}
    for stage in stages:
        if stage in chosen:
            status = _run_stage(stage, folder, seed, outputs, prefix)
            if status:
                return status
        outputs[stage.name] = _outputs_of(stage, folder)
    return 0


def check_outputs(
    stages: Sequence[Stage], chosen: Sequence[Stage], folder: Path, seed: int
) -> dict[str, State]:
    """Refuse, before anything is run, what the last stage would be refused for hours later.

    Returns:
        how far each of the chosen stages is.

    Raises:
        ValueError: as `run_stages`.
    """
    states: dict[str, State] = {}
    outputs: dict[str, str | None] = {}
    for stage in stages:
        outputs[stage.name] = _outputs_of(stage, folder)
        if stage not in chosen:
            continue
        for name in stage.takes:
            if outputs[name] is None and name not in [other.name for other in chosen]:
                raise ValueError(
                    f"stage {stage.name} takes {name}, which is not complete in {folder}; run it "
                    "too: leave --start and --only out."
                )
        state = state_of(stage, folder, made_from(stage, folder, seed, outputs))
        states[stage.name] = state
        if state != "complete":
            outputs[stage.name] = None
    return states


def _run_stage(
    stage: Stage,
    folder: Path,
    seed: int,
    outputs: dict[str, str | None],
    prefix: Sequence[str],
) -> int:
    made = made_from(stage, folder, seed, outputs)
    state = state_of(stage, folder, made)
    if state == "complete":
        print(f"stage {stage.name} is complete: skipped", flush=True)
        return 0
    arguments = stage.arguments(folder, seed, is_begun=state == "begun")
    if state == "begun" and stage.verb == "predict":
        remove_predictions(folder / stage.name)
    write_record(folder, stage.name, Record(made))
    (folder / stage.name).mkdir(exist_ok=True)
    print(f"stage {stage.name}: unisono {shlex.join(arguments)}", flush=True)
    started = time.monotonic()
    status, received = run_process([*prefix, *arguments])
    seconds = time.monotonic() - started
    if status:
        what, advice = ("was stopped", "") if received else ("failed", "mend what it names, and ")
        say(
            f"stage {stage.name} {what} after {seconds:.0f} s with exit status {status}; {advice}"
            "the same command goes on with it"
        )
        return status
    if not any(path.is_file() for path in (folder / stage.name).rglob("*")):
        say(
            f"stage {stage.name} ended well and wrote nothing to {folder / stage.name}, so it is "
            "not complete; leave out the options that send its output elsewhere"
        )
        return 1
    write_record(folder, stage.name, Record(made, outputs_digest(stage, folder), seconds))
    print(f"stage {stage.name} is complete, in {seconds:.1f} s", flush=True)
    return 128 + received[0] if received else 0


def _outputs_of(stage: Stage, folder: Path) -> str | None:
    record = read_record(folder, stage.name)
    return None if record is None else record.outputs


def run_process(command: Sequence[str]) -> tuple[int, list[int]]:
    """Run a command in a process group of its own, of which nothing remains.

    A signal that asks this process to end is passed on to the whole group, as a terminal does;
    that of a closed terminal as SIGTERM, upon which a training saves. The third one kills, but for
    SIGUSR1, which a job's script repeats: once it has come, it is ignored after the command, too,
    while what that wrote is looked at.

    Returns:
        The exit status, 128 + N where signal N ended it; the signals that were passed on.
    """
    received: list[int] = []
    group: list[int] = []

    def pass_on(signum: int, frame: FrameType | None = None) -> None:
        received.append(signal.SIGTERM if signum == signal.SIGHUP else signum)
        urgent = [number for number in received if number != signal.SIGUSR1]
        is_last = len(urgent) >= NUM_SIGNALS_BEFORE_KILL
        for leader in group:
            _signal_group(leader, signal.SIGKILL if is_last else received[-1])

    heard = [s for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]  # as under nohup
    before = {signum: signal.signal(signum, pass_on) for signum in heard}
    try:
        process = subprocess.Popen(command, start_new_session=True)
        group.append(process.pid)
        if received:  # while it started
            _signal_group(process.pid, received[0])
        status = process.wait()
    finally:
        for leader in group:
            _signal_group(leader, signal.SIGKILL)
        if signal.SIGUSR1 in received:
            before[signal.SIGUSR1] = signal.SIG_IGN
        for signum, handler in before.items():
            signal.signal(signum, handler)
        if signal.SIGUSR1 in received:  # perhaps since it was looked at
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    return (status if status >= 0 else 128 - status), received


def _signal_group(leader: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(leader, signum)
