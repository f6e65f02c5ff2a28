"""`unisono report`: its pages for run folders of known values."""

import json
import math
import os
import re
import time
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from lit_models.commands import report as reports
from lit_models.errors import UsageError
from lit_models.training.run import code_facts, command_line
from tests.commands.run_folders import CONFIG, METRICS, page_of, run_folder, text_of

OTHER = (
    CONFIG.replace("seed_everything: 1", "seed_everything: 2")
    .replace("lr: 0.003", "lr: 0.001")
    .replace("runs/a", "runs/b")
    .replace("max_steps: -1", "max_steps: -1, callbacks: [{class_path: X, init_args: {a: null}}]")
)


def charts_of(page: str) -> dict[str, dict[str, Any]]:
    """Return title -> chart of a page."""
    charts = [json.loads(unescape(text)) for text in re.findall(r'data-chart="([^"]*)"', page)]
    return {one["title"]: one for one in charts}


def compared(first: Path, second: Path) -> str:
    path = first.parent / "both.html"
    assert reports.report(first, second, to=path) == 0
    return text_of(path.read_text(encoding="utf-8"))


def test_the_page_says_how_the_run_went(tmp_path):
    page = page_of(run_folder(tmp_path / "a"))
    words = text_of(page)
    assert "Finished after 6 steps." in words
    assert "Best val/f1 0.5 at step 6" in words  # row 5 of an evaluation: after 6 steps
    assert "Steps 6 in 2 epochs" in words
    assert "Training time 0:00:04 2 attempts" in words  # 4 and 4 steps of half a second
    assert "Holds: each sample of each epoch is in the weights once." in words
    assert "two devices share a core" in words
    assert "8 = 2 × 4 × 1 accumulated" in words
    assert "unisono fit --config a.yaml" in words
    starts = "1 broke off 2026-11-21 23:59:58 1 0 4 0:00:02 2 finished 2026-11-22 08:00:00 2 2"
    assert starts in words
    # Repeated steps are drawn once, without the lost attempts' losses of 9.
    [train, validation] = charts_of(page)["Loss"]["series"]
    assert train["steps"] == [1, 2, 3, 4, 5, 6]
    assert train["values"] == [pytest.approx(1 / step) for step in range(1, 7)]
    assert (validation["steps"], validation["values"]) == ([3, 6], [0.75, 0.625])
    assert "const marks = [2];" in page
    assert not re.search(r"(src|href)=|@import|url\(", page)  # nothing from outside
    assert "default-src 'none'" in page


def test_the_first_screen_has_the_result_the_baseline_and_the_table_of_the_test(tmp_path):
    tested = METRICS.replace(
        "val/loss\n", "val/loss,test/f1,test/baseline_f1,test/loss,test/f1_new\n"
    )
    folder = run_folder(tmp_path / "a", metrics=f"{tested}6,,,,,1,1,1,\n0,,,,,0.4375,.75,.5,nan\n")
    (folder / "errors-test.csv").write_text("input,sample,loss\na,1,2\n")
    first = text_of(page_of(folder)).partition("Curves")[0]
    assert "Test f1 0.4375 baseline 0.75 Best val/f1 0.5" in first
    words = "test result baseline f1 0.4375 0.75 loss 0.5 f1_new – errors-test.csv : the samp"
    assert words in first
    assert '<a href="errors-test.csv">' in page_of(folder)
    assert "test/f1_new – test/loss" in text_of(page_of(folder))  # the order of all metrics as well
    systems = {"ranker": {"ndcg@10": 0.625}, "first": {"ndcg@10": 0.5}, "bm25": {"ndcg@10": 0.25}}
    (folder / "ranking-test.json").write_text(json.dumps({"systems": systems}))
    assert "Test ndcg@10 0.625 baseline 0.25" in text_of(page_of(folder))
    folder = run_folder(tmp_path / "b", metrics=f"{METRICS.strip()}\n")
    assert "Test " not in text_of(page_of(folder)).partition("Curves")[0]


