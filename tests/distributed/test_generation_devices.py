"""Samples and completions do not depend on the number of devices, nor on the strategy."""

import pytest

from tests.causal_lm.tiny import texts_of
from tests.distributed.launch import run
from tests.toy import ledger_lines

pytestmark = pytest.mark.slow
WORLDS = {"one": (), "fsdp": ("2", "fsdp")}  # ddp: the matrix


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder per strategy, and what the commands printed."""
    folder, printed = tmp_path_factory.mktemp("generation"), {}
    for name, world in WORLDS.items():
        options = ("--devices", world[0], "--strategy", world[1]) if world else ()
        done = run("-m", "tests.distributed.generation_run", str(folder / name), *options)
        assert done.returncode == 0, done.stdout[-4000:]
        printed[name] = done.stdout
    return folder, printed


@pytest.mark.parametrize("name", list(WORLDS)[1:])
def test_two_devices_write_what_one_writes(runs, name):
    folder, printed = runs
    one, two = folder / "one", folder / name
    assert (two / "out.jsonl").read_bytes() == (one / "out.jsonl").read_bytes()
    assert texts_of(two) == texts_of(one)
    assert printed[name].count("a sample: the") == 1
    losses = [[line["loss"] for line in ledger_lines(run)] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-10)
