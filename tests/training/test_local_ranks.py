"""Ranks on this machine end with the process that started them."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from lit_models.training.local_ranks import LAUNCHED_BY, end_with_parent, sigterm_as_exit

RANK = """
import os, pathlib, sys, time
from lit_models.training.local_ranks import end_with_parent
end_with_parent(os.environ)
path = pathlib.Path(sys.argv[1], os.environ["RANK"] + ".pid")
path.with_suffix(".new").write_text(str(os.getpid()))
path.with_suffix(".new").rename(path)
time.sleep(120)
"""
STARTER = """
import pathlib, sys, tempfile
from lit_models.training.local_ranks import run_ranks, sigterm_as_exit
with sigterm_as_exit(), tempfile.TemporaryDirectory() as name:
    run_ranks(2, ["-c", sys.argv[1], sys.argv[2]], None, True, errors=pathlib.Path(name))
"""


def is_running(process_id):
    """Return whether a process is there and has not ended, waited for or not."""
    try:
        with open(f"/proc/{process_id}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until(is_so, timeout_s=60.0):
    end = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends children so")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_their_parent(number, tmp_path):
    pids, temporary = tmp_path / "pids", tmp_path / "temporary"
    pids.mkdir()
    temporary.mkdir()
    command = [sys.executable, "-c", STARTER, RANK, str(pids)]
    parent = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(temporary)})
    try:
        wait_until(lambda: len(list(pids.glob("*.pid"))) == 2)
        ranks = [int(path.read_text()) for path in pids.glob("*.pid")]
        assert all(map(is_running, ranks))
        assert list(temporary.iterdir())
        parent.send_signal(number)
        status = parent.wait(60)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not any(map(is_running, ranks)), 10.0)
    if number == signal.SIGTERM:
        assert status == 128 + signal.SIGTERM
        assert not list(temporary.iterdir())


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends children so")
def test_a_rank_whose_parent_ended_before_it_was_watched_ends(monkeypatch):
    monkeypatch.setattr("ctypes.CDLL", lambda *_, **__: _Libc())
    end_with_parent({LAUNCHED_BY: str(os.getppid())})
    other = {LAUNCHED_BY: "1" if os.getppid() != 1 else "2"}
    with pytest.raises(RuntimeError, match="started this rank is gone"):
        end_with_parent(other)
    assert not other


class _Libc:
    """Does not tie the process that tests."""

    def prctl(self, *_):
        return 0


def test_sigterm_is_put_back_and_left_alone_in_other_threads():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"), sigterm_as_exit():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    seen = []

    def elsewhere():
        with sigterm_as_exit():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]
