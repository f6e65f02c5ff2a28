"""The table of `unisono plan`: which columns there are, and how they are shown."""

import json

import pytest
from rich.console import Console

from lit_models.commands import run_command
from lit_models.errors import USAGE, run_guarded
from lit_models.forecasting import prediction, table
from lit_models.forecasting.exchange import State
from lit_models.forecasting.probe import Forecast, World
from lit_models.forecasting.rehearsal import Rehearsed
from lit_models.training.memory import GIB, StateSize

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


def _forecast(*counts: int, rehearsed: Rehearsed | None = None) -> Forecast:
    """Return one of a network with 1 GiB of weights, all of them trained, in two micro-batches."""
    worlds = [World(n, 512, 4, 2, 10, 20, None, 0.1, 160, rehearsed) for n in counts]
    size = StateSize(GIB // 4, GIB // 4, gathered_parameters=100)
    return Forecast(80, size, State(GIB, []), "none", False, worlds)


@pytest.mark.parametrize("width", [80, 60, 20])
def test_a_label_is_whole_and_a_row_one_line_on_many_devices(width: int) -> None:
    console = Console(width=width, highlight=False)
    with console.capture() as capture:
        found = _forecast(1, 2, 4, 8, 16, 32, 64, rehearsed=Rehearsed(0.5, 0, 0))
        rows = table.rows(found, 1.0)
        table.show(found, rows, console)
    lines = capture.get().splitlines()
    labels = [line.split("│")[1].rstrip()[1:] for line in lines if line.startswith("│")]
    parts = sum(line.startswith("┃ ") for line in lines)
    expected = [table._label(name) for name in rows if name != "devices"]
    if width > 40:  # below, no column fits beside the labels
        assert labels == expected * parts
        assert "…" not in capture.get()
    assert parts == {80: 2, 60: 3, 20: 7}[width]
    header = " ".join(" ".join(line.split("┃")[2:]) for line in lines if line.startswith("┃ "))
    assert header.split() == ["1", "2", "4", "8", "16", "32", "64"]


def test_the_size_of_a_checkpoint_is_written_as_in_the_table(capsys) -> None:
    assert run_command("plan", [*RUN, "--devices=1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    size = f"{13 * 3 * 4 / GIB:.3g}"  # weights and two moments, in float32
    assert f"GiB, checkpoint │ {size} │" in shown
    assert f"a checkpoint takes {size} GiB." in shown


def test_efficiency_by_hand(monkeypatch) -> None:
    monkeypatch.setattr(prediction, "LOOP_S", 0.0)
    rows = table.rows(_forecast(1, 8, 64, rehearsed=Rehearsed(0.5, 0, 0)), bandwidth_gib_s=10.0)
    # ddp sends 2 (n - 1) / n of the gradients: 1.75 and 1.96875 GiB at 10 GiB/s, beside 0.5 s.
    assert rows["efficiency"] == [None, pytest.approx(0.5 / 0.675), pytest.approx(0.5 / 0.696875)]
    # fsdp of two micro-batches gathers weights four times and sums gradients twice, each half of
    # that way: three times as much.
    expected = [None, pytest.approx(0.5 / 1.025), pytest.approx(0.5 / 1.090625)]
    assert rows["efficiency, fsdp"] == expected


def test_efficiency_needs_seconds_and_a_bandwidth() -> None:
    assert "efficiency" not in table.rows(_forecast(8), bandwidth_gib_s=10.0)
    assert "efficiency" not in table.rows(_forecast(1, 8, rehearsed=Rehearsed(0.5, 0, 0)))
