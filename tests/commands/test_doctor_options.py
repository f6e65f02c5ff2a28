"""`unisono doctor`: a world or a time that cannot be meant ends with 2, and no rank is started."""

import pytest

from lit_models.cli_errors import USAGE, run_guarded
from lit_models.commands import run_command


@pytest.mark.parametrize("options", [[], ["--collectives=true"]])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--devices=0", "--devices must be at least 1, got 0"),
        ("--devices=-2", "--devices must be at least 1, got -2"),
        ("--num_nodes=0", "--num_nodes must be at least 1, got 0"),
        ("--timeout_s=0", "--timeout_s must be seconds above 0, such as 60, got 0"),
        ("--timeout_s=-1", "--timeout_s must be seconds above 0, such as 60, got -1"),
        ("--timeout_s=.nan", "--timeout_s must be seconds above 0, such as 60, got nan"),
    ],
)
def test_it_is_refused(option: str, message: str, options: list[str], capsys, monkeypatch) -> None:
    started = []
    starter = "lit_models.doctoring.collectives.start_ranks"
    monkeypatch.setattr(starter, lambda *arguments: started.append(arguments) or 0)
    assert run_guarded(lambda: run_command("doctor", [option, *options])) == USAGE
    assert message in capsys.readouterr().err
    assert started == []


def test_a_group_of_more_processes_than_cores_can_start_is_refused(capsys) -> None:
    options = ["--devices=5000", "--collectives=true"]
    assert run_guarded(lambda: run_command("doctor", options)) == USAGE
    assert "--devices=5000 --collectives would start 5000 processes" in capsys.readouterr().err
