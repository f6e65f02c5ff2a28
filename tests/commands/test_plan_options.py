"""`unisono plan`: a command line that cannot be meant ends with 2, before anything is computed."""

import pytest

from lit_models.commands import run_command
from lit_models.commands.plan import numbers, plan
from lit_models.errors import USAGE, UsageError, run_guarded

RUN = ["--model.class_path=tests.toy.LitToy", "--data.class_path=tests.toy.ToyData"]


@pytest.mark.parametrize("devices", ["0", "1,x", "-2", "", "²"])
def test_a_wrong_number_of_devices_is_refused(devices: str) -> None:
    with pytest.raises(UsageError, match="--devices must be numbers"):
        numbers(devices)


def test_a_plan_needs_a_module_and_data(capsys) -> None:
    with pytest.raises(SystemExit):
        plan()
    assert "lacks data, model: give the config of a run" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bandwidth_gib_s", "time_limit_h"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_speed_or_a_time_that_is_not_above_0_is_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"--{name} must be above 0, got {value:g}"):
        plan(RUN, **{name: value})


@pytest.mark.parametrize(
    "options",
    [
        [*RUN, "--devices=0"],
        [*RUN, "--devices=1,x"],
        [*RUN, "--time_limit_h=0", "--rehearse=true"],
        [*RUN, "--bandwidth_gib_s=-1"],
    ],
)
def test_they_end_with_the_status_of_usage(options: list[str], capsys) -> None:
    assert run_guarded(lambda: run_command("plan", options)) == USAGE
    assert capsys.readouterr().err.startswith("error: ")
