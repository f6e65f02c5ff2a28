"""Runs command lines under limits, each in a fork: the imports, which take seconds, come once.

Called as `python -m tests.limited_commands JOBS.json`; prints one [exit status, output] per job.
"""

import importlib
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

NOBODY = 65534
# Another user may not be able to read the installation: nothing is left to be imported later.
MODULES = (
    "datamodules.occupations",
    "encodings.utf_32_le",
    "lit_models.launch",
    "lit_models.occupation_coder.baseline",
    "lit_models.occupation_coder.figures",
    "lit_models.occupation_coder.module",
    "tensorboard.summary",
)


def run(job: dict[str, Any]) -> tuple[int, str]:
    """Returns the exit status and the output of one command.

    Args:
        job: `folder` to work in, `cache`, `argv`, and the limit: `file_bytes`, or none for the
            rights of a user who owns nothing.
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
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    sys.argv = ["unisono", *job["argv"]]
    try:
        return main()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    for name in MODULES:
        importlib.import_module(name)
    jobs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(json.dumps({name: run(job) for name, job in jobs.items()}))
