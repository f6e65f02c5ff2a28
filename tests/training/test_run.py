"""Run folder, lock and claims; banner, progress and loggers."""

import multiprocessing
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from lit_models.run_files import json_lines
from lit_models.training import (
    FailureReport,
    LastCheckpoint,
    Ledger,
    NonFinite,
    default_callbacks,
    run,
)
from lit_models.training.rules import is_first_process
from lit_models.training.run import (
    AppendingCSVLogger,
    ProgressLine,
    Run,
    RunFolder,
    check_writable,
    decide,
    default_loggers,
    locked,
    release,
)
from tests.toy import LitToy, ToyData, csv_rows, toy_trainer


def make_run(folder: Path, checkpoint: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "ledger.jsonl").write_text("")
    if checkpoint:
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / checkpoint).write_text("")
    return folder


def newest(folder: Path) -> Path | None:
    return next(iter((folder / "checkpoints").glob("*.ckpt")), None)


def test_auto_takes_the_newest_run_with_a_sound_checkpoint(tmp_path: Path) -> None:
    root = make_run(tmp_path / "demo", "a.ckpt")
    for name in ("demo-10", "demo-2", "demo-x", "demo-12", "demo-13"):
        make_run(tmp_path / name, "c.ckpt")
    make_run(tmp_path / "demo-11")
    roots = {12: "config a/demo-12.yaml", 13: "trainer.default_root_dir 'a b/demo-13'"}
    for number, named in roots.items():
        command = f'{{"command": "unisono fit --{named} --config a.yaml"}}'
        (tmp_path / f"demo-{number}/topology.json").write_text(command)
    run = decide("fit", root, "auto", newest)
    assert run.folder == str(tmp_path / "demo-10")
    assert run.ckpt_path == str(tmp_path / "demo-10" / "checkpoints" / "c.ckpt")
    assert "resumes from" in run.notice


@pytest.mark.parametrize(
    ("verb", "root", "is_asked", "checkpoint_of", "folder"),
    [
        ("fit", "demo", False, "demo", "demo"),
        ("fit", "demo", True, "demo", "demo"),
        ("fit", "other", False, "demo", "other"),
        ("test", "other", False, "demo", "demo"),
        ("test", "other", True, "demo", "other"),
        ("test", "demo", True, "demo", "demo"),
        ("predict", "demo", True, "demo-2", "demo-2"),
    ],
)
def test_a_named_checkpoint_is_used_in_its_folder_unless_another_is_asked_for(
    tmp_path: Path, verb: str, root: str, is_asked: bool, checkpoint_of: str, folder: str
) -> None:
    for name in ("demo", "demo-2"):
        make_run(tmp_path / name, "a.ckpt")
    path = str(tmp_path / checkpoint_of / "checkpoints" / "a.ckpt")
    expected = Run(str(tmp_path / folder), path)
    assert decide(verb, tmp_path / root, path, newest, is_asked) == expected


def test_a_run_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda where, _: Path(where) != tmp_path)
    with pytest.raises(PermissionError, match="Permission denied.*/new"):
        check_writable(tmp_path / "new")


TORCHRUN = {"RANK": "1", "LOCAL_RANK": "0", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environ", "is_first"),
    [
        ({}, True),
        ({"LOCAL_RANK": "0", "NODE_RANK": "0"}, True),
        ({"LOCAL_RANK": "1", "NODE_RANK": "0"}, False),  # a child process of ddp
        ({"LOCAL_RANK": "1", "RANK": "0", "WORLD_SIZE": "1"}, False),  # the same in a container
        ({"NODE_RANK": "1"}, False),  # the first process of ddp on another machine
        ({"SLURM_PROCID": "0"}, True),
        ({"SLURM_PROCID": "1"}, False),
        (TORCHRUN, False),
        ({**TORCHRUN, "RANK": "0", "SLURM_PROCID": "1"}, True),
    ],
)
def test_one_process_of_a_launch_is_the_first(environ: dict[str, str], is_first: bool) -> None:
    assert is_first_process(environ) == is_first


