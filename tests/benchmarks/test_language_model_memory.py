"""The memory of a training step of a language model, with and without the full logits."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from rich.console import Console
from rich.table import Table

from lit_models import LitCausalLM
from lit_models.causal_lm.loss import LossOptions
from lit_models.causal_lm.network import DecoderConfig
from lit_models.causal_lm.presets import PRESETS
from lit_models.training.meters import GIB, HostMeter
from tests.benchmarks.test_language_model_speed import RaggedData, fit

pytestmark = pytest.mark.benchmark
adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)
ROWS, CONTEXT = 4, 1024


class Peak(Callback):
    """Notes the most memory that the second step took, moments and all."""

    def __init__(self) -> None:
        self.meter = HostMeter(1024)
        self.peak = 0

    def on_train_batch_start(self, *_: object) -> None:
        self.meter.start()

    def on_train_batch_end(self, *_: object) -> None:
        self.peak = self.meter.peak_bytes()


class Resident(Callback):
    """Notes the memory of the process after every step."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_batch_end(self, *_: object) -> None:
        pages = Path("/proc/self/statm").read_text().split()[1]
        self.bytes.append(int(pages) * 4096)


@pytest.mark.parametrize("chunk_size", [1024, ROWS * CONTEXT])
def test_peak_of_a_step_of_gpt2(tmp_path: Path, chunk_size: int) -> None:
    torch.set_num_threads(2)
    seed_everything(0, verbose=False)
    rng = np.random.default_rng(0)
    documents = [rng.integers(50_257, size=CONTEXT + 1) for _ in range(2 * ROWS)]
    module = LitCausalLM(adamw, network="gpt2-124m", loss=LossOptions(chunk_size=chunk_size))
    data = RaggedData(documents, longest=CONTEXT, global_batch_size=ROWS)
    peak = Peak()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(tmp_path),
        callbacks=[peak],
    )
    trainer.fit(module, data)
    table = Table("network", "positions", "of a chunk", "peak of a step, GiB")
    positions = f"{ROWS} x {CONTEXT}"
    table.add_row("gpt2-124m, float32", positions, f"{chunk_size}", f"{peak.peak / GIB:.2f}")
    Console().print(table)
    assert PRESETS["gpt2-124m"].vocab_size == 50_257


def test_memory_does_not_grow_over_500_steps(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    rng = np.random.default_rng(0)
    documents = [rng.integers(8000, size=rng.integers(2, 128)) for _ in range(4000)]
    config = DecoderConfig(vocab_size=8000, max_positions=128, hidden_size=64, num_layers=2)
    module, resident = LitCausalLM(adamw, network=config), Resident()
    fit(tmp_path, module, RaggedData(documents, longest=128, global_batch_size=8), 600, resident)
    first, last = np.mean(resident.bytes[100:120]), np.mean(resident.bytes[-20:])
    Console().print(f"resident after 100 steps {first / GIB:.3f} GiB, after 600 {last / GIB:.3f}")
    assert last - first < 0.01 * GIB
