"""Memory of a language model's training step, with and without the full logits; time of a
checkpoint."""

import ctypes
import gc
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lit_models import LitCausalLM
from lit_models.causal_lm.network import PRESETS, Decoder, DecoderConfig
from lit_models.training import LastCheckpoint
from lit_models.training.memory import GIB
from tests.benchmarks.figures import Aim
from tests.benchmarks.gpu_rows import Size, stalls
from tests.benchmarks.language_models import RaggedData, fit, plain_loop
from tests.toy import toy_trainer

pytestmark = pytest.mark.benchmark
adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)
CONTEXT = 1024


class HostMeter:
    """Resident memory of this process; Linux only."""

    def start(self) -> None:
        """Return free memory to the system, and start a new measurement."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")

    def used_bytes(self) -> int:
        return self._line("VmRSS:")

    def peak_bytes(self) -> int:
        """Return the peak since `start`."""
        return self._line("VmHWM:")

    def _line(self, name: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


class Peak(Callback):
    """Notes the peak memory of the second step, which already holds the moments."""

    def __init__(self) -> None:
        self.meter = HostMeter()
        self.peak = 0

    def on_train_batch_start(self, *_: object) -> None:
        self.meter.start()

    def on_train_batch_end(self, *_: object) -> None:
        self.peak = self.meter.peak_bytes()


class Resident(Callback):
    """Notes the process's memory after every step; after some steps also once the heap has returned
    its free pages, whose number varies by more than a leak would add."""

    def __init__(self, *steps: int) -> None:
        self.meter, self.steps = HostMeter(), steps
        self.bytes: list[int] = []
        self.held: list[int] = []

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        self.bytes.append(self.meter.used_bytes())
        if trainer.global_step in self.steps:
            self.meter.start()  # returns free pages
            self.held.append(self.meter.used_bytes())


def shape_of(vocab_size: int) -> DecoderConfig:
    """Return a GPT-2 of the smallest size with another vocabulary."""
    return DecoderConfig(**{**vars(PRESETS["gpt2-124m"]), "vocab_size": vocab_size})


def peak_gib(folder: Path, vocab_size: int, rows: int) -> float:
    """Return the peak of the second step of our run."""
    seed_everything(0, verbose=False)
    rng = np.random.default_rng(0)
    documents = [rng.integers(vocab_size, size=CONTEXT + 1) for _ in range(2 * rows)]
    module = LitCausalLM(adamw, network=shape_of(vocab_size))
    peak = Peak()
    options = {"max_steps": 2, "precision": 32, "enable_checkpointing": False}
    trainer = toy_trainer(folder, callbacks=[peak], limit_val_batches=0, **options)
    trainer.fit(module, RaggedData(documents, longest=CONTEXT, global_batch_size=rows))
    return peak.peak / GIB


def plain_peak_gib(vocab_size: int, rows: int) -> float:
    """Return the peak of two steps of a loop on the same network, with torch's cross-entropy over
    the full logits."""
    torch.manual_seed(0)
    text = torch.randint(vocab_size, (4 * rows * CONTEXT,))
    network, meter = Decoder(shape_of(vocab_size)), HostMeter()
    meter.start()
    plain_loop(network, text, rows, CONTEXT, 2, adamw)
    return meter.peak_bytes() / GIB


@pytest.mark.parametrize(
    ("vocab_size", "rows"), [(50_257, 4), (50_257, 8), (128_000, 4), (128_000, 6)]
)
def test_peak_of_a_step_beside_full_logits(tmp_path, vocab_size, rows, figures):
    torch.set_num_threads(2)
    ours, plain = peak_gib(tmp_path, vocab_size, rows), plain_peak_gib(vocab_size, rows)
    figures.add(
        *("causal_lm", f"peak of a step, vocabulary {vocab_size:,}, {rows} x {CONTEXT}", "GiB"),
        *([ours], "plain loop, full logits", [plain], Aim(0.6)),
    )


def test_memory_does_not_grow_over_500_steps(tmp_path, figures):
    torch.set_num_threads(2)
    rng = np.random.default_rng(0)
    documents = [rng.integers(8000, size=rng.integers(2, 128)) for _ in range(4000)]
    config = DecoderConfig(vocab_size=8000, max_positions=128, hidden_size=64, num_layers=2)
    module, resident = LitCausalLM(adamw, network=config), Resident(120, 600)
    fit(tmp_path, module, RaggedData(documents, longest=128, global_batch_size=8), 600, resident)
    first, last = np.mean(resident.bytes[100:120]), np.mean(resident.bytes[-20:])
    held = resident.held[1] - resident.held[0]
    what = "memory grown in 500 steps, ragged documents"
    for name, grown in ((what, float(last - first)), (f"{what}, free pages given back", held)):
        figures.add("causal_lm", name, "GiB", [grown / GIB], aim=Aim(0.01, of="value"))
    assert held < 0.01 * GIB


@pytest.mark.filterwarnings("ignore:.*have no `validation_step`")
def test_time_lost_to_checkpoints(tmp_path, figures):
    torch.set_num_threads(1)
    interval_s = LastCheckpoint().every_n_minutes * 60
    shape = {"vocab_size": 1024, "hidden_size": 512, "num_layers": 8, "num_heads": 8}
    size = Size(DecoderConfig(max_positions=32, **shape), rows=4, length=32)  # 0.3 GB with moments
    for found in stalls(size, False, tmp_path, precision="32-true"):
        shares = [seconds / interval_s for seconds in found.ours]
        what, unit = f"checkpoint of 25 M weights{found.what}", f"share of {interval_s:.0f} s"
        figures.add("shared", what, unit, shares, aim=Aim(0.01, of="value"))
