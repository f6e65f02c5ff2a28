"""Language models beside the Trainer of transformers: ragged documents, and full rows."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything

from lit_models import LitCausalLM
from lit_models.causal_lm.network import Decoder, DecoderConfig
from tests.benchmarks.figures import Aim
from tests.benchmarks.language_models import (
    BATCH,
    FAMILY,
    LONGEST,
    RAGGED,
    ROUNDS,
    VOCABULARY,
    WARM_UP,
    RaggedData,
    adamw,
    fit,
    plain_loop,
    ragged_documents,
)
from tests.distributed.launch import ROOT, run

pytestmark = pytest.mark.benchmark
RAGGED_STEPS = 25
WAYS = {"pad": "padding", "group": "grouped by length"}


def unisono_speed(folder: Path, documents: list[np.ndarray]) -> float:
    """Return the useful tokens per second of our run."""
    seed_everything(0, verbose=False)
    config = DecoderConfig(vocab_size=VOCABULARY, max_positions=LONGEST, **RAGGED)
    data = RaggedData(documents, global_batch_size=BATCH)
    clock = fit(folder, LitCausalLM(adamw, network=config), data, RAGGED_STEPS)
    return sum(clock.tokens[WARM_UP:]) / (clock.ends[-1] - clock.ends[WARM_UP - 1])


def peer_speed(folder: Path, packages: Path, way: str) -> float:
    """Return the same for transformers' Trainer, in a process of its own."""
    command = ["-m", "tests.benchmarks.language_models", str(folder / "documents.npz"), way]
    done = run(*command, str(RAGGED_STEPS), timeout_s=600, PYTHONPATH=f"{ROOT}:{packages}")
    assert done.returncode == 0, done.stdout[-2000:]
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_second"]


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the one package that only the peer needs."""
    packages = tmp_path_factory.mktemp("packages")
    if importlib.util.find_spec("accelerate"):  # installed by the extra `bench`
        return packages
    install = ["pip", "install", "-q", "--no-deps", "--target", str(packages), "accelerate"]
    subprocess.run([sys.executable, "-m", *install], check=True)
    return packages


def write_documents(folder: Path, documents: list[np.ndarray]) -> None:
    lengths = [len(ids) for ids in documents]
    np.savez(folder / "documents.npz", tokens=np.concatenate(documents), lengths=lengths)


def test_ragged_documents_beside_the_trainer_of_transformers(tmp_path, accelerate, figures):
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


def test_full_rows_beside_a_plain_loop_and_transformers_trainer(tmp_path, accelerate, figures):
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
