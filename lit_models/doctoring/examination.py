"""Everything that the doctor looks at, in the order in which it is shown."""

import os
from collections.abc import Mapping
from pathlib import Path

from lit_models.doctoring import collectives as groups
from lit_models.doctoring import environment, gpus, launchers, machine, meeting
from lit_models.doctoring.findings import Finding, Level, worst

SLURM_FIRST_PORT, SLURM_PORTS = 15000, 10000


def examine(
    devices: int | None, num_nodes: int | None, folder: Path, collectives: bool, timeout_s: float
) -> tuple[list[Finding], Level]:
    """Return what is to be shown, and the level with which this process ends.

    Rank 0 speaks for all; with collectives every rank ends with its level, and the first rank of
    each other machine tells it what is wrong there. A rank that does not find rank 0 speaks itself.

    Arguments as those of `unisono doctor`.
    """
    environ = joined_environment(os.environ)
    is_first = environ is None or environ["RANK"] == "0"
    job: list[Finding] = []
    if is_first:  # before this process takes the port itself
        job = launchers.check(os.environ, devices, num_nodes)
    group: meeting.Meeting | None = None
    if collectives and environ is not None:
        found = meeting.meet(environ, timeout_s)
        if isinstance(found, Finding):
            return [*job, found], "error"
        group = found
    own: list[Finding] = []
    if is_first or (group is not None and group.local_rank == 0):
        own = [*environment.check(), *machine.check(folder), *gpus.check()]
    if group is None:
        return [*own, *job], worst([*own, *job])
    return groups.check_as_rank(group, [*own, *job])


def joined_environment(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return rank, world and rendezvous of a job that a launcher started, none without one.

    Under srun they are made as Lightning makes them, so that the same way is tried.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return dict(environ)
    if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ:
        return None
    if int(environ.get("SLURM_NTASKS") or 1) < 2:
        return None
    from lightning.fabric.plugins.environments import SLURMEnvironment

    port = SLURM_FIRST_PORT + int(environ["SLURM_JOB_ID"][-4:]) % SLURM_PORTS
    nodes = environ.get("SLURM_NODELIST", "127.0.0.1")
    return {
        **environ,
        "RANK": environ["SLURM_PROCID"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "WORLD_SIZE": environ["SLURM_NTASKS"],
        "MASTER_ADDR": environ.get("MASTER_ADDR")
        or SLURMEnvironment.resolve_root_node_address(nodes),
        "MASTER_PORT": environ.get("MASTER_PORT") or str(port),
    }
