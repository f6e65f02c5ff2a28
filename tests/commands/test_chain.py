"""`unisono chain`: the command lines of its stages by hand, and an error for each wrong stage; it
skips complete stages, continues incomplete ones, and overwrites nothing; a user's files are
compared by content."""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_models.commands import chain as chains
from lit_models.commands import run_command
from lit_models.commands.chain import chosen_stages, read_stages, run_process, run_stages

DEBUG = "causal_lm/debug.yaml"
SUBJECT = {"verb": "fit", "config": DEBUG}
CHAIN: dict[str, Any] = {
    "subject": SUBJECT,
    "export": {
        "verb": "export",
        "checkpoint": "subject",
        "options": {"adapter": True, "class_path": None},
    },
    "dump": {
        "verb": "predict",
        "config": [DEBUG, "hardware/cpu.yaml"],
        "options": {
            "model.subject": "{export}",
            "data": {"predict_output": "{dump}/store", "layers": [1, 2], "seed": "{seed}"},
            "model.prompt": None,
        },
        "devices": 2,
    },
    "test": {"verb": "test", "config": DEBUG, "checkpoint": "subject"},
}
STAND_IN = (sys.executable, str(Path(__file__).with_name("stand_in.py")))
Chain = Callable[..., int]


def test_each_stage_becomes_a_command_line_with_the_best_checkpoint_that_there_is(tmp_path):
    subject, export, dump, test = read_stages(CHAIN)
    here = Path("runs/x")
    root = "--trainer.default_root_dir=runs/x"
    command = f"fit --config {DEBUG} {root}/subject --seed_everything=3"
    assert shlex.join(subject.arguments(here, 3)) == command
    assert subject.arguments(here, 3, is_begun=True)[-1] == "--ckpt_path=auto"
    last = "runs/x/subject/checkpoints/last.ckpt"
    assert export.arguments(here, 3) == ["export", last, "--to=runs/x/export", "--adapter=true"]
    assert shlex.join(dump.arguments(here, 3)) == (
        f"predict --config {DEBUG} --config hardware/cpu.yaml {root}/dump --seed_everything=3 "
        "--trainer.devices=2 --model.subject=runs/x/export --data.predict_output=runs/x/dump/store "
        "'--data.layers=[1, 2]' --data.seed=3 --model.prompt=null"
    )
    assert f"--ckpt_path={last}" in test.arguments(here, 3)
    takes = [stage.takes for stage in (subject, export, dump, test)]
    assert takes == [[], ["subject"], ["export"], ["subject"]]
    best = tmp_path / "subject" / "checkpoints" / "best.ckpt"
    best.parent.mkdir(parents=True)
    best.touch()
    assert export.arguments(tmp_path, 1)[1] == str(best)


def test_changes_win_and_leave_the_rest():
    changes = {"dump": {"devices": 4, "options": {"data": {"layers": [3]}, "x.y": True}}}
    stage = read_stages(CHAIN, changes)[2]
    assert (stage.verb, stage.devices) == ("predict", 4)
    assert stage.options["data.layers"] == [3]
    assert stage.options["model.subject"] == "{export}"
    assert stage.arguments(Path("r"), 1)[-1] == "--x.y=true"
    assert read_stages(CHAIN, {"dump": {"config": 5}})[2].config == ("5",)  # no such path


