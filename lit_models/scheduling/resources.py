"""What a job asks the cluster for, checked before it waits a night for it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lit_models.errors import UsageError

NODE_GPUS = 8  # of a machine of which nothing is known
MOST_AHEAD_S = 65535  # of sbatch --signal
# In the order of the manual of sbatch: minutes, minutes:seconds, hours:minutes:seconds, then days.
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
COUNTS = ("nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task", "node_gpus", "save_ahead_s")
TIME_RULE = "write 24:00:00, 90 (minutes) or 2-12 (days and hours)"


@dataclass(frozen=True)
class Resources:
    """Of one job.

    Args:
        nodes: machines.
        tasks_per_node: processes on each, one for a GPU.
        gpus_per_node: none for a job on CPUs.
        cpus_per_task: none leaves it to the cluster.
        node_gpus: how many a machine has.
        exclusive: nobody else's jobs on these machines; none is yes where all GPUs are used.
        nodelist: machines that must be among them.
        partition: none takes the cluster's default.
        account: none takes the user's default.
        time_limit: as sbatch takes it.
        save_ahead_s: how long before it the run is told to save.
    """

    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    node_gpus: int = NODE_GPUS
    exclusive: bool | None = None
    nodelist: str | None = None
    partition: str | None = None
    account: str | None = None
    time_limit: str = "24:00:00"
    save_ahead_s: int = 300

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(
                    f"--{name.replace('_', '-')} must be 1 or more, got {value}"
                    + ("; leave it out for a job on CPUs." if name == "gpus_per_node" else ".")
                )
        for name in ("partition", "account", "nodelist"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"\S+", value):
                raise UsageError(
                    f"--{name}={value!r} must be one word, without spaces or line breaks."
                )
        _check_gpus(self.gpus_per_node, self.nodes, self.node_gpus)
        if self.gpus_per_node and self.tasks_per_node != self.gpus_per_node:
            raise UsageError(
                f"--tasks-per-node={self.tasks_per_node} with --gpus-per-node="
                f"{self.gpus_per_node}: a GPU has one process; leave --tasks-per-node out."
            )
        limit_s = seconds(self.time_limit)
        if self.save_ahead_s >= limit_s or self.save_ahead_s > MOST_AHEAD_S:
            raise UsageError(
                f"--save-ahead-s={self.save_ahead_s} must be below the time limit {self.time_limit}"
                f" ({limit_s} s) and at most {MOST_AHEAD_S}: it is how long before it the run "
                "saves. Lower it, or raise --time-limit."
            )

    @property
    def processes(self) -> int:
        """On all machines."""
        return self.nodes * self.tasks_per_node

    @property
    def is_exclusive(self) -> bool:
        """Whether nobody else's jobs run on these machines."""
        return self.gpus_per_node == self.node_gpus if self.exclusive is None else self.exclusive

    def in_words(self) -> str:
        """Return such as "2 nodes x 8 GPUs"."""
        kind = "GPU" if self.gpus_per_node else "CPU process"
        ending = "" if self.tasks_per_node == 1 else "s" if self.gpus_per_node else "es"
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        return f"{nodes} x {self.tasks_per_node} {kind}{ending}"


def seconds(time_limit: str) -> int:
    """Return a time limit in seconds.

    Raises:
        UsageError: sbatch would not read it, or it is no time at all.
    """
    match = TIME.fullmatch(str(time_limit).strip())
    if match is None:
        raise UsageError(f"--time-limit={time_limit} is no time; {TIME_RULE}.")
    days, *rest = match.groups()
    values = [int(value) for value in rest if value is not None]
    if days is not None:
        factors = (3600, 60, 1)
    else:
        factors = (60, 1, 0) if len(values) < 3 else (3600, 60, 1)
    total = int(days or 0) * 86400 + sum(v * f for v, f in zip(values, factors, strict=False))
    if total < 60:
        raise UsageError(
            f"--time-limit={time_limit} is {total} s, and SLURM counts whole minutes; {TIME_RULE}."
        )
    return total


def _check_gpus(gpus_per_node: int | None, nodes: int, node_gpus: int) -> None:
    """Refuse more GPUs on a machine than it has, and say how many machines to take."""
    if gpus_per_node is None or gpus_per_node <= node_gpus:
        return
    in_all = gpus_per_node * nodes
    needed, each = machines_for(in_all, node_gpus)
    raise UsageError(
        f"--gpus-per-node={gpus_per_node}: a node has {node_gpus}. For {in_all} GPUs take "
        f"--nodes={needed} --gpus-per-node={each}; if a node has more, say so with --node-gpus."
    )


def machines_for(processes: int, most: int) -> tuple[int, int]:
    """Return the fewest machines with equally many processes each, and how many that are.

    Args:
        processes: in all.
        most: on one machine.
    """
    nodes = next(
        n for n in range(1, processes + 1) if processes % n == 0 and processes // n <= most
    )
    return nodes, processes // nodes


def usable_nodelist(nodelist: str | None, nodes: int) -> tuple[str | None, str]:
    """Return the node list that the job asks for, and a warning where it is ignored."""
    if nodelist is None or nodes > 1 or not re.search(r"[,\[]", nodelist):
        return nodelist, ""
    return None, (
        f"--nodelist={nodelist} is ignored: the job has one node, and SLURM reads a list of several"
        " as all of them at once, not as a choice; name one, or leave out the others with "
        "--partition"
    )


def gpus_of_nodes(listing: str) -> int | None:
    """Return the most GPUs of a node in the words of `sinfo -h -o %G`, none if there are none.

    Args:
        listing: a line for each kind of node, such as gpu:a100:8(S:0-1) or (null).
    """
    counts = [
        sum(int(n) for n in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", line))
        for line in listing.splitlines()
    ]
    return max(counts, default=0) or None
