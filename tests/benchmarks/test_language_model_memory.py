"""The memory of a training step of a language model, with and without the full logits."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lit_models import LitCausalLM
from lit_models.causal_lm.loss import LossOptions
from lit_models.causal_lm.network import DecoderConfig
from lit_models.causal_lm.presets import PRESETS
from lit_models.training.meters import GIB, HostMeter
from tests.benchmarks.figures import Aim, Figures
from tests.benchmarks.language_model_runs import RaggedData, fit

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


def peak_gib(folder: Path, vocab_size: int, chunk_size: int) -> float:
    """Return the peak of the second step of a GPT-2 of the smallest size."""
    seed_everything(0, verbose=False)
    rng = np.random.default_rng(0)
    documents = [rng.integers(vocab_size, size=CONTEXT + 1) for _ in range(2 * ROWS)]
    shape = DecoderConfig(**{**vars(PRESETS["gpt2-124m"]), "vocab_size": vocab_size})
    module = LitCausalLM(adamw, network=shape, loss=LossOptions(chunk_size=chunk_size))
    peak = Peak()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=2,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=str(folder),
        callbacks=[peak],
    )
    trainer.fit(module, RaggedData(documents, longest=CONTEXT, global_batch_size=ROWS))
    return peak.peak / GIB


@pytest.mark.parametrize("vocab_size", [50_257, 128_000])
def test_peak_of_a_step_beside_full_logits(
    tmp_path: Path, vocab_size: int, figures: Figures
) -> None:
    torch.set_num_threads(2)
    in_chunks, whole = (peak_gib(tmp_path, vocab_size, c) for c in (1024, ROWS * CONTEXT))
    figures.add(
        *("causal_lm", f"peak of a step, vocabulary {vocab_size:,}, {ROWS} x {CONTEXT}", "GiB"),
        *([in_chunks], "full logits", [whole], Aim(0.6)),
    )


def test_memory_does_not_grow_over_500_steps(tmp_path: Path, figures: Figures) -> None:
    torch.set_num_threads(2)
    rng = np.random.default_rng(0)
    documents = [rng.integers(8000, size=rng.integers(2, 128)) for _ in range(4000)]
    config = DecoderConfig(vocab_size=8000, max_positions=128, hidden_size=64, num_layers=2)
    module, resident = LitCausalLM(adamw, network=config), Resident()
    fit(tmp_path, module, RaggedData(documents, longest=128, global_batch_size=8), 600, resident)
    first, last = np.mean(resident.bytes[100:120]), np.mean(resident.bytes[-20:])
    grown = [float(last - first) / GIB]
    what = "memory grown in 500 steps, ragged documents"
    figures.add("causal_lm", what, "GiB", grown, aim=Aim(0.01, of="value"))
    assert last - first < 0.01 * GIB
