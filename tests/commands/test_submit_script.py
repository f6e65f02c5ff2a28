"""The shell logic of a job's script, run by bash with stand-ins for SLURM's commands."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from lit_models.commands.submit import Script
from lit_models.engines.jobs import Resources

SRUN = """#!/bin/bash
# Ends with $STATUS after $SECONDS_LONG, or as $HEARD tells it once it has heard a signal.
trap 'echo heard >> srun.txt; [ -z "$HEARD" ] || { sleep 0.1; exit $HEARD; }' USR1
echo started "$@" >> srun.txt
for i in $(seq $TENTHS); do sleep 0.1; done
exit $STATUS
"""
DEAF = (
    "#!/bin/bash\necho started >> srun.txt\n/bin/sleep 5 & child=$!\n"  # the real sleep
    "trap 'kill $child' EXIT\nwait\n"
)
LOSES = """#!/bin/bash
trap 'echo lost >> srun.txt; trap "echo heard >> srun.txt; exit 75" USR1' USR1
echo started >> srun.txt; for i in $(seq 100); do /bin/sleep 0.1; done
"""
SQUEUE = '#!/bin/bash\necho squeue "$@" >> calls.txt\necho "$STATE"\n'
SLEEP = '#!/bin/bash\n[ "$1" = 5 ] || exec /bin/sleep "$1"\n'  # no wait between two checks
SCONTROL = '#!/bin/bash\necho scontrol "$@" >> calls.txt\necho "$SHOWN"\nexit $REFUSES\n'
PYTHON = '#!/bin/bash\necho "$@" > python.txt\nexit $NO_UNISONO\n'
SHOW = "scontrol show job 7"
REQUEUED = ["squeue --noheader --jobs=7 --format=%T", "scontrol requeue 7"]
STARTED = ["started toy_7"]
HEARD = [*STARTED, "heard"]
USR1, TERM = signal.SIGUSR1, signal.SIGTERM


class Node:
    """A folder with a job's script and the stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        resources = Resources(activate=["touch begun; sleep $ACTIVATION_S"])
        script = Script(resources, "toy", "python", ['srun "$run"'], "toy_$SLURM_JOB_ID")
        self.write("job.sh", script.text(Path("job.sh")))
        names = ("srun", "squeue", "scontrol", "python", "sleep")
        for name, text in zip(names, (SRUN, SQUEUE, SCONTROL, PYTHON, SLEEP), strict=True):
            self.write(name, text)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def run(self, *signals: signal.Signals, **environ: object) -> tuple[int, list[str], list[str]]:
        """Run the job, and send it signals once its run, or the activation before it, has begun;
        return its exit status, the calls of SLURM's commands, and what srun noticed."""
        values = {"STATUS": 0, "TENTHS": 1, "HEARD": "", "REFUSES": 0, "ACTIVATION_S": 0}
        values |= {"NO_UNISONO": 0, "STATE": "RUNNING", "SLURM_JOB_ID": 7, **environ}
        path = {"PATH": f"{self.folder}:{os.environ['PATH']}"}
        with (self.folder / "errors.txt").open("w") as errors:
            job = subprocess.Popen(
                ["bash", "job.sh"],
                cwd=self.folder,
                env=path | {name: str(value) for name, value in values.items()},
                stderr=errors,
            )
        begun = self.folder / ("begun" if values["ACTIVATION_S"] else "srun.txt")
        end = time.monotonic() + 120
        while signals and not begun.exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        for signum in signals:
            job.send_signal(signum)
            time.sleep(0.15)
        return job.wait(120), self.lines("calls.txt"), self.lines("srun.txt")

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("environ", "signals", "expected"),
    [
        # A run that has stopped is requeued, and no other.
        *(({"STATUS": status}, [], (status, [], STARTED)) for status in (0, 1, 2)),
        ({"STATUS": 137, "SHOWN": "PreemptTime=None"}, [], (137, [SHOW], STARTED)),
        (
            {"STATUS": 143, "SHOWN": "PreemptTime=2026-11-28T05:52:16"},
            [],
            (0, [SHOW, *REQUEUED], STARTED),
        ),
        ({"STATUS": 75}, [], (0, REQUEUED, STARTED)),
        ({"STATUS": 75, "REFUSES": 1}, [], (75, REQUEUED, STARTED)),  # not hidden
        # The warning is passed on, and the run is waited for.
        ({"TENTHS": 100, "HEARD": 75}, [USR1], (0, REQUEUED, HEARD)),
        ({"TENTHS": 4}, [USR1], (0, [], HEARD)),  # it still succeeds
        ({"TENTHS": 100, "HEARD": 1}, [USR1], (1, [], HEARD)),  # a failure is reported
        ({"TENTHS": 7, "STATUS": 3}, [USR1, TERM, USR1], (3, [], [*HEARD, "heard"])),
        # A warning or a cancel during the activation starts no run.
        ({"ACTIVATION_S": 0.3}, [USR1], (0, REQUEUED, [])),
        ({"ACTIVATION_S": 0.3}, [TERM], (138, [SHOW], [])),
        # A cancelled job has saved and stays cancelled.
        *(
            ({"STATE": state, "TENTHS": 3, "STATUS": 75}, [TERM], (75, REQUEUED[:1], STARTED))
            for state in ("COMPLETING", "CANCELLED", "")
        ),
    ],
)
def test_a_job_ends_as_its_run_does_and_is_requeued_where_that_goes_on(
    node, environ, signals, expected
):
    assert node.run(*signals, **environ) == expected


def test_a_warning_that_is_lost_on_its_way_is_repeated(node: Node) -> None:
    node.write("srun", LOSES)
    node.write("sleep", "#!/bin/bash\nexec /bin/sleep 0.3\n")  # between two warnings
    assert node.run(USR1) == (0, REQUEUED, ["started", "lost", "heard"])


def test_a_warning_that_comes_before_the_run_can_hear_it_requeues(node: Node) -> None:
    node.write("srun", DEAF)
    assert node.run(USR1) == (0, REQUEUED, ["started"])


def test_an_activation_that_gives_no_unisono_is_noticed(node: Node) -> None:
    assert node.run(NO_UNISONO=1) == (1, [], [])
    assert node.lines("python.txt") == ["-c import lit_models"]
    errors = "\n".join(node.lines("errors.txt"))
    assert "there is no unisono on" in errors
    assert "give unisono submit the lines that find it with --activate" in errors


def test_where_squeue_does_not_answer_the_way_on_is_said(node: Node) -> None:
    node.write("squeue", "#!/bin/bash\necho squeue >> calls.txt\nexit 1\n")
    assert node.run(STATUS=75) == (75, ["squeue"] * 5, STARTED)
    errors = "\n".join(node.lines("errors.txt"))
    assert "job 7 ended with status 75 and is not requeued: squeue does not say" in errors
    assert "unisono submit as before, with --trainer.default_root_dir=toy_7" in errors
