"""A language model's step beside that of a plain loop, in turns."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything

from datamodules import TextDataModule, TextSplit, TokenizerOptions
from lit_models import LitCausalLM
from lit_models.causal_lm.network import PRESETS, Decoder, DecoderConfig
from lit_models.training.optim import WarmupDecay
from tests.benchmarks.figures import Aim, Figures
from tests.benchmarks.language_model_peers import WARM_UP, median_ms, plain_loop
from tests.benchmarks.language_model_runs import FAMILY, ROOT, ROUNDS, adamw, fit

pytestmark = pytest.mark.benchmark
SHAKESPEARE = ROOT.parent / "shared" / "data" / "shakespeare" / "input.txt"
STEPS = 150


def seconds_of_steps(folder: Path, text: Path) -> list[float]:
    """Return the seconds of each step of the published Shakespeare run."""
    seed_everything(0, verbose=False)
    module = LitCausalLM(adamw, partial(WarmupDecay, warmup=10), network="shakespeare-cpu")
    data = TextDataModule(
        str(text),
        tokenizer=TokenizerOptions("characters"),
        context_length=64,
        layout="blocks",
        split=TextSplit(by="tail"),
        global_batch_size=12,
    )
    ends = fit(folder, module, data, STEPS).ends
    return np.diff(ends).tolist()


@pytest.mark.real_data
@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="needs ../shared/data/shakespeare")
def test_cost_of_a_step_beside_a_plain_loop(tmp_path: Path, figures: Figures) -> None:
    torch.set_num_threads(2)
    letters = sorted(set(SHAKESPEARE.read_text("utf-8")))
    number = {letter: i for i, letter in enumerate(letters)}
    text = torch.tensor([number[letter] for letter in SHAKESPEARE.read_text("utf-8")])
    config = DecoderConfig(**{**vars(PRESETS["shakespeare-cpu"]), "vocab_size": len(letters) + 1})
    times: dict[str, list[float]] = {"plain": [], "unisono": []}
    for turn in range(ROUNDS):
        torch.manual_seed(0)
        seconds = plain_loop(Decoder(config), text, 12, 64, STEPS, adamw)
        times["plain"].append(median_ms(seconds[WARM_UP:]))
        seconds = seconds_of_steps(tmp_path / str(turn), SHAKESPEARE)
        times["unisono"].append(median_ms(seconds[WARM_UP:]))
    figures.add(
        *(FAMILY, "a step of the Shakespeare network", "ms"),
        *(times["unisono"], "plain loop", times["plain"], Aim(1.5, of="more")),
    )
