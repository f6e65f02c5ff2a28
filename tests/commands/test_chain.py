"""`unisono chain` skips complete stages, continues incomplete ones, and overwrites nothing; a
user's files are compared by content."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_models.commands.chain import chosen_stages, read_stages, run_process, run_stages

STAND_IN = (sys.executable, str(Path(__file__).with_name("stand_in.py")))
Chain = Callable[..., int]


def stages_of(**options: object) -> dict[str, Any]:
    return {
        "subject": {"verb": "fit", "config": "mine.yaml", "options": options},
        "export": {"verb": "export", "checkpoint": "subject"},
        "dump": {"verb": "predict", "config": "mine.yaml", "options": {"from": "{export}"}},
        "test": {"verb": "test", "config": "mine.yaml", "checkpoint": "subject"},
    }


@pytest.fixture
def chain(own_folder: Path) -> Chain:
    """Runs the chain of `stages_of` in its own folder, with a stand-in for `unisono`."""
    Path("mine.yaml").write_text("model: 1\n")

    def run(
        changes: dict | None = None,
        only: list[str] | None = None,
        given: dict[str, Any] | None = None,
        **options: object,
    ) -> int:
        Path("calls.txt").write_text("")
        stages = read_stages(given or stages_of(**options), changes)
        return run_stages(stages, chosen_stages(stages, only), Path("out"), 1, STAND_IN)

    return run


def called() -> list[str]:
    """Return the stages that the last chain ran."""
    return [line.split()[0] for line in Path("calls.txt").read_text().splitlines()]


def test_all_stages_run_once_and_are_skipped_when_complete(chain, capsys):
    assert (chain(), called()) == (0, ["subject", "export", "dump", "test"])
    assert "--from=out/export" in capsys.readouterr().out
    assert (chain(), called()) == (0, [])
    assert "stage dump is complete: skipped\n" in capsys.readouterr().out
    assert (chain({"subject": {"devices": 2}}), called()) == (0, [])  # deployment only


def test_what_was_made_from_something_else_is_never_overwritten(chain):
    assert chain() == 0
    words = r"out/subject .* \(the option rate\) and is never overwritten"
    with pytest.raises(ValueError, match=words):
        chain(rate=2)
    Path("mine.yaml").write_text("# says nothing\nmodel: 1\n")
    assert (chain(), called()) == (0, [])
    Path("mine.yaml").write_text("model: 2\n")
    with pytest.raises(ValueError, match=r"\(the config mine.yaml.model\).*choose another --to"):
        chain()
    Path("mine.yaml").write_text("model: 1\n")
    Path("out/subject/checkpoints/last.ckpt").write_text("trained on")
    with pytest.raises(ValueError, match="the files in out/subject were changed since"):
        chain()


def test_what_follows_a_stage_that_is_made_anew_is_refused_before_it_is_made(chain):
    assert chain() == 0
    Path("out/subject/checkpoints/last.ckpt").unlink()
    with pytest.raises(ValueError, match=r"out/export was made .*\(the output of subject\)"):
        chain()
    assert called() == []
    Path("out/export/out.txt").unlink()
    with pytest.raises(ValueError, match="(the output of export)"):
        chain()
    Path("out/dump/out.txt").unlink()
    Path("out/test/out.txt").unlink()
    assert (chain(), called()) == (0, ["subject", "export", "dump", "test"])


def test_a_folder_of_another_origin_is_refused(chain):
    Path("out/dump").mkdir(parents=True)
    Path("out/dump/mine.txt").touch()
    with pytest.raises(ValueError, match="would write to out/dump, which holds files of another"):
        chain()
    assert called() == []


def test_a_failed_stage_ends_the_chain_which_then_goes_on_with_it(chain, capsys):
    Path("fail").write_text("export")
    assert (chain(), called()) == (3, ["subject", "export"])
    assert "stage export failed after 0 s with exit status 3; mend" in capsys.readouterr().err
    Path("fail").write_text("dump")
    assert (chain(), called()) == (3, ["export", "dump"])
    parts = Path("out/dump/.out.txt.parts")  # of a prediction, which continues with them
    parts.touch()
    Path("fail").unlink()
    assert (chain(), called()) == (0, ["dump", "test"])
    assert parts.exists()


def test_some_stages_run_alone_if_what_they_take_is_complete(chain):
    words = "stage dump takes export, which is not complete in out; r"
    with pytest.raises(ValueError, match=words):
        chain(only=["dump", "test"])
    for names in (["subject", "export"], ["dump", "test"]):
        assert (chain(only=names), called()) == (0, names)


def test_a_stage_or_a_config_that_there_is_not_is_named(chain, done):
    Path("chain.yaml").write_text(yaml.safe_dump({"stages": stages_of()}, sort_keys=False))
    for option, words in (
        ("--only=dmp", "there is no such stage. Did you mean dump?"),
        ("--change.exprt.devices=2", "there is no such stage. Did you mean export?"),
        ("--change=3", "--change must be a mapping, --change.NAME=VALUE, got 3."),
    ):
        assert words in " ".join(done("chain", "--config=chain.yaml", option, status=2).split())
    Path("mine.yaml").unlink()
    with pytest.raises(FileNotFoundError, match="--config mine.yaml: this file does not exist"):
        chain()


def test_options_of_a_later_stage_are_read_before_any_is_run(done, toy_config):
    stages = {name: {"verb": "fit", "config": "toy.yaml"} for name in ("one", "two")}
    Path("chain.yaml").write_text(yaml.safe_dump({"stages": stages}))
    option = "--change.two.options.trainer.max_epoch=2"
    output = done("chain", "--config=chain.yaml", option, status=2)
    assert "`--change.two.options.trainer.max_epoch`. Did you" in output
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 128 + signal.SIGINT)],
)
def test_a_signal_is_passed_on_and_nothing_is_left_running(chain, signum, status):
    code = (
        "import signal, sys; from pathlib import Path\n"
        "for signum in (1, 2): signal.signal(signum, signal.SIG_DFL)\n"  # ignored in a background
        "from lit_models.commands.chain import read_stages\n"
        "from lit_models.commands.chain import run_stages\n"
        f"stages = read_stages({stages_of(wait=1)!r})\n"
        f"sys.exit(run_stages(stages, stages, Path('out'), 1, {STAND_IN!r}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 120
    while not Path("waiting.txt").exists() or not Path("waiting.txt").read_text():
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == status
    assert "stage subject was stopped" in errors
    grandchild = Path(f"/proc/{Path('waiting.txt').read_text()}/stat")
    while grandchild.exists() and grandchild.read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.02)
    assert chain(wait=1) == 0
    assert "ckpt_path=auto" in Path("calls.txt").read_text().splitlines()[0]


def test_a_warning_that_is_repeated_does_not_end_the_chain_after_its_stage():
    code = (
        "import os, signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN); "
        "os.kill(os.getppid(), signal.SIGUSR1)"
    )
    before = signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # an earlier test may have ignored it
    try:
        assert run_process([sys.executable, "-c", code]) == (0, [signal.SIGUSR1])
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def run(chain: Chain) -> Callable[..., list[str]]:
    """Runs a chain of one stage; returns the stages that ran."""

    def run(**options: Any) -> list[str]:
        stage = {"verb": "predict", "config": "mine.yaml", "options": options}
        assert chain(given={"one": stage}) == 0
        return called()

    return run


@pytest.mark.parametrize(
    "option", ["in-1/b.txt", "in-{seed}", "in-1/*.txt", ["in-1/a.txt", "in-1/b.txt"], None]
)
def test_a_file_that_an_option_or_a_config_names_counts_with_its_content(run, option):
    Path("in-1").mkdir()
    for name in "abcdefghi":
        Path(f"in-1/{name}.txt").write_text(name)
    Path("mine.yaml").write_text("data: {init_args: {own: [in-1/b.txt], other: in-1/a.txt}}")
    options = {"data.other": None} if option is None else {"data.own": option}
    assert run(**options) == ["one"]
    Path("in-1/b.txt").touch()
    Path("in-1/a.txt").write_text("of no run" if option is None else "a")
    assert run(**options) == []
    Path("in-1/b.txt").write_text("c")
    with pytest.raises(ValueError, match=r"\(the files of the option data.own\)"):
        run(**options)


def test_what_a_stage_itself_writes_is_no_input(run):
    values = {"here": ".", "whole": "out", "data.predict_output": "out.csv", "late": "late.txt"}
    assert run(**values) == ["one"]
    for name in ("out.csv", "late.txt"):
        Path(name).write_text("made by the stage")
    assert run(**values) == []


@pytest.mark.soak
def test_a_real_fit_is_exported_and_each_evaluation_has_its_folder(done, toy_config):
    Path("prompts.jsonl").write_text('{"prompt": "a smith"}\n')
    config = "config: causal_lm/debug.yaml, devices: 1"
    Path("chain.yaml").write_text(
        f"stages:\n  subject: {{verb: fit, {config}}}\n"
        "  export: {verb: export, checkpoint: subject}\n"
        f"  tested: {{verb: test, checkpoint: subject, {config}}}\n"
        f"  written: {{verb: predict, checkpoint: subject, {config}, "
        "options: {data.predict_files: prompts.jsonl}}\n"
    )
    arguments = ("chain", "--config", "chain.yaml", "--to=runs/all")
    done(*arguments)
    folder = Path("runs/all")
    assert (folder / "export" / "model.safetensors").exists()
    assert "test/loss" in (folder / "tested" / "metrics.csv").read_text()
    assert list((folder / "written").glob("prompts.*"))
    assert not [*(folder / "subject").glob("prompts.*"), *(folder / "subject").glob("config-*")]
    assert done(*arguments).count("is complete: skipped") == 4
    (folder / "tested" / "metrics.csv").unlink()
    output = done(*arguments, status=1)
    assert "stage tested: the files in runs/all/tested were changed since" in output
