"""What the ledger says of the steps of a lens, and their replay."""

import pytest
from lightning.pytorch import seed_everything

from lit_models.commands.replay import replay_step
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
def test_a_step_of_a_lens_is_replayed(whole, step):
    data = documents(whole.parent)
    found = find_step(whole, step)
    values = {"max_epochs": 9, "max_steps": STEPS, "precision": "64-true"}
    seed_everything(1, verbose=False)
    result = replay_step(found, Start(None, 0, []), lens(), data, whole, values, advance=True)
    assert result.loss == pytest.approx(found.line["loss"], rel=1e-10)
    assert result.grad_norm == pytest.approx(found.line["grad_norm"], rel=1e-9)
    assert len(result.samples) == 16