def fit(**values: object) -> dict[str, Any]:
    return {"a": SUBJECT, "b": {**SUBJECT, **values}}


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ({}, "a chain needs stages; give the YAML of one with --config"),
        (["fit"], "a chain needs stages; .* key `stages` has"),
        ({"a": "fit"}, "stage a and its options must be mappings .* got 'fit'"),
        ({"a-2": SUBJECT}, "cannot be called `a-2`: a name has small letters"),
        ({"seed": SUBJECT}, "cannot be called `seed`: .* none of seed, chain"),
        (fit(divices=2), "stage b has the unknown key `divices`. Did you mean devices"),
        ({"a": {"config": DEBUG}}, "stage a: verb must be one of fit, .*, got None"),
        (fit(verb="tst"), "verb must be one of fit, .* got tst. Did you mean test"),
        ({"a": {"verb": "fit"}}, "stage a: fit needs a config"),
        (fit(verb="export", checkpoint="a"), "stage b: export takes no config; leave it out"),
        (fit(options=3), "stage b and its options must be mappings"),
        (fit(options={"trainer.devices": 2}), "option trainer.devices is the chain's: .*`devices`"),
        (fit(options={"trainer.default_root_dir": "x"}), "is the chain's: each stage writes to"),
        (fit(options={"ckpt_path": "x"}), "ckpt_path is the chain's own here; a fit begins with"),
        (fit(checkpoint="a"), "stage b: fit takes no checkpoint; .* model.init_from"),
        ({"a": {"verb": "export"}}, "stage a: checkpoint must name an earlier .*trains, got None"),
        (fit(verb="test", checkpoint="b"), "must name an earlier stage that trains, got b"),
        (fit(verb="test", checkpoint="c"), "stage b: it takes c; there is no such stage"),
        (fit(verb="test", checkpoint=["a"]), r"stage b: it takes \['a'\]; there is no such stage"),
        (fit(options={"x": "{aa}"}), "stage b: it takes aa; .* Did you mean a?"),
        ({"a": {**SUBJECT, "options": {"x": "{b}"}}, "b": SUBJECT}, "it takes b, .* later; move"),
        (
            {"a": SUBJECT, "b": {"verb": "export", "checkpoint": "a", "devices": 2}},
            "stage b: export runs on no devices",
        ),
    ],
)
def test_what_is_wrong_is_named(stages, message):
    with pytest.raises(ValueError, match=message):
        read_stages(stages)


def test_the_command_line_reaches_the_stages(own_folder, monkeypatch):
    Path("mine.yaml").write_text(
        "to: out-{seed}\nstages:\n"
        "  a: {verb: fit, config: causal_lm/debug.yaml, options: {data.x: 1, data.y: '{seed}'}}\n"
        "  b: {verb: export, checkpoint: a, options: {class_path: '{a}'}}\n"
    )
    seen: list[Any] = []
    monkeypatch.setattr(chains, "run_stages", lambda *given: seen.append(given) or 7)
    options = ["--config=mine.yaml", "--seed=3", "--only=a", "--change.a.devices=2"]
    options += ["--change.a.options.data.x=5", "--change.b.options.z=null", "--launcher=srun -N 1"]
    assert run_command("chain", options) == 7
    (stages, chosen, folder, seed, prefix) = seen[0]
    assert prefix == ("srun", "-N", "1", *chains.PREFIX)
    assert [stage.name for stage in chosen] == ["a"]
    assert (str(folder), seed) == ("out-3", 3)
    assert (stages[0].devices, stages[0].options) == (2, {"data.x": 5, "data.y": "{seed}"})
    assert stages[1].options == {"class_path": "{a}", "z": None}
    with pytest.raises(ValueError, match="a chain needs stages; give the YAML"):
        run_command("chain", [])
    with pytest.raises(FileNotFoundError, match="--launcher: there is no srunn here"):
        run_stages([], [], Path("out"), 1, ("srunn",))


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
    Path("mine.yaml").write_text("value: 1\n")

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
    place = {"trainer.num_nodes": 2, "trainer.accelerator": "cpu"}
    assert (chain({"subject": {"devices": 2, "options": place}}), called()) == (0, [])


def test_what_was_made_from_something_else_is_never_overwritten(chain):
    assert chain() == 0
    words = r"out/subject .* \(the option rate\) and is never overwritten"
    with pytest.raises(ValueError, match=words):
        chain(rate=2)
    Path("mine.yaml").write_text("# says nothing\nvalue: 1\n")
    assert (chain(), called()) == (0, [])
    Path("mine.yaml").write_text("value: 2\n")
    with pytest.raises(ValueError, match=r"\(the config mine.yaml.value\).*choose another --to"):
        chain()
    Path("mine.yaml").write_text("value: 1\n")
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
