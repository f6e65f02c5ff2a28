"""The table of `unisono plan`: which columns there are, and how they are shown."""

import json

import pytest

from lit_models.cli_errors import USAGE, run_guarded
from lit_models.commands import run_command

RUN = (
    "--model.class_path=tests.toy.LitToy",
    "--data.class_path=tests.toy.ToyData",
    "--data.num_samples=50",
    "--data.global_batch_size=8",
    "--trainer.max_epochs=1",
    "--trainer.accelerator=cpu",
)


def test_devices_that_would_have_nothing_to_do_are_named_below_the_table(capsys) -> None:
    assert run_command("plan", [*RUN, "--devices=2,8,16"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "devices ┃ 2 ┃ 8 ┃" in shown
    assert "Left out: 16 devices. data.global_batch_size=8 is smaller than devices x" in shown


def test_scripts_get_the_other_columns_and_the_reason_beside_them(capsys) -> None:
    assert run_command("plan", [*RUN, "--devices=2,16", "--json=true"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["devices"] == [2]
    assert "left out: 16 devices" in printed.err


@pytest.mark.parametrize("devices", ["16", "16,32"])
def test_a_plan_for_no_other_devices_is_refused(devices: str, capsys) -> None:
    assert run_guarded(lambda: run_command("plan", [*RUN, f"--devices={devices}"])) == USAGE
    shown = " ".join(capsys.readouterr().err.split())
    assert "Use fewer devices or data.global_batch_size >= 16." in shown
