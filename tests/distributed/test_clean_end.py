"""After a run, however it ended, no process, port or shared memory of it is left."""

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import TOY
from tests.distributed.launch import ended, free_port, processes_of, started

pytestmark = pytest.mark.slow
FAILS = """
  callbacks:
    class_path: tests.distributed.toy_run.FailsAt
    init_args: {{step: 5, how: {}}}
"""
REMAINS_S = 20.0  # loader workers look every few seconds whether their parent lives


def command(folder: Path, strategy: str, extra: str = "", *options: str) -> list[str]:
    config = folder / "toy.yaml"
    config.write_text(TOY + extra)
    return [
        *("-m", "lit_models", "fit", "--config", str(config)),
        *("--config", f"hardware/{strategy}.yaml"),
        *(f"--trainer.default_root_dir={folder / 'toy'}", "--trainer.accelerator=cpu"),
        *("--data.num_workers=1", *options),
    ]


def is_listening(port: int) -> bool:
    lines = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
    ]
    return any(int(f[1].rpartition(":")[2], 16) == port and f[3] == "0A" for f in lines)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def assert_nothing_is_left(mark: str, port: int, before: set[str]) -> None:
    end = time.monotonic() + REMAINS_S
    while processes_of(mark) and time.monotonic() < end:
        time.sleep(0.2)
    assert processes_of(mark) == []
    assert not is_listening(port)
    assert shared_memory() - before == set()


def interrupt_twice(process: subprocess.Popen, folder: Path) -> None:
    """Press Ctrl-C in the terminal of a run that hangs, and once more."""
    ledger, end = folder / "toy" / "ledger.jsonl", time.monotonic() + 90
    while not ledger.exists() or ledger.read_text().count("\n") < 5:
        assert time.monotonic() < end, "the run did not start"
        time.sleep(0.1)
    for _ in range(2):
        time.sleep(1.5)
        os.killpg(process.pid, signal.SIGINT)


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        *(("ddp", how) for how in ("finished", "raising", "interrupted")),
        ("ddp_spawn", "raising"),
    ],
)
def test_nothing_is_left(tmp_path: Path, strategy: str, how: str) -> None:
    # Of ddp one rank hangs and the other waits for it; of ddp_spawn none is in a collective.
    hangs = FAILS.format("hang" if strategy == "ddp" else "stall")
    extra = {"finished": "", "raising": FAILS.format("raise"), "interrupted": hangs}
    port, before = free_port(), shared_memory()
    process, mark = started(*command(tmp_path, strategy, extra[how]), MASTER_PORT=str(port))
    if how == "interrupted":
        interrupt_twice(process, tmp_path)
    try:
        output, _ = process.communicate(timeout=60)
        assert_nothing_is_left(mark, port, before)
    finally:
        ended(process, mark)
    assert (process.returncode == 0) == (how == "finished"), output
    facts = json.loads((tmp_path / "toy" / "topology.json").read_text())
    assert (facts["strategy"], facts["world_size"]) == (strategy, 2)
    assert facts["rendezvous"] == f"127.0.0.1:{port}"
    if how == "raising":
        assert "a word that no dictionary has" in output


def test_a_port_that_is_taken_ends_all_and_is_one_screen(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        process, mark = started(*command(tmp_path, "ddp"), MASTER_PORT=str(port))
        try:
            output, _ = process.communicate(timeout=60)
            assert processes_of(mark) == []
        finally:
            ended(process, mark)
    assert process.returncode == 1
    assert output.count(f"port {port} is taken by another program") == 1, output
    assert "Traceback" not in output, output