def test_auto_begins_a_run_again_that_has_no_checkpoint_yet(tmp_path: Path) -> None:
    run = make_run(tmp_path / "demo")
    choice = decide("fit", run, "auto", lambda folder: None)
    assert (choice.folder, choice.ckpt_path) == (str(run), None)
    assert choice.notice == f"--ckpt_path auto: {run} begins again"
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "last.ckpt").touch()  # the empty file counts as damaged
    assert decide("fit", run, "auto", lambda folder: None).folder == f"{run}-2"


FORK = multiprocessing.get_context("fork")


def try_to_hold(folder: Path, starts, ends, answers) -> None:
    starts.wait()
    try:
        locked(lambda: Run(str(folder)), {})
        answers.put("")
    except RuntimeError as error:
        answers.put(str(error))
    ends.wait()
    release(folder)


@contextmanager
def held(folder: Path, processes: int = 1) -> Iterator[list[str]]:
    """Lets processes claim a folder at the same time; returns their errors, "" for the winner."""
    starts, ends, answers = FORK.Barrier(processes), FORK.Event(), FORK.Queue()
    tried = [
        FORK.Process(target=try_to_hold, args=(folder, starts, ends, answers))
        for _ in range(processes)
    ]
    for process in tried:
        process.start()
    yield sorted(answers.get(timeout=120) for _ in tried)
    ends.set()
    for process in tried:
        process.join()


@pytest.mark.parametrize("is_resumed", [False, True])
def test_one_of_several_runs_started_at_once_holds_the_folder(tmp_path, is_resumed):
    folder = make_run(tmp_path / "demo") if is_resumed else tmp_path / "demo"
    with held(folder, 4) as answers:
        assert answers[0] == ""
        assert all("demo is in use: proc" in a and socket.gethostname() in a for a in answers[1:])
        assert len(answers[1:]) == 3
    assert not list(tmp_path.rglob(".lock*"))


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_second_run_says_who_holds_the_folder_and_writes_nothing(
    toy_config: Path, done: Callable[..., str], is_resumed: bool
) -> None:
    run = Path("runs/toy")
    if is_resumed:
        done("fit", "--config", "toy.yaml")
    with held(run):
        before = {path: path.stat().st_mtime_ns for path in Path().rglob("*")}
        holder = (run / ".lock").read_text().split()[0]
        resume = ["--ckpt_path=auto"] if is_resumed else []
        output = done("fit", "--config", "toy.yaml", *resume, status=1)
        assert {path: path.stat().st_mtime_ns for path in Path().rglob("*")} == before
    assert "Traceback" not in output
    assert f"in use: process {holder} on {socket.gethostname()}" in " ".join(output.split())
    assert run.exists() is is_resumed, "a folder made for nothing goes with the lock"
    done("fit", "--config", "toy.yaml", *resume)


def test_a_lock_is_taken_over_from_the_dead_and_the_same_job_alone(tmp_path: Path) -> None:
    def lock_of(process: int, host: str, job: str = "") -> None:
        (tmp_path / ".lock").write_text(f"{process}\n{host}\n")
        (tmp_path / ".lock-job").write_text(job)

    choose, dead = (lambda: Run(str(tmp_path))), FORK.Process()
    dead.start()
    dead.join()
    lock_of(dead.pid, socket.gethostname())
    killed = tmp_path / "checkpoints" / ".last.ckpt.unfinished-node9-17"
    killed.mkdir(parents=True)
    assert locked(choose, {}) == choose()
    assert not killed.exists(), "nobody else writes checkpoints of a run that is held"
    release(tmp_path)
    lock_of(17, "node9?pidns-1", "5 0")
    again = {"SLURM_JOB_ID": "5", "SLURM_RESTART_COUNT": "1"}
    other, elastic = {"SLURM_JOB_ID": "6"}, {"TORCHELASTIC_RUN_ID": "mine"}
    for environ in ({}, other, {"SLURM_JOB_ID": "5"}, again | other, elastic):
        with pytest.raises(RuntimeError, match=r"process 17 on node9 tr.*gone, remove .*/\.lock\."):
            locked(choose, environ)
    assert locked(choose, again | elastic) == choose()
    assert (tmp_path / ".lock").read_text().split()[0] == str(os.getpid())
    assert (tmp_path / ".lock-job").read_text() == "5 1\nmine"
    release(tmp_path)
    lock_of(17, "node9", "mine")
    assert locked(choose, elastic) == choose()
    release(tmp_path)


