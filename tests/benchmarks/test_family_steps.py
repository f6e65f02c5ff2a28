"""A step of each family with everything on, beside a plain loop: same model, same batches.

pytest -m benchmark tests/benchmarks/test_family_steps.py
"""

import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from lit_models.commands._run_config import built
from lit_models.config_files import find_config
from lit_models.training.callbacks import default_callbacks
from lit_models.training.callbacks.progress import ProgressLine
from lit_models.training.loggers import default_loggers
from tests.benchmarks.figures import Aim, Figures

CONFIGS = {
    "occupation_coder": "occupation_coder/demo.yaml",
    "causal_lm": "causal_lm/demo.yaml",
    "consistency_lens": "consistency_lens/debug.yaml",
    "seo, scorer": "seo/scorer_demo.yaml",
    "seo, ranker": "seo/ranker_demo.yaml",
    "seo, retriever": "seo/retriever_demo.yaml",
    "seo, writer": "seo/writer_demo.yaml",
}
STEPS, WARM_UP, ROUNDS, LONG_STEP_MS = 30, 5, 3, 100
pytestmark = [pytest.mark.benchmark, pytest.mark.filterwarnings("ignore")]


class Seen(Callback):
    """Keeps the batches, and the moments between which each was trained on."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.ends: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append(batch)
        self.ends.append(time.perf_counter())


def trained(config: dict[str, Any], folder: Path) -> tuple[LightningModule, Seen]:
    """Train with ledger, checkpoints, loggers and progress; the module keeps its trainer."""
    seed_everything(1, verbose=False)
    module, data = built(config)
    seen = Seen()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        limit_val_batches=0,
        gradient_clip_val=config["trainer"].get("gradient_clip_val"),
        accumulate_grad_batches=1,
        logger=default_loggers(folder, None),
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=str(folder),
        callbacks=[*default_callbacks(), ProgressLine(), seen],
    )
    trainer.fit(module, data)
    return module, seen


def plain_ms(module: Any, batches: list[Any], clip: float | None) -> list[float]:
    """Return the milliseconds of each step of a loop as one would write it by hand."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    found = module.configure_optimizers()
    optimizer = found["optimizer"] if isinstance(found, dict) else optimizer
    module.train()
    taken = []
    for batch in batches:
        begun = time.perf_counter()
        terms = module.training_terms(batch)
        loss = sum(t.total / t.count for t in terms.values() if t.total.requires_grad)
        optimizer.zero_grad()
        loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        loss.item()  # as whoever prints it does
        taken.append(1e3 * (time.perf_counter() - begun))
    return taken


@pytest.mark.parametrize("family", CONFIGS)
def test_a_step_beside_a_plain_loop(family: str, tmp_path: Path, figures: Figures) -> None:
    torch.set_num_threads(1)
    config = yaml.safe_load(find_config(CONFIGS[family]).read_text("utf-8"))
    clip = config["trainer"].get("gradient_clip_val")
    ours, theirs = [], []
    for turn in range(ROUNDS):
        module, seen = trained(config, tmp_path / str(turn))
        gaps = [1e3 * (b - a) for a, b in itertools.pairwise(seen.ends)][WARM_UP:]
        ours.append(statistics.median(gaps))
        theirs.append(statistics.median(plain_ms(module, seen.batches, clip)[WARM_UP + 1 :]))
    is_long = np.median(theirs) >= LONG_STEP_MS
    aim = Aim(1.02) if is_long else Aim(1.5, of="more")
    name = CONFIGS[family].partition("/")[2].removesuffix(".yaml").replace("_", " ")
    figures.add(
        *(family.partition(",")[0], f"a step of {name}, all on", "ms"),
        *(ours, "plain loop", theirs, aim),
    )
