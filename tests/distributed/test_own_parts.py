"""The card about Python: its example family is exact on two processes, its other code runs."""

import re
from pathlib import Path

import numpy as np
import pytest

from lit_models.commands.verify import Status, verify_run
from tests.distributed.launch import ROOT, run
from tests.toy import ledger_lines

PAGE = (ROOT / "lit_models/README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
CONFIG = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)[0]
# The installed command: unlike `python -m`, it does not put the working folder on the path.
COMMAND = "import sys\nfrom lit_models.__main__ import main\nsys.exit(main())\n"
TRADES = (("smith", "83110"), ("baker", "77610"))
THERE = "import os, sys; os.chdir(sys.argv[1]); sys.argv[1] = sys.executable; "
THERE += "os.execv(sys.executable, sys.argv[1:])"


@pytest.fixture
def houses(tmp_path: Path) -> Path:
    """A folder with mine.py, mine.yaml and houses.csv as the card shows them."""
    rows = np.random.default_rng(0).normal(size=(100, 3)).round(3)
    np.savetxt(tmp_path / "houses.csv", rows, delimiter=",", header="rooms,age,price", comments="")
    (tmp_path / "mine.py").write_text(BLOCKS[3] + "\n" + BLOCKS[2])
    (tmp_path / "mine.yaml").write_text(CONFIG)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "unisono.py").write_text(COMMAND)
    return tmp_path


def unisono(folder: Path, *arguments: str) -> str:
    done = run("-c", THERE, str(folder), "bin/unisono.py", *arguments, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


@pytest.mark.slow
def test_an_own_family_is_certified_after_kills_on_one_and_two_processes(houses: Path) -> None:
    assert len(BLOCKS[3].splitlines()) < 60
    options = ("--strategies=ddp", "--levels=C", "--trainer.callbacks+=mine.Shout")
    printed = unisono(houses, "certify", "--config=mine.yaml", *options)
    assert re.search(r"^2 ddp -> 1 -> 2 ddp( +(equal|\de-1\d)){5}", printed, re.MULTILINE), printed
    told = (houses / "certificates/mine/A-1.log").read_text()
    assert len(re.findall(r"^val/loss [01]\.\d+", told, re.MULTILINE)) >= 3
    folder = next((houses / "certificates/mine").glob("C-*/"))
    verdict = verify_run(folder)
    assert (verdict.status, verdict.attempts) == (Status.PROVEN, [2, 1, 2])
    assert len(ledger_lines(folder)) == 12


def test_module_and_data_of_the_page_train_in_a_plain_trainer(own_folder):
    rows = "".join(f"{trade} {i},{code}\n" for i in range(8) for trade, code in TRADES)
    Path("mine.csv").write_text("job,code\n" + rows)
    few = BLOCKS[1].replace("max_epochs=3, devices=2", "max_steps=1, devices=1")
    few = few.replace('"ddp"', '"auto", accelerator="cpu", enable_progress_bar=False')
    names: dict = {}
    exec(compile(BLOCKS[0] + few, "page", "exec"), names)
    assert names["trainer"].global_step == 1
    assert names["status"](names["trainer"])["world_size"] == 1