def test_a_run_that_began_while_this_one_chose_keeps_its_folder(tmp_path: Path) -> None:
    root = tmp_path / "demo"

    def choose() -> Run:
        run = decide("fit", root, None, newest)
        if not root.exists():
            make_run(root)  # another process's whole run meanwhile
        return run

    assert locked(choose, {}).folder == f"{root}-2"
    (tmp_path / "demo-2" / "tensorboard").mkdir()  # as a refused start leaves it
    release(tmp_path / "demo-2")
    assert not (tmp_path / "demo-2").exists()


def script_run(root: Path, **call) -> Trainer:
    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    options |= {"accelerator": "cpu", "max_epochs": 1, **call.pop("trainer", {})}
    trainer = Trainer(default_root_dir=root, **options)
    trainer.fit(LitToy(), ToyData(), **call)
    return trainer


def test_a_script_trains_in_its_folder_and_mixes_no_two_runs(tmp_path: Path) -> None:
    trainer, last = script_run(tmp_path / "out"), tmp_path / "out" / "checkpoints" / "last.ckpt"
    before = last.read_bytes()
    (tmp_path / "copy.ckpt").write_bytes(before)
    for call in ({}, {"ckpt_path": tmp_path / "copy.ckpt"}):
        with pytest.raises(RuntimeError, match=r"out holds a run already: fit\(ckpt_path=…\)"):
            script_run(tmp_path / "out", **call)
    assert last.read_bytes() == before
    script_run(tmp_path / "out", ckpt_path=str(last))  # no step is left to train
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, ToyData(), ckpt_path=str(last))
    rows = json_lines(tmp_path / "out/ledger.jsonl")
    assert [row["attempt"] for row in rows if "resumed_from_step" in row] == [1, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy.ckpt", "out"]
    assert not list(tmp_path.rglob(".lock*"))


def test_a_script_has_the_callbacks_that_the_card_promises_once(tmp_path: Path) -> None:
    for given in ([], [NonFinite("skip"), LastCheckpoint(every_n_steps=2)], default_callbacks()):
        callbacks = script_run(tmp_path / str(len(given)), trainer={"callbacks": given}).callbacks
        for kind in (RunFolder, Ledger, NonFinite, FailureReport, LastCheckpoint):
            (found,) = [c for c in callbacks if isinstance(c, kind)]
            assert not [g for g in given if isinstance(g, kind)] or found in given
    trainer = {"enable_checkpointing": False}
    kinds = {type(c) for c in script_run(tmp_path / "none", trainer=trainer).callbacks}
    assert LastCheckpoint not in kinds
    assert {NonFinite, FailureReport} <= kinds


def test_a_script_that_fails_says_where_and_gives_its_folder_free(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match="step 1: loss or gradient is not finite"):
        Trainer(
            default_root_dir=tmp_path / "out", accelerator="cpu", logger=False, max_epochs=1
        ).fit(LitToy(), ToyData(nan_sample=3, global_batch_size=50))
    assert (tmp_path / "out" / "failure.json").exists()
    assert not (tmp_path / "out" / ".lock").exists()
    with held(tmp_path / "out"), pytest.raises(RuntimeError, match="out is in use: process"):
        script_run(tmp_path / "out")


def progress(folder: Path, monkeypatch: pytest.MonkeyPatch, line: ProgressLine) -> None:
    """Train three epochs of seven steps, each of which takes a second by the line's clock."""
    now = [100.0]
    clock = SimpleNamespace(**{**vars(time), "monotonic": lambda: now[0]})
    monkeypatch.setattr(run, "time", clock)

    class TakesASecond(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            now[0] += 1

    callbacks = [TakesASecond(), Ledger(), line]
    options = {"callbacks": callbacks, "enable_progress_bar": True, "max_epochs": 3}
    toy_trainer(folder, **options, limit_val_batches=0).fit(LitToy(), ToyData())


def test_a_log_gets_a_line_per_interval_and_a_terminal_one(tmp_path, capsys, monkeypatch) -> None:
    progress(tmp_path / "log", monkeypatch, ProgressLine())
    first, second, last = capsys.readouterr().out.splitlines()
    # 10 steps of 8 rows in 10 s; 11 are left
    assert re.fullmatch(r"epoch 2/3  step 10/21  loss \d+\.\d+  8 rows/s  0:00:11 left", first)
    assert second.startswith("epoch 3/3  step 20/21  ")
    assert last.endswith("  8 rows/s  took 0:00:21")
    silent = ProgressLine()  # on a rank that does not print
    silent.disable()
    progress(tmp_path / "rank 1", monkeypatch, silent)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    progress(tmp_path / "terminal", monkeypatch, ProgressLine())
    shown = capsys.readouterr().out
    assert (shown.count("\r"), shown.count("\n")) == (22, 1)


def test_a_reopened_file_is_appended_to_and_a_new_metric_becomes_a_column(tmp_path: Path) -> None:
    first, second = (AppendingCSVLogger(str(tmp_path)) for _ in range(2))  # as in two processes
    first.log_metrics({"train/loss": 1.5}, 1)
    second.log_metrics({"train/loss": 1.25}, 2)
    second.log_metrics({"val/f1": 0.5, "epoch": 0}, 2)
    first.log_metrics({"late": 2.0}, 3)
    got = (tmp_path / "metrics.csv").read_text().split()
    assert got[1:] == ["1,,1.5,,", "2,,1.25,,", "2,0,,0.5,", "3,,,,2.0"]


def test_a_resume_replaces_the_rows_that_run_again(tmp_path: Path) -> None:
    logger = AppendingCSVLogger(str(tmp_path))
    for step in (1, 2, 3):
        logger.log_metrics({"train/loss": float(step)}, step)
    logger.log_metrics({"val/loss": 9.0}, 1)  # after two steps: Lightning counts from 0
    logger.log_metrics({"val/loss": 8.0}, 2)  # after three steps
    for loss in (7.0, 6.0):  # of two checkpoints
        AppendingCSVLogger(str(tmp_path)).log_metrics({"test/loss": loss}, 2)
    AppendingCSVLogger(str(tmp_path), resumed_step=2).log_metrics({"train/loss": 30.0}, 3)
    got = [[r[f"{kind}/loss"] for kind in ("train", "val", "test")] for r in csv_rows(logger.path)]
    assert list(map("".join, got)) == ["1.0", "2.0", "9.0", "7.0", "6.0", "30.0"]


def test_a_row_that_a_kill_cut_short_does_not_stop_the_next_run(tmp_path: Path) -> None:
    AppendingCSVLogger(str(tmp_path)).log_metrics({"train/loss": 1, "b": 2}, 1)
    path = tmp_path / "metrics.csv"
    path.write_text(path.read_text() + "2,")
    AppendingCSVLogger(str(tmp_path), resumed_step=1).log_metrics({"train/loss": 3, "b": 4}, 2)
    assert [r["step"] for r in csv_rows(path)] == ["1", "2"]


def test_tensorboard_forgets_the_steps_that_run_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = default_loggers(str(tmp_path))[1]
    for step in (1, 2, 3):
        first.log_metrics({"train/loss": float(step)}, step)
    first.finalize("success")
    for path in (tmp_path / "tensorboard").glob("events.*"):  # the name ends with its first second
        path.rename(path.with_name(path.name.replace(".tfevents.", ".tfevents.0")))
    second = default_loggers(str(tmp_path), resumed_step=2)[1]
    second.log_metrics({"train/loss": 30.0}, 3)
    second.finalize("success")
    default_loggers(str(tmp_path), resumed_step=2)[0].log_metrics({"train/loss": 30.0}, 3)
    assert (tmp_path / "metrics.csv").exists()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 30)]


@pytest.mark.parametrize("content", [b"\x9d\x00\xff", b"mine,yours\n1,2\n"])
def test_a_damaged_file_is_named_and_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics\.csv is damaged .* copy it again"):
        AppendingCSVLogger(str(tmp_path)).log_metrics({"train/loss": 1.0}, 1)
    assert (tmp_path / "metrics.csv").read_bytes() == content
