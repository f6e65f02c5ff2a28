"""Two processes dump what one does, byte for byte."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from datamodules.activations.store import ActivationStore
from tests.activation_dumps import contents, stories

ROOT = Path(__file__).parents[2]
DUMP = """
seed_everything: 1
model:
  class_path: lit_models.LitSubject
  init_args:
    subject:
      layer: 1
      network: {max_positions: 16, hidden_size: 16, num_layers: 3, num_heads: 2}
data:
  class_path: datamodules.ActivationDumpDataModule
  init_args:
    train_files: mine.jsonl
    tokenizer: {kind: words}
    context_length: 16
    positions: {min_position: 2, per_document: 3}
    global_batch_size: 8
trainer: {accelerator: cpu, enable_model_summary: false}
"""


@pytest.mark.soak  # test_lens_devices.py compares the bytes, too
def test_two_processes_write_the_store_of_one(tmp_path: Path) -> None:
    stories(tmp_path, 43)
    (tmp_path / "dump.yaml").write_text(DUMP)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for devices in (1, 2):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "lit_models", "predict", "--config=dump.yaml"),
                f"--data.predict_output=by{devices}",
                f"--trainer.devices={devices}",
                *(["--trainer.strategy=ddp"] if devices > 1 else []),
            ],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (ActivationStore(tmp_path / f"by{devices}").folder for devices in (1, 2))
    assert contents(one) == contents(two)