def test_what_a_config_a_metric_or_a_name_holds_is_never_markup(tmp_path):
    evil = "</script><script>alert(1)</script>'\""
    top = {"warnings": [evil], "command": evil, "strategy": evil}
    top["host_rank_device"] = [f"here:0:{evil}"]
    folders = [
        run_folder(
            tmp_path / name,
            config=f"model: {{class_path: {json.dumps(evil)}}}\n",
            metrics=METRICS.replace("val/f1", "val/</script><script>'\""),
            topology=top,
        )
        for name in ("<b>", "<i>")
    ]
    reports.report(*folders, to=tmp_path / "both.html")
    for page in (page_of(folders[0]), (tmp_path / "both.html").read_text()):
        assert page.count("<script>") == page.count("</script>") == 2  # only the page's own scripts
        assert "alert(1)&lt;/script&gt;" in page
        assert "<b>" not in page.partition("<h1>")[2].partition("</h1>")[0]
        assert any("<script>'\"" in title for title in charts_of(page))


UNFINISHED = {"topology": {"is_over": False}}
FAILURE = {"rank": 1, "step": 7, "error": "ValueError: no"}
STOPPED = {"step": 7, "attempt": 2, "event": "stopped", "reason": "SIGTERM"}
SKIPPED = {"step": 7, "attempt": 2, "event": "not_applied", "policy": "skip", "sample_ids": [3, 4]}
SPEED = {"seconds": 4, "samples_per_s": 4.0, "tokens_per_s": 100.0, "padding_share": 0.25}
# Values of `run_folder`; files that replace its own, with lines that end its ledger; the page.
SHOWN: list[tuple[dict[str, Any], dict[str, str | None], list[str]]] = [
    (UNFINISHED, {}, ["Not finished: 6 of 6 steps, the newest line is 2:30:0"]),
    ({}, {"ledger.jsonl": f"{json.dumps(STOPPED)}\n"}, ["Stopped by SIGTERM after 6 steps"]),
    (
        UNFINISHED,
        {"failure.json": json.dumps(FAILURE)},
        ["Failed after 6 steps (rank 1, step 7): ValueError: no"],
    ),
    (
        {},
        {"ledger.jsonl": f"{json.dumps(SKIPPED)}\n"},
        ["Step 7: loss or gradient was not finite; its update", "not applied (skip; samples 3, 4)"],
    ),
    ({}, {}, ["samples per second 16.0", "seconds per step 0.5 (median)"]),  # 64 in 4 s
    (
        {},
        {"throughput.jsonl": f"{json.dumps(SPEED)}\n" * 2},
        ["samples per second 4.0 tokens per second 100 padding 25.0%"],
    ),
    (
        UNFINISHED,
        {"ledger.jsonl": '{"epoch": 2, "st', "topology.json": '{"strategy": '}
        | dict.fromkeys(("plan.json", "config.yaml", "metrics.csv")),
        [
            *("topology.json is damaged", "There is no metrics.csv", "There is no config.yaml"),
            *("The proof is not checked:", "No evaluation wrote a metric."),
        ],
    ),
    ({"metrics": "step,val/loss\n1,0.5\nx,0.25\n"}, {}, ["metrics.csv: 1 damaged rows are"]),
    ({"attempts": ((1, 0, 0),), **UNFINISHED}, {}, ["Not finished: 0 of 6 steps"]),
]


@pytest.mark.parametrize(("values", "files", "words"), SHOWN)
def test_the_page_says_what_happened_and_what_is_missing(tmp_path, values, files, words):
    folder = run_folder(tmp_path / "a", **values)
    ledger = (folder / "ledger.jsonl").read_text()
    for name, content in files.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(ledger * (name == "ledger.jsonl") + content)
    os.utime(folder / "ledger.jsonl", (time.time() - 9000,) * 2)
    page = text_of(page_of(folder))
    assert not [part for part in words if part not in page], page


