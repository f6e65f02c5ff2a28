"""A step that two processes trained is the same step on one device."""

import json

import pytest

from tests.conftest import TOY
from tests.distributed.launch import run
from tests.toy import ledger_lines

pytestmark = pytest.mark.slow


def test_a_step_of_two_ranks_is_replayed_on_one_device(tmp_path):
    (tmp_path / "toy.yaml").write_text(TOY)
    fitted = run(
        *("-m", "lit_models", "fit", f"--config={tmp_path / 'toy.yaml'}"),
        *("--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.precision=64"),
        *("--data.micro_batch_size=2", "--trainer.logger=false"),
        f"--trainer.default_root_dir={tmp_path / 'run'}",
    )
    assert fitted.returncode == 0, fitted.stdout
    line = ledger_lines(tmp_path / "run")[5]
    assert line["world_size"] == 2
    replayed = run(
        *("-m", "lit_models", "replay", str(tmp_path / "run"), "--step=6", "--advance=true"),
        f"--json={tmp_path / 'step.json'}",
        "--trust_checkpoint",
    )
    assert replayed.returncode == 0, replayed.stdout
    content = json.loads((tmp_path / "step.json").read_text())
    assert content["loss"] == pytest.approx(line["loss"], rel=1e-10)
    assert content["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-10)
