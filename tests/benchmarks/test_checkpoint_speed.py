"""How long training stands still for a checkpoint."""

from pathlib import Path

import pytest
import torch

from lit_models.causal_lm.network import DecoderConfig
from lit_models.training import LastCheckpoint
from tests.benchmarks.figures import Aim, Figures
from tests.benchmarks.gpu_rows import Size, stalls

SHAPE = {"vocab_size": 1024, "hidden_size": 512, "num_layers": 8, "num_heads": 8}
# 25 million parameters: 0.3 GB with the moments of AdamW
SIZE = Size(DecoderConfig(max_positions=32, **SHAPE), rows=4, length=32)


@pytest.mark.benchmark
@pytest.mark.filterwarnings("ignore:.*have no `validation_step`")
def test_time_lost_to_checkpoints(tmp_path: Path, figures: Figures) -> None:
    torch.set_num_threads(1)
    interval_s = LastCheckpoint().every_n_minutes * 60
    (found,) = stalls(SIZE, False, tmp_path, precision="32-true")
    shares = [seconds / interval_s for seconds in found.ours]
    unit = f"share of {interval_s:.0f} s"
    figures.add("shared", "checkpoint of 25 M weights", unit, shares, aim=Aim(0.01, of="value"))
