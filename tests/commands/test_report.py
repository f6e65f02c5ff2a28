"""`unisono report RUN`: what the page says of folders whose every value is known."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_models.reporting.outcome import attempts
from lit_models.reporting.reading import RunRecord, ledger_series, read_run
from lit_models.reporting.timing import forecast_of, measured, plan_rows, split_of
from lit_models.training.provenance import code_facts, command_line
from tests.commands.run_folders import METRICS, page_of, run_folder, text_of, throughput_line

Unisono = Callable[..., tuple[int, str]]


def record(folder: Path, age_s: float = 0.0) -> RunRecord:
    now = (folder / "ledger.jsonl").stat().st_mtime + age_s
    return read_run(folder, folder / "config.yaml", now)


def test_the_page_says_how_the_run_went(tmp_path: Path) -> None:
    words = text_of(page_of(run_folder(tmp_path / "a")))
    assert "Finished after 6 steps." in words
    assert "Best val/f1 0.5000 at step 6" in words  # row 5 of an evaluation: after 6 steps
    assert "Steps 6 in 2 epochs" in words
    assert "Training time 4 s 2 attempts" in words  # 4 and 4 steps of half a second
    assert "Holds: each sample of each epoch is in the weights once." in words
    assert "two devices share a core" in words
    assert "8 = 2 × 4 × 1 accumulated" in words
    assert "unisono fit --config a.yaml" in words


def test_steps_that_were_repeated_are_drawn_once(tmp_path: Path) -> None:
    run = record(run_folder(tmp_path / "a"))
    found = ledger_series(run, "loss")
    assert found == [(s, pytest.approx(1 / s)) for s in range(1, 7)]  # no 9 of the lost ones
    one, two = attempts(run)
    assert (one.end, one.last_step, one.repeated, one.seconds) == ("broke off", 4, 0, 2.0)
    assert (two.end, two.resumed_from, two.repeated, two.repeated_to) == ("finished", 2, 2, 4)


def test_the_first_screen_has_the_result_and_the_baseline(tmp_path: Path) -> None:
    tested = METRICS.replace("val/loss\n", "val/loss,test/f1,test/baseline_f1\n")
    folder = run_folder(tmp_path / "a", metrics=f"{tested}6,1,,,,0.4375,0.75\n")
    words = text_of(page_of(folder))
    assert "Test f1 0.4375 baseline 0.7500 Best val/f1 0.5000" in words
    systems = {"ranker": {"ndcg@10": 0.625}, "first": {"ndcg@10": 0.5}, "bm25": {"ndcg@10": 0.25}}
    (folder / "ranking.json").write_text(json.dumps({"systems": systems}))
    assert "Test ndcg@10 0.6250 baseline 0.2500" in text_of(page_of(folder))
    (folder / "ranking.json").write_text("[]")
    assert "ranking.json is not what it should be" in text_of(page_of(folder))
    folder = run_folder(tmp_path / "b", metrics=f"{METRICS.strip()}\n")
    assert "Test " not in text_of(page_of(folder)).partition("Curves")[0]


def test_what_a_config_a_metric_or_a_sample_holds_is_never_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    folder = run_folder(
        tmp_path / "<b>",
        config=f'model: {{class_path: "{evil}"}}\n',
        metrics=METRICS.replace("val/f1", "val/<script>"),
        topology={
            "warnings": [evil],
            "command": evil,
            "strategy": evil,
            "host_rank_device": [evil],
        },
    )
    (folder / "errors-test.csv").write_text(f"{evil},sample,loss\n{evil},1,2\n")
    page = page_of(folder)
    assert page.count("<script>") == page.count("</script>") == 1  # the page's own
    assert "alert(1)&lt;/script&gt;" in page
    assert "<b>" not in page.partition("<h1>")[2].partition("</h1>")[0]


def test_a_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = page_of(run_folder(tmp_path / "a"))
    assert not re.search(r"(src|href)=|https?:|@import|url\(", page)


@pytest.mark.parametrize(
    ("changes", "event", "age_s", "words"),
    [
        (
            {"is_over": False},
            None,
            5.0,
            "In progress: 6 of 6 steps so far; the newest was written 5",
        ),
        ({"is_over": False}, None, 9e3, "Not finished: 6 of 6 steps, and no word for 2 h 30 min"),
        ({"is_over": True}, {"event": "stopped", "reason": "SIGTERM"}, 9e3, "Stopped by SIGTERM"),
        ({"is_over": None}, None, 9e3, "Finished after 6 steps"),
    ],
)
def test_the_page_says_how_the_run_ended(
    tmp_path: Path, changes: dict, event: dict | None, age_s: float, words: str
) -> None:
    from lit_models.reporting.outcome import ending

    folder = run_folder(tmp_path / "a", topology=changes)
    if event:
        with (folder / "ledger.jsonl").open("a") as file:
            file.write(json.dumps({**event, "step": 6, "attempt": 2}) + "\n")
    assert words in ending(record(folder, age_s)).sentence


def test_the_page_says_when_attempts_began_and_were_last_seen(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a", attempts=((1, 0, 4), (2, 2, 6)))
    assert "Began" not in text_of(page_of(folder))  # an earlier version's ledger
    starts = iter(["2026-11-21T23:59:58+00:00", "2026-11-22T10:00:00+02:00"])
    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    lines = [{**ln, "started_at": next(starts)} if "plan_digest" in ln else ln for ln in lines]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = text_of(page_of(folder))
    assert "Began 2026-11-21 23:59:58, last step 2026-11-22 08:00:02 (UTC)." in words
    assert "1 broke off 2026-11-21 23:59:58 1 0 4 none 2 s" in words


def test_the_split_sums_the_intervals_and_the_curve_leaves_lost_ones_out(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a")
    lines = [throughput_line(1, 2, 1, 3), throughput_line(1, 4, 2, 2), throughput_line(2, 4, 1, 1)]
    lines[0]["machine"]["gpu"] = [{"utilization_percent": 60}, {"utilization_percent": 80}]
    (folder / "throughput.jsonl").write_text("".join(json.dumps(ln) + "\n" for ln in lines))
    run = record(folder)
    assert split_of(run)[0] == [("data", 4.0), ("forward", 6.0)]
    assert [line["is_discarded"] for line in run.throughput] == [False, True, False]
    words = text_of(page_of(folder))
    assert "data 4 s 40.0 %" in words
    assert "padding 25.0 %" in words
    assert "1, in 3 of 3 intervals" in words
    assert "processor busy 50 % GPUs busy 70 %" in words


def test_communication_that_fsdp_hides_counts_as_none_and_the_page_says_where_it_is(
    tmp_path: Path,
) -> None:
    folder = run_folder(tmp_path / "a")
    lines = [throughput_line(1, 2, 1, 3), throughput_line(2, 4, 1, 1)]
    assert "communication is inside" not in _split_words(folder, lines)
    for line in lines:
        line["split"]["communication"] = line["ranks"]["seconds"] = line["slowest_rank"] = None
    words = _split_words(folder, lines)
    assert "data 2 s 33.3 % forward 4 s 66.7 %" in words
    assert "Under fsdp, communication is inside forward and backward." in words


def _split_words(folder: Path, lines: list[dict]) -> str:
    (folder / "throughput.jsonl").write_text("".join(json.dumps(ln) + "\n" for ln in lines))
    return text_of(page_of(folder))


def test_without_throughput_the_ledgers_seconds_are_split(tmp_path: Path) -> None:
    parts, words = split_of(record(run_folder(tmp_path / "a")))
    assert parts == [("steps at their median time", 3.0), ("steps that were repeated", 1.0)]
    assert "ledger" in words


def test_a_forecast_stands_beside_what_was_measured(tmp_path: Path) -> None:
    folder, path = run_folder(tmp_path / "a"), tmp_path / "plan.json"
    foreseen = {"devices": [1, 2], "s per step": [0.9, 0.4], "GiB, ddp": [0.5, 0.8], "jobs": [1, 1]}
    path.write_text(json.dumps(foreseen))
    run = record(folder)
    rows = {row[0]: row[1:] for row in plan_rows(run, forecast_of(run, path))}
    assert rows["s per step"] == ["0.4000", "0.5000", "1.25"]
    assert rows["GiB, ddp"] == ["0.8000", "1", "1.25"]
    assert rows["steps per epoch"] == ["3", "3", "1.00"]
    assert rows["steps in all"] == ["6", "6", "1.00"]
    assert measured(run)["samples seen"] == 48
    assert "s per step 0.4000 0.5000 1.25" in text_of(page_of(folder, forecast=path))


def test_a_broken_proof_is_seen(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "a")
    ledger = folder / "ledger.jsonl"
    ledger.write_text(re.sub(r'"samples": 8', '"samples": 7', ledger.read_text(), count=1))
    words = text_of(page_of(folder))
    assert "The proof fails." in words
    assert "2 faults of unisono verify" in words  # the digest, and the line was edited


def test_a_real_run_tells_its_command_and_code(toy_config: Path, unisono: Unisono) -> None:
    given = ("fit", "--config", "toy.yaml", "--trainer.default_root_dir=runs/a b")
    assert unisono(*given)[0] == 0
    status, output = unisono("report", "runs/a b")
    assert status == 0, output
    assert "written to runs/a b/report.html" in output
    words = text_of((toy_config.parent / "runs/a b/report.html").read_text())
    assert "unisono fit --config toy.yaml '--trainer.default_root_dir=runs/a b'" in words
    assert f"digest {code_facts()['digest']}" in words
    assert "Best val/loss" in words
    assert "Finished after" in words


def test_the_command_line_is_as_one_would_type_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*argv: str) -> str:
        monkeypatch.setattr("sys.argv", list(argv))
        return command_line()

    assert said("/x/bin/unisono", "fit", "--a=b c") == "unisono fit '--a=b c'"
    assert said("/x/lit_models/__main__.py", "fit") == "unisono fit"
    assert said("mine.py", "1") == "python mine.py 1"
