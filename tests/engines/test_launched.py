"""What of a command line torchrun's own world fills in."""

import pytest

from lit_models.engines.launched import in_launched_world

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


def test_without_torchrun_nothing_is_filled_in():
    assert in_launched_world(["fit", f"{NODES}=auto"], {"WORLD_SIZE": "2"}) == ["fit"]
