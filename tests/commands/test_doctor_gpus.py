"""GPUs that are not here: links as `nvidia-smi topo -m` prints them."""

import pytest

from lit_models.doctoring import gpu_links, gpus
from lit_models.doctoring.gpu_links import among, check, links, versions

LEGEND = "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP\n"
LEGEND += "  NV#  = Connection traversing a bonded set of # NVLinks\n"
STYLED = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV12\tSYS\tPXB\t0-23\t0\t\tN/A\n"
    "GPU1\tNV12\t X \tSYS\tPXB\t0-23\t0\t\tN/A\n"
    "GPU2\tSYS\tSYS\t X \tSYS\t24-47\t1\t\tN/A\n"
    "NIC0\tPXB\tPXB\tSYS\t X \n" + LEGEND
)


def plain(link: str) -> str:
    """Return the table of two GPUs."""
    return (
        f"\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \t{link}\t0-15\nGPU1\t{link}\t X \t0-15\n" + LEGEND
    )


def test_pairs_are_read_and_network_cards_are_not():
    assert links(STYLED) == {(0, 1): "NV12", (0, 2): "SYS", (1, 2): "SYS"}
    assert links("") == {}
    assert links("Failed to initialize NVML") == {}


def test_a_far_gpu_among_joined_ones_is_a_warning_and_choosing_others_mends_it():
    found = links(STYLED)
    (finding,) = check(found)
    assert finding.level == "warning"
    assert "1 x NV12 (NVLink), 2 x SYS (PCIe, through the link between CPUs)" in finding.what
    assert "CUDA_VISIBLE_DEVICES" in finding.todo
    (chosen,) = check(among(found, "0,1"))
    assert (chosen.level, chosen.what) == ("ok", "1 pairs: 1 x NV12 (NVLink)")
    assert among(found, "GPU-8a21") == found
    assert among(found, "2") == {}
    assert check({}) == []


@pytest.mark.parametrize(
    ("link", "level"), [("NV18", "ok"), ("PIX", "ok"), ("PHB", "ok"), ("SYS", "warning")]
)
def test_each_kind_of_link_has_its_level(link, level):
    (finding,) = check(links(plain(link)))
    assert finding.level == level
    assert link in finding.what


def test_variables_that_slow_nccl_are_named():
    assert versions({}, "550.54").what.startswith("driver 550.54, CUDA ")
    finding = versions({"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "INFO"}, "550.54")
    assert finding.level == "warning"
    assert "NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1" in finding.what


def test_a_driver_without_a_gpu_for_torch_is_an_error():
    finding = gpus._none("550.54")
    assert (finding.level, "550.54" in finding.what) == ("error", True)
    assert gpus._none(None).level == "ok"


def test_the_machine_is_asked_for_its_links(monkeypatch):
    monkeypatch.setattr(gpus, "_printed", lambda *command: plain("SYS"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [finding.level for finding in gpus._connected(2)] == ["warning"]
    assert gpus._connected(1) == []
    assert gpu_links.MEANINGS["SYS"] in gpus._connected(2)[0].what
