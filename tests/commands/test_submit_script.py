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
SQUEUE = '#!/bin/bash\necho squeue "$@" >> calls.txt\nexec cat state.txt\n'
SLEEP = '#!/bin/bash\n[ "$1" = 5 ] || exec /bin/sleep "$1"\n'  # no wait between two checks
SCONTROL = '#!/bin/bash\necho scontrol "$@" >> calls.txt\necho "$SHOWN"\nexit $REFUSES\n'
PYTHON = '#!/bin/bash\necho "$@" > python.txt\nexit $NO_UNISONO\n'
SHOW = "scontrol show job 7"
REQUEUED = ["squeue --noheader --jobs=7 --format=%T", "scontrol requeue 7"]


class Node:
    """A folder with a job's script and the stand-ins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        resources = Resources(activate=["touch begun; sleep $ACTIVATION_S"])
        script = Script(resources, "toy", "python", ['srun "$run"'], "toy_$SLURM_JOB_ID")
        self.write("job.sh", script.text(Path("job.sh")))
        for name, content in (
            ("srun", SRUN),
            ("squeue", SQUEUE),
            ("scontrol", SCONTROL),
            ("python", PYTHON),
            ("sleep", SLEEP),
        ):
            self.write(name, content)
        (folder / "state.txt").write_text("RUNNING\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def start(self, **environ: object) -> subprocess.Popen:
        values = {"STATUS": 0, "TENTHS": 1, "HEARD": "", "REFUSES": 0, "ACTIVATION_S": 0}
        values |= {"NO_UNISONO": 0, **environ}
        path = f"{self.folder}:{os.environ['PATH']}"
        with (self.folder / "errors.txt").open("w") as errors:
            return subprocess.Popen(
                ["bash", "job.sh"],
                cwd=self.folder,
                env={"PATH": path, "SLURM_JOB_ID": "7", **{k: str(v) for k, v in values.items()}},
                stderr=errors,
            )

    def run(self, **environ: object) -> int:
        return self.start(**environ).wait(120)

    def signalled(
        self, *signals: signal.Signals, after: str = "srun.txt", **environ: object
    ) -> int:
        """Send signals once a file exists; return the exit status."""
        job = self.start(**environ)
        end = time.monotonic() + 120
        while not (self.folder / after).exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        for signum in signals:
            job.send_signal(signum)
            time.sleep(0.15)
        return job.wait(120)

    @property
    def calls(self) -> list[str]:
        path = self.folder / "calls.txt"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def errors(self) -> str:
        return (self.folder / "errors.txt").read_text()

    @property
    def srun(self) -> list[str]:
        return (self.folder / "srun.txt").read_text().splitlines()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("environ", "status", "calls"),
    [
        *(({"STATUS": status}, status, []) for status in (0, 1, 2)),
        ({"STATUS": 137, "SHOWN": "PreemptTime=None"}, 137, [SHOW]),
        ({"STATUS": 143, "SHOWN": "PreemptTime=2026-11-28T05:52:16"}, 0, [SHOW, *REQUEUED]),
        ({"STATUS": 75}, 0, REQUEUED),
        ({"STATUS": 75, "REFUSES": 1}, 75, REQUEUED),  # not hidden
    ],
)
def test_a_run_that_has_stopped_is_requeued_and_no_other(node, environ, status, calls):
    assert node.run(**environ) == status
    assert (node.calls, node.srun) == (calls, ["started toy_7"])


@pytest.mark.parametrize(
    ("environ", "status", "calls"),
    [
        ({"TENTHS": 100, "HEARD": 75}, 0, REQUEUED),
        ({"TENTHS": 4}, 0, []),  # it still succeeds
        ({"TENTHS": 100, "HEARD": 1}, 1, []),  # a failure is reported
    ],
)
def test_the_warning_is_passed_on_and_the_run_is_waited_for(node, environ, status, calls):
    assert node.signalled(signal.SIGUSR1, **environ) == status
    assert (node.calls, node.srun) == (calls, ["started toy_7", "heard"])


def test_a_warning_that_is_lost_on_its_way_is_repeated(node: Node) -> None:
    node.write("srun", LOSES)
    node.write("sleep", "#!/bin/bash\nexec /bin/sleep 0.3\n")  # between two warnings
    assert (node.signalled(signal.SIGUSR1), node.calls) == (0, REQUEUED)
    assert node.srun == ["started", "lost", "heard"]


def test_the_status_is_that_of_the_run_however_often_the_wait_is_disturbed(node: Node) -> None:
    signals = [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1]
    assert node.signalled(*signals, TENTHS=7, STATUS=3) == 3
    assert (node.srun.count("heard"), node.calls) == (2, [])


def test_a_warning_that_comes_before_the_run_can_hear_it_requeues(node: Node) -> None:
    node.write("srun", DEAF)
    assert (node.signalled(signal.SIGUSR1), node.calls) == (0, REQUEUED)


@pytest.mark.parametrize(
    ("signum", "status", "calls"), [(signal.SIGUSR1, 0, REQUEUED), (signal.SIGTERM, 138, [SHOW])]
)
def test_a_warning_or_a_cancel_during_the_activation_starts_no_run(node, signum, status, calls):
    ended = node.signalled(signum, after="begun", ACTIVATION_S=0.3)
    assert (ended, node.calls) == (status, calls)
    assert not (node.folder / "srun.txt").exists()


def test_an_activation_that_gives_no_unisono_is_noticed(node: Node) -> None:
    assert node.run(NO_UNISONO=1) == 1
    assert (node.folder / "python.txt").read_text() == "-c import lit_models\n"
    assert "there is no unisono on" in node.errors
    assert "give unisono submit the lines that find it with --activate" in node.errors
    assert not (node.folder / "srun.txt").exists()


def test_where_squeue_does_not_answer_the_way_on_is_said(node: Node) -> None:
    node.write("squeue", "#!/bin/bash\necho squeue >> calls.txt\nexit 1\n")
    assert (node.run(STATUS=75), node.calls) == (75, ["squeue"] * 5)
    assert "job 7 ended with status 75 and is not requeued: squeue does not say" in node.errors
    assert "unisono submit as before, with --trainer.default_root_dir=toy_7\n" in node.errors


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", ""])
def test_a_cancelled_job_stays_cancelled_and_has_saved(node: Node, state: str) -> None:
    (node.folder / "state.txt").write_text(state)
    assert node.signalled(signal.SIGTERM, TENTHS=3, STATUS=75) == 75
    assert node.calls == REQUEUED[:1]
