"""What a job asks for: its times, its GPUs and the machines for them."""

import pytest

from lit_models.scheduling.resources import Resources, gpus_of_nodes, machines_for, seconds


def test_times_are_read_as_sbatch_reads_them() -> None:
    times = {"90": 5400, "90:30": 5430, "24:00:00": 86400, "2-12": 216000, "1-02:03:04": 93784}
    assert {text: seconds(text) for text in times} == times
    with pytest.raises(ValueError, match="--time-limit=0:30 is 30 s, and SLURM counts whole min"):
        seconds("0:30")
    with pytest.raises(ValueError, match="--save-ahead-s=70000 must be .* at most 65535"):
        Resources(save_ahead_s=70000)


def test_the_gpus_of_nodes_and_the_nodes_for_gpus() -> None:
    assert gpus_of_nodes("(null)\ngpu:a100:8(S:0-1),shard:16\ngpu:4\n") == 8
    assert gpus_of_nodes("gpu:a100:2,gpu:h100:4") == 6
    assert gpus_of_nodes("(null)\n") is None
    found = [machines_for(n, 8) for n in (1, 8, 12, 16, 13)]
    assert found == [(1, 1), (1, 8), (2, 6), (2, 8), (13, 1)]
