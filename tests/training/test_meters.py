"""What a process says of its own memory."""

import subprocess
import sys

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
