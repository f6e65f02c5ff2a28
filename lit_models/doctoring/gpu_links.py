"""How GPUs are connected: NVLink or PCIe, as `nvidia-smi topo -m` prints it, and by which NCCL."""

import re
from collections import Counter
from collections.abc import Mapping

from lit_models.doctoring.findings import Finding, ok

Links = dict[tuple[int, int], str]  # pair of GPUs, the smaller first -> its link
ACROSS_BRIDGES = ("NODE", "SYS")
# From near to far, by the legend that the program prints below its table.
MEANINGS = {
    "PIX": "PCIe, one switch",
    "PXB": "PCIe, several switches",
    "PHB": "PCIe, through the CPU",
    "NODE": "PCIe, through one NUMA node",
    "SYS": "PCIe, through the link between CPUs",
}
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def links(printed: str) -> Links:
    """Return the link of each pair of GPUs.

    Args:
        printed: by `nvidia-smi topo -m`: a row for each GPU, its cells in the order of the columns
            of the first line; columns of network cards and affinities follow.

    Source: nvidia-smi's manual, "topo", and the legend of its output.
    """
    lines = [_STYLE.sub("", line).split() for line in printed.splitlines()]
    header = next((cells for cells in lines if cells and cells[0] == "GPU0"), [])
    columns = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    found: Links = {}
    for cells in lines:
        if cells is header or not cells or cells[0] not in columns:
            continue
        row = int(cells[0].removeprefix("GPU"))
        for name, link in zip(columns, cells[1:], strict=False):
            column = int(name.removeprefix("GPU"))
            if row < column:
                found[row, column] = link
    return found


def among(found: Links, visible: str | None) -> Links:
    """Return the links between the GPUs that this process sees.

    Args:
        found: of all GPUs of the machine.
        visible: CUDA_VISIBLE_DEVICES; none, or names instead of numbers, keeps all.
    """
    numbers = (visible or "").split(",")
    if not all(number.strip().isdigit() for number in numbers):
        return found
    chosen = {int(number) for number in numbers}
    return {pair: link for pair, link in found.items() if chosen.issuperset(pair)}


def check(found: Links) -> list[Finding]:
    """Return a finding on the links; none where there are no pairs."""
    if not found:
        return []
    counts = Counter(found.values())
    shown = ", ".join(f"{count} x {_words(link)}" for link, count in sorted(counts.items()))
    what = f"{len(found)} pairs: {shown}"
    slow = [link for link in counts if link in ACROSS_BRIDGES]
    if all(link.startswith("NV") for link in counts) or not slow:
        return [ok("gpu links", what)]
    has_nvlink = any(link.startswith("NV") for link in counts)
    way = (
        "let a run use GPUs that NVLink joins: CUDA_VISIBLE_DEVICES, nvidia-smi topo -m"
        if has_nvlink
        else "larger micro-batches and fewer steps between exchanges; ddp before fsdp"
    )
    return [
        Finding(
            "gpu links",
            "warning",
            what,
            "the slowest link sets the pace of every exchange of gradients",
            way,
        )
    ]


def versions(environ: Mapping[str, str], driver: str | None) -> Finding:
    """Return a finding on driver, CUDA and NCCL, and what NCCL was told.

    Args:
        environ: whose NCCL_ variables count.
        driver: its version; none where nvidia-smi does not say.
    """
    import torch

    parts = [f"driver {driver or 'unknown'}", f"CUDA {torch.version.cuda or 'none'} in torch"]
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        parts.append("NCCL " + ".".join(map(str, torch.cuda.nccl.version())))
    told = sorted(name for name in environ if name.startswith("NCCL_"))
    what = ", ".join(parts) + "".join(f"; {name}={environ[name]}" for name in told)
    if environ.get("NCCL_P2P_DISABLE") == "1":
        return Finding(
            "driver",
            "warning",
            what,
            "GPUs exchange gradients through the host's memory",
            "unset NCCL_P2P_DISABLE, unless a link between GPUs is broken",
        )
    return ok("driver", what)


def _words(link: str) -> str:
    return f"{link} (NVLink)" if link.startswith("NV") else f"{link} ({MEANINGS.get(link, '?')})"
