"""Commands are found by their file and become command lines by their types."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lit_models.commands import command_files, run_command, summaries
from lit_models.config_files import join_groups

Unisono = Callable[..., tuple[int, str]]


@pytest.mark.parametrize("name", command_files())
def test_each_command_has_help_and_a_summary(unisono: Unisono, name: str) -> None:
    summary = summaries()[name]
    assert summary[:1].islower()
    assert 20 < len(summary) <= 68  # a line of `unisono --help` in 80 columns
    status, output = unisono(name, "--help")
    assert status == 0
    assert f"unisono {name}" in output


def test_a_mistyped_option_of_a_command_names_the_nearest(unisono: Unisono) -> None:
    status, output = unisono("verify", "--rn=runs/x")
    assert status == 2
    assert "no option `--rn`. Did you mean --run?" in output


def test_the_exit_status_is_what_the_command_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lit_models.commands.verify as verify

    monkeypatch.setattr(verify, "verify", lambda: 3)
    assert run_command("verify", []) == 3


@pytest.mark.parametrize(
    ("given", "joined"),
    [
        ("--data.a.b=1 --data.a.c=x", ['--data.a={"b": 1, "c": "x"}']),
        ("--data.init_args.a.b=1 --data.a.c=2", ['--data.a={"b": 1, "c": 2}']),
        ("--data.a=null --data.a.b=1", ['--data.a={"emptied": true, "b": 1}']),
        ("--data.a.b=1 --data.a=null", ["--data.a=null"]),
        ("--data.a.b=null --data.a.b.c=1", ['--data.a={"b": {"emptied": true, "c": 1}}']),
        ("--data.a=null --data.a=x", ["--data.a=x"]),
        ('--data.a={"b":1} --data.a.c=2', ['--data.a={"b": 1, "c": 2}']),
        ("--run=x --data.a=: --data.b", ["--run=x", "--data.a=:", "--data.b"]),
    ],
)
def test_options_of_a_group_are_joined_in_their_order(given: str, joined: list[str]) -> None:
    assert join_groups(given.split()) == joined
