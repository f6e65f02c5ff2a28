"""A dump of activations beside a plain loop over transformers with a hook, in turns.

Two processes are compared with one that is started in the same way: a second dump in the same
process finds the kernels for its products ready, which saves a fifth of so short a dump.
"""

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.nn.utils.rnn import pad_sequence

from datamodules import ActivationDumpDataModule
from datamodules.activations.documents import Pieces, PositionRule
from datamodules.activations.store import ActivationStore
from datamodules.tokenizers.text import byte_tokenizer
from lit_models import LitSubject
from lit_models.consistency_lens.subject import SubjectOptions
from lit_models.training.predictions import PredictionWriter
from tests.activation_dumps import plain_activations
from tests.benchmarks.figures import Aim
from tests.distributed.launch import in_world
from tests.text_corpora import rows_file, saved_tokenizer
from tests.toy import toy_trainer

pytestmark = pytest.mark.benchmark
FAMILY = "consistency_lens"
ROUNDS, DOCUMENTS = 3, 1000
BATCH, LONGEST, LAYER = 32, 256, 3
RULE = PositionRule(min_position=6, per_document=4)
SIZES = {"n_positions": LONGEST, "n_embd": 256, "n_layer": 6, "n_head": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of log-normal lengths, mean 120 bytes, and a GPT-2 that reads bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("dump")
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(120) - 0.7**2 / 2, 0.7, DOCUMENTS).astype(int).clip(4, 2000)
    texts = ("".join(rng.choice(list("etaoin shrdlu"), n)) for n in lengths)
    rows_file(folder / "mine.jsonl", [{"text": text.strip() or "e"} for text in texts])
    tokenizer = byte_tokenizer()
    saved_tokenizer(tokenizer, folder / "model")
    config = GPT2Config(vocab_size=tokenizer.vocab_size, **SIZES)
    GPT2LMHeadModel(config).save_pretrained(folder / "model")
    return folder


class Clock(Callback):
    """Notes when prediction begins."""

    def __init__(self) -> None:
        self.start = 0.0

    def on_predict_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.start = time.perf_counter()


def dump(folder: Path, target: Path, devices: int = 1) -> float:
    """Dump and return the seconds from the first batch to the complete store."""
    clock = Clock()
    where = {"devices": devices, "strategy": "ddp" if devices > 1 else "auto", "precision": 32}
    quiet = {"callbacks": [PredictionWriter(), clock], "enable_checkpointing": False}
    trainer = toy_trainer(folder, **where, **quiet)
    options: dict[str, Any] = {"context_length": LONGEST}
    files = str(folder / "mine.jsonl")
    data = ActivationDumpDataModule(
        str(target), train_files=files, positions=RULE, global_batch_size=BATCH, **options
    )
    subject = LitSubject(SubjectOptions(path=str(folder / "model"), layer=LAYER))
    trainer.predict(subject, data, return_predictions=False)
    return time.perf_counter() - clock.start


def dump_here(folder: Path, target: Path, devices: int) -> None:
    torch.set_num_threads(1)
    print("seconds", dump(folder, target, devices), flush=True)


def dump_in_processes(folder: Path, target: Path, devices: int) -> float:
    """Dump with so many new processes and return the seconds of the slowest."""
    printed = in_world(devices, dump_here, folder, target, devices)
    return max(map(float, re.findall(r"^seconds ([\d.]+)$", printed, re.MULTILINE)))


def plain_batches(store: ActivationStore) -> list[Any]:
    """Return the same documents, read completely before the start, sorted by length and padded."""
    rows = []
    for part in range(3):
        pieces = Pieces(store, part, LONGEST)
        piece, position = store.array(part, "piece"), store.array(part, "position")
        for number in np.unique(piece):
            rows.append((pieces.tokens(int(number))[:-1], np.array(position)[piece == number]))
    order: list[Any] = []
    for first in range(0, len(rows), 50 * BATCH):
        order += sorted(rows[first : first + 50 * BATCH], key=lambda row: len(row[0]))
    return [order[first : first + BATCH] for first in range(0, len(order), BATCH)]


def padded(batch: list[tuple[np.ndarray, np.ndarray]]) -> tuple[Any, Any, Any]:
    """Return input_ids, attention_mask and positions, as a plain script's collate function."""
    rows = [torch.from_numpy(tokens.astype(np.int64)) for tokens, _ in batch]
    ids = pad_sequence(rows, batch_first=True, padding_value=-1).numpy()
    return ids.clip(0), (ids >= 0).astype(np.int64), [at for _, at in batch]


def plain_loop(folder: Path, batches: list[Any], target: Path) -> float:
    """Read all batches, save the activations, and return the seconds."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder / "model").eval()
    start = time.perf_counter()
    found = plain_activations(model, LAYER, (padded(batch) for batch in batches))
    np.save(target, found)
    return time.perf_counter() - start


def test_activations_per_second_beside_a_plain_loop(folder, tmp_path, figures):
    torch.set_num_threads(1)
    dump(folder, tmp_path / "first")
    store = ActivationStore(tmp_path / "first")
    number, batches = sum(store.schema["num_activations"].values()), plain_batches(store)
    plain_loop(folder, batches[:3], tmp_path / "first.npy")  # warm-up, as the other side has
    names = ("plain loop", "unisono", "1 process", "2 processes")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(ROUNDS):
        seconds["plain loop"].append(plain_loop(folder, batches, tmp_path / f"{turn}.npy"))
        seconds["unisono"].append(dump(folder, tmp_path / f"one{turn}"))
        for devices, name in enumerate(names[2:], 1):
            target = tmp_path / f"started{devices}-{turn}"
            seconds[name].append(dump_in_processes(folder, target, devices))
    rates = {name: [number / s for s in values] for name, values in seconds.items()}
    one, two = "activation dump, one process", "activation dump, two processes"
    plain, unit = "plain loop over transformers", "activations/s"
    at_least = Aim(1.0, is_least=True)
    figures.add(FAMILY, one, unit, rates["unisono"], plain, rates["plain loop"], at_least)
    figures.add(
        *(FAMILY, two, unit, rates["2 processes"]),
        *("one process, started alike", rates["1 process"], Aim(1.8, is_least=True)),
    )
    expected = np.sort(np.load(tmp_path / "0.npy").sum(1))
    kept = np.sort(np.concatenate([store.array(part, "activations").sum(1) for part in range(3)]))
    np.testing.assert_allclose(kept, expected, atol=1e-4)  # both computed the same activations
