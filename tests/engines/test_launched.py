"""What of a command line torchrun's own world fills in."""

from pathlib import Path

import pytest

from lit_models.engines.launched import in_launched_world

SRUN = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "6", "SLURM_NNODES": "3"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}
NODES, DEVICES = "--trainer.num_nodes", "--trainer.devices"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([], [f"{NODES}=3", f"{DEVICES}=2"]),
        ([f"{NODES}=auto", f"{DEVICES}=auto"], [f"{DEVICES}=auto", f"{NODES}=3", f"{DEVICES}=2"]),
        ([f"{DEVICES}=4"], [f"{DEVICES}=4", f"{NODES}=3"]),  # which is then refused
        ([f"{NODES}=3", f"{DEVICES}=2"], [f"{NODES}=3", f"{DEVICES}=2"]),
    ],
)
def test_nodes_and_devices_that_are_not_given_are_those_of_torchrun(given, found):
    assert in_launched_world(["fit", *given], TORCHRUN) == ["fit", *found]


@pytest.mark.parametrize(
    ("given", "environ", "found"),
    [
        ([f"{NODES}=auto"], SRUN, [f"{NODES}=3", f"{DEVICES}=2"]),
        ([f"{NODES}=auto", f"{DEVICES}=4"], SRUN, [f"{DEVICES}=4", f"{NODES}=3"]),  # refused
        ([], SRUN, []),
        ([f"{NODES}=auto"], {"WORLD_SIZE": "2"}, [f"{NODES}=1"]),
        ([], {"WORLD_SIZE": "2"}, []),
    ],
)
def test_without_torchrun_auto_is_the_world_of_slurm_or_one_node(given, environ, found):
    assert in_launched_world(["fit", *given], environ) == ["fit", *found]


def test_a_config_says_auto_in_a_run_and_where_a_command_reads_it(unisono, toy_config):
    text = toy_config.read_text()
    assert "trainer:\n" in text
    toy_config.write_text(text.replace("trainer:\n", "trainer:\n  num_nodes: auto\n"))
    status, output = unisono("fit", "--config=toy.yaml", "--trainer.max_steps=1")
    assert status == 0, output
    assert "num_nodes: 1\n" in Path("runs/toy/config.yaml").read_text()
    status, output = unisono("fit", "--config=toy.yaml", f"{NODES}=auto", "--print_config")
    assert (status, "num_nodes: 1" in output) == (0, True)
    assert unisono("submit", "--config=toy.yaml", "--dry-run", "--nodes=2")[0] == 0