def test_a_broken_proof_is_seen(tmp_path):
    folder = run_folder(tmp_path / "a")
    ledger = folder / "ledger.jsonl"
    ledger.write_text(re.sub(r'"samples": 8', '"samples": 7', ledger.read_text(), count=1))
    words = text_of(page_of(folder))
    assert "The proof fails." in words
    assert "2 faults of unisono verify" in words  # the digest, and the edited line


def test_values_that_are_not_finite_are_gaps_and_an_empty_table_of_metrics_is_named(tmp_path):
    folder = run_folder(tmp_path / "a", losses={5: math.nan, 6: math.inf}, metrics="step,epoch\n")
    page = page_of(folder)
    assert charts_of(page)["Loss"]["series"][0]["values"][3:] == [0.25, None, None]
    assert "Not finite at 2 steps (5, 6)" in text_of(page)
    assert "No evaluation wrote a metric." in text_of(page)


def test_an_empty_ledger_is_named(tmp_path):
    folder = run_folder(tmp_path / "a")
    (folder / "ledger.jsonl").write_text("")
    assert "The ledger is empty" in text_of(page_of(folder))


def test_a_spike_among_many_points_is_drawn():
    points = [(float(step), 0.0) for step in range(10_000)]
    points[7_777], points[3_333] = (7_777.0, 50.0), (3_333.0, math.nan)
    drawn = reports.thinned(points)
    assert {(0.0, 0.0), (7_777.0, 50.0), (9_999.0, 0.0)} <= set(drawn)
    assert any(math.isnan(value) for _, value in drawn)
    assert len(drawn) <= 4 * reports.MOST_STRETCHES + 6
    note = reports.chart("A", {"a": points})["note"]
    assert "10,000 points of a are drawn: no extreme is lost." in note


@pytest.mark.parametrize(
    ("values", "is_log"),
    [([0.1, 20.0], True), ([0.1, 2.0], False), ([0.0, 20.0], False), ([-1.0, 20.0], False)],
)
def test_a_scale_is_logarithmic_only_where_values_are_far_apart_and_positive(values, is_log):
    points = [(float(step), value) for step, value in enumerate(values)]
    assert reports.chart("A", {"a": points}, may_be_log=True)["is_log"] is is_log
    assert reports.chart("A", {"a": points})["is_log"] is False
    assert reports.chart("A", {"a": []}, may_be_log=True)["note"] == "No value was written."


def test_each_aspect_is_the_same_or_shows_both_values(tmp_path):
    first = run_folder(tmp_path / "a")
    changes = {"world_size": 4, "code": {"version": "0.1.0", "digest": "def"}}
    second = run_folder(tmp_path / "b", topology=changes, config=OTHER)
    assert reports.differences(reports.read_run(first, 0.0), reports.read_run(second, 0.0)) == {
        "data": [],
        "plan": [],
        "seed": [("seed", "1", "2")],
        "configuration": [
            ("model.optimizer.lr", "0.003", "0.001"),
            ("trainer.callbacks", "absent", '[{"class_path": "X", "init_args": {"a": null}}]'),
        ],
        "code": [("digest", "abc", "def")],
        "devices": [("world_size", "2", "4")],
        "versions": [],
    }
    words = compared(first, second)
    assert "They differ in seed, configuration, code and devices. " in words
    assert "The same: data, plan and versions." in words
    table = words.partition("Curves")[0].partition("what a b difference")[2]
    assert "configuration model.optimizer.lr 0.003 0.001 trainer.callbacks absent" in table
    assert "last value training time 0:00:04 0:00:04 steps 6 6 +0" in table


def test_a_run_and_its_copy_differ_in_nothing(tmp_path):
    words = compared(run_folder(tmp_path / "a"), run_folder(tmp_path / "b"))
    assert "Nothing known differs." in words
    assert "Over 6 common steps the losses are the same bits." in words
    assert "val/f1 0.5 0.5 +0" in words


