"""What a process says of its own memory."""

import resource
import subprocess
import sys

import pytest

from lit_models.training import meters

MIB = 2**20
SAYS = "from lit_models.training.meters import most_resident_bytes; print(most_resident_bytes())"


def most_of_a_process() -> int:
    """Return the most bytes that a process held which does nothing but say so."""
    command = [sys.executable, "-c", SAYS]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_the_memory_of_the_program_that_started_it_is_not_counted():
    small = most_of_a_process()
    held = b"\x01" * max(2 * small, 512 * MIB)
    assert abs(most_of_a_process() - small) < 50 * MIB < len(held)


def test_a_kernel_that_does_not_tell_the_peak_is_asked_another_way(tmp_path, monkeypatch):
    status = tmp_path / "status"
    monkeypatch.setattr(meters, "_STATUS", status)
    status.write_text("Name:\tpython\nVmRSS:\t  1024 kB\nThreads:\t1\n", "utf-8")
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unit = 1 if sys.platform == "darwin" else 1024
    assert meters.most_resident_bytes() >= used * unit > 0
    assert not meters.has_host_meter()
    with pytest.raises(ValueError, match=r"memory_budget_gib is 1\.0, but .* is missing here"):
        meters.HostMeter(1.0)
    status.write_text("VmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n", "utf-8")
    assert meters.most_resident_bytes() == 2 * MIB
