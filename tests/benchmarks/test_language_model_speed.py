"""Language models beside a plain loop and beside the Trainer of transformers, in turns."""

import hashlib
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from datamodules import TextDataModule, TextSplit, TokenizerOptions
from datamodules.planned import PlannedDataModule, PlannedDataset, Stage
from datamodules.prompted import PromptedDataModule
from datamodules.text_batches import TokenDataset
from datamodules.token_store import TokenStream
from datamodules.tokenizers.text_tokenizer import TextTokenizer
from datamodules.tokenizers.trained import byte_tokenizer
from lit_models import LitCausalLM
from lit_models.causal_lm.network import Decoder, DecoderConfig
from lit_models.causal_lm.presets import PRESETS
from lit_models.training.callbacks import default_callbacks
from lit_models.training.callbacks.progress import ProgressLine
from lit_models.training.loggers import default_loggers
from lit_models.training.optim import WarmupDecay
from tests.benchmarks.figures import Aim, Figures
from tests.benchmarks.language_model_peers import (
    BATCH,
    LONGEST,
    RAGGED,
    VOCABULARY,
    WARM_UP,
    median_ms,
    plain_loop,
    ragged_documents,
)

pytestmark = pytest.mark.benchmark
ROOT = Path(__file__).parents[2]
SHAKESPEARE = ROOT.parent / "shared" / "data" / "shakespeare" / "input.txt"
FAMILY = "causal_lm"
ROUNDS, STEPS, RAGGED_STEPS = 3, 150, 25
WAYS = {"pad": "padding", "group": "grouped by length"}
adamw = partial(torch.optim.AdamW, lr=1e-3, fused=True)


class Clock(Callback):
    """Notes when each step ended, and how many tokens it trained on."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.tokens: list[int] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: Any, outputs: Any, batch: Any, _
    ) -> None:
        self.ends.append(time.perf_counter())
        self.tokens.append(int((batch["labels"] != -100).sum()))


class RaggedData(PromptedDataModule):
    """The documents as samples of their own."""

    def __init__(self, documents: list[np.ndarray], longest: int = LONGEST, **options: Any) -> None:
        super().__init__(**options)
        self.context_length = longest
        tokens = np.concatenate(documents).astype(np.uint16)
        sizes = np.array([len(ids) for ids in documents])
        self.stream = TokenStream(tokens, np.cumsum(sizes) - sizes, sizes - 1)

    @property
    def tokenizer(self) -> TextTokenizer:
        """One of which only the checkpoint hears."""
        return byte_tokenizer()

    def setup(self, stage: str) -> None:
        """Build the datasets; the tokens are there already."""
        PlannedDataModule.setup(self, stage)

    def build(self, stage: Stage) -> PlannedDataset:
        digest = hashlib.sha256(self.stream.tokens.tobytes()).hexdigest()
        return TokenDataset(self.stream, digest, self.context_length, "documents", self.tokenizer)


def fit(
    folder: Path, module: LitCausalLM, data: PlannedDataModule, steps: int, *callbacks: Callback
) -> Clock:
    """Train as the command line does: ledger, checkpoints, loggers, progress."""
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        limit_val_batches=0,
        gradient_clip_val=1.0,
        logger=default_loggers(folder, None),
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=[*default_callbacks(), ProgressLine(), clock, *callbacks],
    )
    trainer.fit(module, data)
    return clock


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


def unisono_speed(folder: Path, documents: list[np.ndarray]) -> float:
    """Return the useful tokens per second of a run here."""
    seed_everything(0, verbose=False)
    config = DecoderConfig(vocab_size=VOCABULARY, max_positions=LONGEST, **RAGGED)
    data = RaggedData(documents, global_batch_size=BATCH)
    clock = fit(folder, LitCausalLM(adamw, network=config), data, RAGGED_STEPS)
    return sum(clock.tokens[WARM_UP:]) / (clock.ends[-1] - clock.ends[WARM_UP - 1])


def peer_speed(folder: Path, packages: Path, way: str) -> float:
    """Return that of the Trainer of transformers, in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.language_model_peers"]
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{packages}"}
    done = subprocess.run(
        [*command, str(folder / "documents.npz"), way, str(RAGGED_STEPS)],
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_second"]


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the one package that only the peer needs."""
    packages = tmp_path_factory.mktemp("packages")
    install = ["pip", "install", "-q", "--no-deps", "--target", str(packages), "accelerate"]
    subprocess.run([sys.executable, "-m", *install], check=True)
    return packages


def write_documents(folder: Path, documents: list[np.ndarray]) -> None:
    lengths = [len(ids) for ids in documents]
    np.savez(folder / "documents.npz", tokens=np.concatenate(documents), lengths=lengths)


def test_ragged_documents_beside_the_trainer_of_transformers(
    tmp_path: Path, accelerate: Path, figures: Figures
) -> None:
    torch.set_num_threads(2)
    documents = ragged_documents(2000, seed=0)
    write_documents(tmp_path, documents)
    speeds: dict[str, list[float]] = {"pad": [], "group": [], "unisono": []}
    for turn in range(ROUNDS):
        for way in ("pad", "group"):
            speeds[way].append(peer_speed(tmp_path, accelerate, way))
        speeds["unisono"].append(unisono_speed(tmp_path / str(turn), documents))
    for way, aim in (("pad", 3.5), ("group", 1.1)):
        figures.add(
            *(FAMILY, "ragged documents", "useful tokens/s", speeds["unisono"]),
            *(f"transformers' Trainer, {WAYS[way]}", speeds[way], Aim(aim, is_least=True)),
        )


def plain_speed(documents: list[np.ndarray]) -> float:
    """Return tokens per second of a loop over random windows, as nanoGPT has it."""
    torch.manual_seed(0)
    network = Decoder(DecoderConfig(vocab_size=VOCABULARY, max_positions=LONGEST, **RAGGED))
    text = torch.from_numpy(np.concatenate(documents).astype(np.int64))
    width = LONGEST - 1
    seconds = plain_loop(network, text, BATCH, width, RAGGED_STEPS, adamw)[WARM_UP:]
    return BATCH * width * len(seconds) / sum(seconds)


def test_full_rows_beside_the_trainer_of_transformers_and_a_plain_loop(
    tmp_path: Path, accelerate: Path, figures: Figures
) -> None:
    torch.set_num_threads(2)
    rng = np.random.default_rng(0)
    documents = [rng.integers(VOCABULARY, size=LONGEST) for _ in range(400)]
    write_documents(tmp_path, documents)
    speeds: dict[str, list[float]] = {"trainer": [], "loop": [], "unisono": []}
    for turn in range(ROUNDS):
        speeds["trainer"].append(peer_speed(tmp_path, accelerate, "pad"))
        speeds["loop"].append(plain_speed(documents))
        speeds["unisono"].append(unisono_speed(tmp_path / str(turn), documents))
    for who, peer in (("trainer", "transformers' Trainer"), ("loop", "plain loop")):
        figures.add(
            *(FAMILY, "rows without padding", "tokens/s", speeds["unisono"]),
            *(peer, speeds[who], Aim(1.0, is_least=True)),
        )
