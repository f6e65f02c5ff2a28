"""A job needs a folder for its scripts and logs, and a run: what is said where one is missing."""

from pathlib import Path

import pytest

from tests.commands.test_submit import Unisono, submit_call  # noqa: F401


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scripts=toy.yaml"], "toy.yaml is no folder: name a folder for the scripts with --scr"),
        (["--scripts", "toy.yaml/a/b"], "toy.yaml is no folder: name a folder for the scripts"),
        ([], "logs is no folder: SLURM opens the logs in this folder; move that file away."),
    ],
)
def test_a_file_where_a_folder_is_needed_is_refused(
    submit, options: list[str], message: str
) -> None:
    if not options:
        Path("logs").touch()
    status, output = submit(*options)
    assert (status, message in output) == (2, True), output
    assert not Path("jobs").exists()


@pytest.mark.parametrize("options", [["--dry-run"], ["toy.yaml"], ["--trainer.max_epochs=3"]])
def test_without_a_run_the_way_out_is_named(
    unisono: Unisono, toy_config: Path, options: list[str]
) -> None:
    status, output = unisono("submit", *options)
    assert status == 2
    assert "`unisono submit` needs a run: give its config with --config FILE" in " ".join(
        output.split()
    )


def test_a_run_without_a_config_is_one(unisono: Unisono, toy_config: Path) -> None:
    run = ["--model=tests.toy.LitToy", "--data=tests.toy.ToyData", "--name=toy"]
    optimizer = "--model.optimizer=torch.optim.SGD"
    status, output = unisono("submit", "--dry-run", *run, optimizer)
    assert status == 0, output
