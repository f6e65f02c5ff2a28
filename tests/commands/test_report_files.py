"""`unisono report` on folders that are torn, incomplete, still growing, or none at all."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_models.commands.report import report
from lit_models.errors import UsageError
from lit_models.reporting.reading import read_run
from lit_models.reporting.timing import forecast_of, plan_rows
from tests.commands.run_folders import page_of, run_folder, text_of, throughput_line


def test_a_failure_is_told(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", topology={"is_over": False})
    failure = {"rank": 1, "step": 7, "error": "ValueError: no"}
    (folder / "failure.json").write_text(json.dumps(failure))
    assert "Failed after 6 steps (rank 1, step 7): ValueError: no" in text_of(page_of(folder))


def test_torn_files_and_missing_ones_are_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", topology={"is_over": False})
    with (folder / "ledger.jsonl").open("a") as file:
        file.write('{"epoch": 2, "st')
    (folder / "throughput.jsonl").write_text(json.dumps(throughput_line(1, 2, 1, 3)) + '\n{"att')
    (folder / "topology.json").write_text('{"strategy": ')
    for name in ("plan.json", "config.yaml", "metrics.csv"):
        (folder / name).unlink()
    words = text_of(page_of(folder))
    assert "The ledger's last line is torn" in words
    assert "throughput.jsonl has 1 damaged lines" in words
    assert "topology.json is damaged" in words
    assert "There is no metrics.csv" in words
    assert "There is no config.yaml" in words
    assert "Not checked:" in words


def test_values_that_are_not_finite_and_an_empty_table_of_metrics(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", losses={5: math.nan, 6: math.inf}, metrics="step,epoch\n")
    words = text_of(page_of(folder))
    assert "Not finite at 2 steps (5, 6)" in words
    assert "No evaluation wrote a metric." in words
    assert "metrics.csv holds no value." in words


def test_a_run_that_has_begun_and_done_nothing(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", attempts=((1, 0, 0),), topology={"is_over": False})
    assert "In progress: 0 of 6 steps" in text_of(page_of(folder))
    (folder / "ledger.jsonl").write_text("")
    assert "The ledger is empty" in text_of(page_of(folder))


def test_a_wrong_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no run folder; name one"):
        report(tmp_path / "none")
    with pytest.raises(UsageError, match="holds no ledger.jsonl; name a run folder"):
        report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_earlier_report_is_replaced_but_no_other_file(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a")
    assert page_of(folder) == page_of(folder)
    (folder / "report.html").write_text("<!doctype html><p>mine")
    with pytest.raises(UsageError, match="is no report of this command, so it is not replaced"):
        report(folder)
    assert (folder / "report.html").read_text() == "<!doctype html><p>mine"
    with pytest.raises(UsageError, match="there is no folder"):
        report(folder, to=tmp_path / "none" / "x.html")
    with pytest.raises(UsageError, match="is a folder; name a file"):
        report(folder, to=tmp_path)
    assert report(folder, to=tmp_path / "x.html") == 0


def test_a_run_stands_beside_the_forecast_of_its_strategy_alone(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", topology={"strategy": "fsdp"})
    foreseen = {"devices": [2], "s per step": [0.4], "s per step, fsdp": [0.3], "GiB, ddp": [0.8]}
    (tmp_path / "plan.json").write_text(
        json.dumps({**foreseen, "GiB, ddp: weights": [0.1], "h in all": [2.0]})
    )
    run = read_run(folder, folder / "config.yaml", 0.0)
    rows = {row[0]: row[1:] for row in plan_rows(run, forecast_of(run, tmp_path / "plan.json"))}
    assert rows.get("s per step, fsdp") == ["0.3000", "0.5000", "1.67"]
    assert rows["GiB, fsdp"][0] == rows["h in all"][0] == "–"
    assert not {"s per step", "GiB, ddp", "GiB, ddp: weights"} & set(rows)


def test_a_forecast_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder, path = run_folder(tmp_path / "a"), tmp_path / "plan.json"
    with pytest.raises(UsageError, match="does not exist; write it: unisono plan"):
        report(folder, forecast=path)
    path.write_text("table")
    with pytest.raises(UsageError, match="is no JSON"):
        report(folder, forecast=path)
    path.write_text('{"a": 1}')
    with pytest.raises(UsageError, match='lacks the list "devices"'):
        report(folder, forecast=path)
    path.write_text('{"devices": [4], "s per step": [1.0]}')
    with pytest.raises(UsageError, match="has columns for 4 devices, the run used 2"):
        report(folder, forecast=path)
    path.write_text('{"devices": [1, 2], "s per step": [1.0]}')
    with pytest.raises(UsageError, match='"s per step" has 1 values for 2 numbers of devices'):
        report(folder, forecast=path)
    path.write_text('{"devices": [2], "s per step": [1.0]}')
    (folder / "topology.json").write_text("{}")
    (folder / "ledger.jsonl").write_text("")
    with pytest.raises(UsageError, match="names no such number: no attempt has begun"):
        report(folder, forecast=path)


def test_what_a_user_typed_wrong_ends_with_status_2_and_a_damaged_run_with_1(
    tmp_path: Path, unisono: Callable[..., tuple[int, str]]
) -> None:
    folder = run_folder(tmp_path / "a")
    foreign = tmp_path / "mine.txt"
    foreign.write_text("mine")
    wrong = (
        ["nowhere"],
        [folder, "nowhere"],
        [folder, f"--to={foreign}"],
        [folder, folder, f"--to={foreign}"],
        [folder, f"--forecast={foreign}"],
        [folder, "--forecast=nowhere"],
        [folder, folder, "--forecast=x"],
    )
    for arguments in wrong:
        status, output = unisono("report", *map(str, arguments))
        assert (status, output.partition(":")[0]) == (2, "error")
    (folder / "ledger.jsonl").write_text("damaged\n{}\n")
    assert unisono("report", str(folder))[0] == 1