def test_the_largest_gap_of_the_losses_is_shown_under_one_plan_only(tmp_path):
    folders = run_folder(tmp_path / "a"), run_folder(tmp_path / "b", losses={4: 0.2})
    first, second = (reports.read_run(folder, 0.0) for folder in folders)
    assert reports.loss_gap(first, second) == (pytest.approx(0.2), 6)  # 0.25 and 0.2
    second.plan["request"]["seed"] = 2  # the same samples in another order
    assert reports.loss_gap(first, second) is None
    (folders[1] / "plan.json").write_text(json.dumps(second.plan))
    assert "They differ in plan." in compared(*folders)


def test_runs_of_two_families_share_what_both_have(tmp_path):
    config = CONFIG.replace("LitOccupationCoder", "LitTextScorer")
    metrics = METRICS.replace("val/f1", "val/rank")
    second = run_folder(tmp_path / "b", config=config, metrics=metrics)
    (second / "topology.json").unlink()
    words = compared(run_folder(tmp_path / "a"), second)
    assert "model.class_path lit_models.LitOccupationCoder lit_models.LitTextScorer" in words
    assert "val/loss 0.625 0.625 +0" in words
    assert "val/rank" not in words.partition("Warnings")[0]
    assert "Not written down by both: code, devices and versions." in words


def test_an_earlier_report_is_replaced_but_no_other_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no ledger.jsonl; name a run folder"):
        reports.report(tmp_path)
    folder = run_folder(tmp_path / "a")
    assert page_of(folder) == page_of(folder)
    (folder / "report.html").write_text("<!doctype html><p>mine")
    with pytest.raises(UsageError, match="is no report of this command, so it is not replaced"):
        reports.report(folder)
    assert (folder / "report.html").read_text() == "<!doctype html><p>mine"
    with pytest.raises(IsADirectoryError):
        reports.report(folder, to=tmp_path)
    assert reports.report(folder, to=tmp_path / "new" / "x.html") == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["x.html"]


def test_two_folders_on_the_command_line(own_folder, done):
    run_folder(own_folder / "runs/a")
    run_folder(own_folder / "runs/b")
    assert done("report", "runs/a", "runs/b") == "written to compare-a-b.html\n"
    for status, words, message in (
        (2, ["runs/a", "runs/b", "runs/c"], "takes RUN OTHER, and no `runs/c`"),
        (2, [], "the following arguments are required: run"),
        (1, ["runs/a", "nowhere"], "there is no run folder nowhere; name a run folder"),
    ):
        assert message in done("report", *words, status=status)
    (own_folder / "runs/a/ledger.jsonl").write_text("damaged\n{}\n")
    done("report", "runs/a", status=1)


def test_a_real_run_shows_its_command_and_code(toy_config, done):
    given = ("fit", "--config", "toy.yaml", "--trainer.default_root_dir=runs/a b")
    done(*given)
    assert "written to runs/a b/report.html" in done("report", "runs/a b")
    words = text_of((toy_config.parent / "runs/a b/report.html").read_text())
    assert "unisono fit --config toy.yaml '--trainer.default_root_dir=runs/a b'" in words
    assert f"digest {code_facts()['digest']}" in words
    assert "Best val/loss" in words
    assert "Finished after" in words


def test_the_command_line_is_as_one_would_type_it(monkeypatch):
    def line(*argv: str) -> str:
        monkeypatch.setattr("sys.argv", list(argv))
        return command_line()

    assert line("/x/bin/unisono", "fit", "--a=b c") == "unisono fit '--a=b c'"
    assert line("/x/lit_models/__main__.py", "fit") == "unisono fit"
    assert line("mine.py", "1") == "python mine.py 1"


def test_numbers_are_short():
    texts = {2064: "2,064", 0.47219: "0.4722", 1e-9: "1e-09", -0.5: "-0.5", 1234.56: "1,235"}
    texts |= {None: "–", math.nan: "–", -math.inf: "-inf"}
    assert {value: reports.shown(value) for value in texts} == texts
