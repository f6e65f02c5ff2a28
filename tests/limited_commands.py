"""Runs command lines under limits, each in a fork: the imports, which take seconds, come once.

Called as `python -m tests.limited_commands JOBS.json`; prints one [exit status, output] per job.
"""

import ctypes
import importlib
import json
import os
import resource
import struct
import sys
from pathlib import Path
from typing import Any

MODULES = (
    "datamodules.occupations.datamodule",
    "lit_models.cli",
    "lit_models.occupation_coder.module",
)
_CAPABILITY_VERSION_3 = 0x20080522


def run(job: dict[str, Any]) -> tuple[int, str]:
    """Returns the exit status and the output of one command.

    Args:
        job: `folder` to work in, `cache`, `argv`, and the limit: `file_bytes`, or none for a
            process that permission bits stop, also when root owns it.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        status = 70
        try:
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            os.close(writing)
            status = limited(job)
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        output = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output


def limited(job: dict[str, Any]) -> int:
    """Runs the command in this process under its limit and returns the exit status."""
    from lit_models.__main__ import main

    os.chdir(job["folder"])
    os.environ |= {"UNISONO_CACHE": job["cache"], "HOME": job["cache"]}
    if "file_bytes" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_bytes"], job["file_bytes"]))
    else:
        obey_permissions()
    sys.argv = ["unisono", *job["argv"]]
    try:
        return main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def obey_permissions() -> None:
    """Gives up every capability of this process: permission bits then stop root as well.

    Another user id would do so too, but could not read an environment in root's folders.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(struct.pack("Ii", _CAPABILITY_VERSION_3, 0), bytes(24)):
        raise OSError(ctypes.get_errno(), "capset(2) refused to give up the rights of root")


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps({name: run(job) for name, job in jobs.items()}))
