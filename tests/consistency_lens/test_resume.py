"""A run that is stopped where the networks begin to learn together, and what of it is replayed."""

import pytest
import torch
from lightning.pytorch import seed_everything

from lit_models.commands.replay import replay_step
from lit_models.training.checkpoints import read_checkpoint
from lit_models.training.lineage import Start, find_step, verify_run
from tests.consistency_lens.small_lens import documents, fitted, lens
from tests.toy import ledger_lines

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]
STEPS = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the run folder of a whole run, which learns together from step 2 on."""
    folder = tmp_path_factory.mktemp("whole")
    fitted(folder / "run", lens(), documents(folder, micro_batch_size=8), max_steps=STEPS)
    return folder / "run"


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_resumed_before_at_or_after_the_joint_start_is_the_whole_one(whole, tmp_path, steps):
    half = fitted(tmp_path / "half", lens(), documents(whole.parent), max_steps=steps)
    data = documents(whole.parent, micro_batch_size=8)
    path = fitted(tmp_path / "rest", lens(), data, max_steps=STEPS, resume=half)
    expected = read_checkpoint(whole / "checkpoints" / "last.ckpt")["state_dict"]
    found = read_checkpoint(path)["state_dict"]
    assert found.keys() == expected.keys()
    assert found["lens.reference_step"] == 2
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-12)


def test_the_ledger_of_a_lens_proves_its_steps(whole):
    assert verify_run(whole).faults == []
    lines = ledger_lines(whole)
    assert [set(line["terms"]) for line in lines[1:3]] == [
        {"teacher_text", "teacher_reconstruction"},
        {"reconstruction", "reference"},
    ]
    # The first step together: the networks are their own reference.
    assert lines[2]["terms"]["reference"] == pytest.approx(0, abs=1e-12)
    assert lines[3]["terms"]["reference"] > 1e-8


@pytest.mark.parametrize("step", [1, 3, 4])  # the third is the first together
def test_a_step_of_a_lens_is_replayed(whole, tmp_path, step):
    data = documents(whole.parent)
    found = find_step(whole, step)
    values = {"max_epochs": 9, "max_steps": STEPS, "precision": "64-true"}
    seed_everything(1, verbose=False)
    result = replay_step(
        found, Start(None, 0, []), lens(), data, whole, tmp_path, values, advance=True
    )
    assert result.loss == pytest.approx(found.line["loss"], rel=1e-10)
    assert result.grad_norm == pytest.approx(found.line["grad_norm"], rel=1e-9)
    assert len(result.samples) == 16
