"""What of a command line torchrun's own world fills in."""

import pytest

from lit_models.engines.launched import in_launched_world

SRUN = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "6", "SLURM_NNODES": "3"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}
NODES, DEVICES = "--trainer.num_nodes", "--trainer.devices"


@pytest.mark.parametrize(
    ("environ", "given", "found"),
    [
        (TORCHRUN, [], [f"{NODES}=3", f"{DEVICES}=2"]),
        (TORCHRUN, [f"{DEVICES}=auto"], [f"{DEVICES}=auto", f"{NODES}=3", f"{DEVICES}=2"]),
        (TORCHRUN, [f"{DEVICES}=4"], [f"{DEVICES}=4", f"{NODES}=3"]),  # which is then refused
        (TORCHRUN, [f"{NODES}=3", f"{DEVICES}=2"], [f"{NODES}=3", f"{DEVICES}=2"]),
        (SRUN, [f"{NODES}=auto"], [f"{NODES}=3", f"{DEVICES}=2"]),
        (SRUN, [f"{NODES}=auto", f"{DEVICES}=4"], [f"{DEVICES}=4", f"{NODES}=3"]),
        (SRUN, [], []),
        ({"WORLD_SIZE": "2"}, [f"{NODES}=auto"], [f"{NODES}=1"]),
    ],
)
def test_nodes_and_devices_are_those_of_the_launcher(environ, given, found):
    assert in_launched_world(["fit", *given], environ) == ["fit", *found]


def test_a_config_says_auto_in_a_run_and_where_a_command_reads_it(unisono, toy_config):
    text = toy_config.read_text()
    toy_config.write_text(text.replace("\ntrainer:\n", "\ntrainer:\n  num_nodes: auto\n"))
    for more in ([], [f"{NODES}=auto"]):
        status, output = unisono("fit", "--config=toy.yaml", *more, "--print_config")
        assert (status, "num_nodes: 1\n" in output) == (0, True)
    assert unisono("submit", "--config=toy.yaml", "--dry-run", "--nodes=2")[0] == 0
