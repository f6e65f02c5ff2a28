"""The occupation coder with dropout: one loss trajectory on any devices, if masks are keyed."""

from pathlib import Path

import pytest

from tests.distributed.launch import run
from tests.toy import ledger_lines

CODER = (
    *("-m", "lit_models", "fit", "--config", "occupation_coder/debug.yaml"),
    *("--trainer.accelerator=cpu", "--trainer.precision=64-true", "--trainer.max_epochs=2"),
    *("--model.encoder.dropout=0.3", "--model.decoder.dropout=0.3"),
    "--model.loss.flat_dropout=0.3",
)
LAYOUTS = {
    "accumulated": ("--trainer.accumulate_grad_batches=4",),
    "ddp": ("--trainer.devices=2", "--trainer.strategy=ddp"),
}
SAVING = (
    "--trainer.callbacks+=lit_models.training.LastCheckpoint",
    "--trainer.callbacks.every_n_steps=6",
    "--trainer.callbacks.every_epoch=false",  # max_steps ends an epoch, too, for good
)


def losses(folder: Path, *options: str) -> list[float]:
    done = run(*CODER, f"--trainer.default_root_dir={folder}", *options)
    assert done.returncode == 0, done.stdout
    return [line["loss"] for line in ledger_lines(folder)]


@pytest.mark.parametrize(
    "is_exact",
    [pytest.param(True, marks=pytest.mark.soak), pytest.param(False, marks=pytest.mark.soak)],
)
def test_losses_agree_over_devices_and_accumulation_if_dropout_is_keyed(
    tmp_path: Path, is_exact: bool
) -> None:
    option = f"--exact_dropout={str(is_exact).lower()}"
    expected = losses(tmp_path / "one", option)
    assert len(expected) == 16
    for name, layout in LAYOUTS.items():
        found = losses(tmp_path / name, option, *layout)
        assert (found == pytest.approx(expected, rel=1e-10)) is is_exact
        assert (found == pytest.approx(expected, rel=1e-3)) is is_exact


@pytest.mark.soak
def test_a_run_resumed_on_two_devices_in_mid_epoch_is_the_uninterrupted_one(tmp_path: Path) -> None:
    expected = losses(tmp_path / "whole", "--exact_dropout=true")
    short = (*SAVING, "--trainer.max_steps=12")
    losses(tmp_path / "cut", "--exact_dropout=true", *short)
    layout = (*LAYOUTS["ddp"], "--ckpt_path=auto")
    found = losses(tmp_path / "cut", "--exact_dropout=true", *layout)
    assert found == pytest.approx(expected, rel=1e-10)
