"""Commands: found by file name, with options made from the types of their arguments."""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_models.commands import COMMANDS, arguments_of

Unisono = Callable[..., tuple[int, str]]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_and_a_summary(done, name):
    _, summary = COMMANDS[name]
    assert summary[:1].islower()
    assert 20 < len(summary) <= 68  # fits one line of `unisono --help` in 80 columns
    assert f"unisono {name}" in done(name, "--help")


@pytest.mark.parametrize(
    "line",
    [
        *("submit --help x", "submit --config none.yaml --help", "submit -h --nodes=x"),
        *("report -h x", "chain --to --help"),
    ],
)
def test_help_is_shown_wherever_it_is_asked_for(done, line):
    assert f"usage: unisono {line.split()[0]}" in done(*line.split())


def limited(
    run_options: list[str] | None = None,
    *,
    time_limit_h: float | None = 1.0,
    line: list[str] | None = None,
    place: Path | None = None,
    json: bool = False,
) -> None:
    """With an underscore."""


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--time-limit-h 2", {"time_limit_h": 2.0}),
        ("--time_limit_h=2e0 --place=~/a", {"time_limit_h": 2.0, "place": Path.home() / "a"}),
        ("--json=false --line a --line=b=c", {"json": False, "line": ["a", "b=c"]}),
        ("--a.time-limit-h=1 --seed 2 --json", {"json": True, "run_options": 3}),
    ],
)
def test_options_of_a_command_are_read_by_their_types(line, values):
    rest = line.split()[: values.pop("run_options", 0)]  # as they were typed
    assert arguments_of(line.split(), limited) == {"run_options": rest, **values}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("submit --gpus-per-node=two", "argument --gpus-per-node: invalid int value: 'two'. `unis"),
        ("doctor --timeout_s x", "argument --timeout-s: invalid float value: 'x'. `unisono do"),
        ("doctor --timeout-s=-1", "--timeout-s must be above 0 seconds, got -1"),
        ("submit --dry-run=maybe", "--dry-run must be true or false, got maybe"),
        (
            "fit --seed_everything=x --model.x=1",
            "seed_everything must be a whole number or true or false",
        ),
    ],
)
def test_a_value_of_a_wrong_type_names_the_option_as_it_is_typed(done, line, message):
    assert message in " ".join(done(*line.split(), status=2).split())


def read(ckpt: Path, *, to: Path, fast: bool = False) -> None:
    """Of one place."""


@pytest.mark.parametrize("line", ["x.ckpt --to=y", "--to y x.ckpt"])
def test_what_is_required_has_a_place(line):
    assert arguments_of(line.split(), read) == {"ckpt": Path("x.ckpt"), "to": Path("y")}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "required: ckpt, --to. `unisono read --help`"),
        ("--to y", "required: ckpt"),
        ("x.ckpt --fast", "required: --to"),
        ("x.ckpt --too=y", "no option `--too`. Did you mean --to?"),
        ("--ckpt=x.ckpt --to=y", "required: ckpt"),
        ("a b --to=y", "`unisono read` takes CKPT, and no `b`. Options are written --name=value"),
    ],
)
def test_a_command_says_what_it_lacks_and_what_has_no_place(line, words):
    with pytest.raises(ValueError, match=words):
        arguments_of(line.split(), read)


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path, monkeypatch, capfd):
    page, onpage = tmp_path / "page.html", "lit_models.seo.onpage"
    page.write_text("<p>Bread.</p>")
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "argv", [onpage, str(page)])
    monkeypatch.delitem(sys.modules, onpage, raising=False)  # as `python -m` finds it
    with os.fdopen(writing, "w") as out, monkeypatch.context() as shown:
        shown.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit, match="141"):
            runpy.run_module(onpage, run_name="__main__")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("--data.a.b=1 --data.a.c x", {"a": {"b": 1, "c": "x"}}),
        ("--data.a=null --data.a.b=1", {"a": {"b": 1}}),
        ("--data.a.b=1 --data.a=null", {"a": None}),
        ('--data.a={"b":1} --data.a.c=2', {"a": {"b": 1, "c": 2}}),
        ('--data.a=1 --data={"b-c":2} --data.d-e=3', {"b-c": 2, "d-e": 3}),
    ],
)
def test_options_of_a_group_are_joined_in_their_order(line, values):
    def function(*, data: dict | None = None) -> None: ...

    assert arguments_of(line.split(), function) == {"data": values}


def test_a_config_gives_the_values_of_a_command_with_a_mapping(tmp_path):
    def function(
        *, data: dict | None = None, to: str = "x", seed: int = 1, only: list[str] | None = None
    ) -> None: ...

    config = tmp_path / "c.yaml"
    config.write_text("to: a\nonly: [b, c]\ndata: {e: {f: 1}}\nseed: 2\n")
    words = ["--seed=3", f"--config={config}", "--data.e.g=2"]
    assert arguments_of(words, function) == {
        "to": "a",
        "seed": 3,
        "only": ["b", "c"],
        "data": {"e": {"f": 1, "g": 2}},
    }
    config.write_text("trainer: {}\n")
    with pytest.raises(ValueError, match="has the key `trainer`; keys here are data, to, seed, o"):
        arguments_of(words, function)
    config.write_text("seed: true\n")
    with pytest.raises(ValueError, match="--seed: invalid int value: 'True'"):
        arguments_of(words, function)


def test_a_crash_in_native_code_says_where():
    crash = "import os, lit_models.__main__ as m; m.run = lambda _: os.abort(); m.main()"
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONFAULTHANDLER"}
    done = subprocess.run(
        [sys.executable, "-c", crash], capture_output=True, text=True, env=environ, timeout=60
    )
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr
    assert "in main" in done.stderr


def test_there_may_be_no_standard_error():
    command = f"{sys.executable} -m lit_models --help 2>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "usage: unisono" in done.stdout
