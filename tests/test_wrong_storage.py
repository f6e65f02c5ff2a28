"""Folders without access and a full disk: one screen, and existing files stay whole.

The tests may run as root, whom no permission stops: the commands drop that privilege.
"""

import ctypes
import os
import re
import resource
import shutil
import struct
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.distributed.launch import in_world, unisono_here
from tests.wrong_inputs import FIT, ONE_DEVICE, contents, error_of

pytestmark = pytest.mark.slow

CHECKPOINT = "--ckpt_path=runs/mine/checkpoints/last.ckpt"
CODE_MINE = ["predict", *ONE_DEVICE, CHECKPOINT, "--trainer.limit_predict_batches=1.0"]
CODE_MINE += ["--data.predict_files=mine.csv"]
RESUME = [*FIT, "--ckpt_path=auto", "--trainer.max_steps=4", "--trainer.max_epochs=2"]
# A resumed run appends to the first two files, replaces lines of repeated steps in the third, and
# writes its devices into the fourth.
LEDGER, THROUGHPUT = "runs/mine/ledger.jsonl", "runs/mine/throughput.jsonl"
METRICS = "runs/mine/metrics.csv"
TOPOLOGY = "runs/mine/topology.json"


class Limit(NamedTuple):
    """A command that runs under a limit of the storage.

    Attributes:
        argv: the command.
        message: its error, as a pattern.
        file_bytes: the largest size of a file; `None` makes the folder read-only instead.
        mine: the table to code.
        closed: a file without read permission.
    """

    argv: list[str]
    message: str
    file_bytes: int | None = None
    mine: str = "text\nsmith\n"
    closed: str | None = None


LIMITS = {
    "a read-only folder for runs": Limit(
        [*FIT, "--trainer.default_root_dir=runs/new"],
        "runs/new: Permission denied: this user may not write there; choose another --trainer.def",
    ),
    "a read-only run to resume": Limit(
        RESUME, "runs/mine: Permission denied: this user may not write there; choose another"
    ),
    "a read-only folder for the coded table": Limit(
        [*CODE_MINE, "--trainer.default_root_dir=own/run", "--data.predict_output=runs/out.csv"],
        "runs/.out.csv.*Permission denied: this user may not write.*--data.predict_output or --to",
    ),
    "a table that this user may not read": Limit(
        [*FIT, "--trainer.default_root_dir=own/run"],
        "train.csv: Permission denied: this user may not read it; change its rights or name",
        closed="train.csv",
    ),
    "a full disk under a resumed run": Limit(
        RESUME,
        "checkpoint runs/mine/checkpoints/.* could not be written: .*The one before it is kept",
        file_bytes=100_000,
    ),
    "a full disk under the coded table": Limit(
        CODE_MINE,
        "runs/mine/mine.coded.csv: File too large: .*raise `ulimit -f`, go on with",
        file_bytes=40_000,
        mine="text\n" + "smith of the village\n" * 1500,
    ),
    "a full disk under the parts of a prediction": Limit(
        CODE_MINE,
        "part-000000000.npz: File too large: the file-size limit is reached; raise",
        file_bytes=16_000,
        mine="text\n" + "".join(f"{i}\n" for i in range(400)),
    ),
    "a full disk under the cache": Limit(
        FIT,
        r"the cache folder .*cannot be written \(File too large\); free space or name another.*"
        "UNISONO_CACHE",
        file_bytes=300,
    ),
}


_CAPABILITY_VERSION_3 = 0x20080522


def limited(folder: Path, cache: Path, limit: Limit) -> int:
    """Run a command in this process under its limit and return the exit status."""
    os.chdir(folder)
    os.environ |= {"UNISONO_CACHE": str(cache), "HOME": str(cache)}
    if limit.file_bytes is None:
        obey_permissions()
        return unisono_here(*limit.argv)
    # The output is read through a pipe, since the limit holds for the output file too.
    output, (reading, writing) = os.dup(1), os.pipe()
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit.file_bytes, before[1]))
    status = unisono_here(*limit.argv)
    sys.stdout.flush()
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    os.write(output, os.read(reading, 2**16))
    return status


def obey_permissions() -> None:
    """Drop every capability of this process, so that permission bits stop root as well.

    Another user id would do the same, but could not read an environment in root's folders.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24)):
        raise OSError(ctypes.get_errno(), "capset(2) refused to give up the rights of root")


def set_rights(top: Path, mode: int) -> None:
    """Sets these permission bits on a folder, its subfolders and all their files."""
    for path in (top, *top.rglob("*")):
        path.chmod(mode)


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS.keys())
def test_refused_storage_is_one_screen_and_what_was_there_is_whole(
    folder_with_run: Path, tmp_path: Path, limit: Limit
) -> None:
    folder, cache = tmp_path / "work", tmp_path / "cache"
    shutil.copytree(folder_with_run, folder)
    (folder / "mine.csv").write_text(limit.mine)
    before = contents(folder)
    for own in (cache, folder / "own"):
        own.mkdir()
    if limit.file_bytes is None:
        set_rights(folder, 0o555)
        (folder / "own").chmod(0o755)
    if limit.closed is not None:
        (folder / limit.closed).chmod(0o000)
    output = in_world(1, limited, folder, cache, limit, status=1)
    set_rights(folder, 0o755)
    after = contents(folder)
    assert re.search(limit.message, error_of(output)), output
    assert after[LEDGER].startswith(before[LEDGER])
    assert after[THROUGHPUT].startswith(before[THROUGHPUT])
    kept = before.keys() - {LEDGER, THROUGHPUT, METRICS, TOPOLOGY}
    assert {path: after.get(path) for path in kept} == {path: before[path] for path in kept}
    new = " ".join(after.keys() - before.keys())
    assert not re.search(r"unfinished|coded\.csv( |$)|\.ckpt", new), new
