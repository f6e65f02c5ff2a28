"""Rows per second of the occupation coder beside plain loops on the same network, real data.

pytest -m benchmark tests/benchmarks/test_occupation_speed.py -s

`padded` works as the systems that this one replaces: every row is padded to 128 characters,
tokenised when it is fetched, and each decoding step runs the whole prefix. `fair` tokenises once,
pads to the longest row of the batch and decodes with the key-value cache.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor

from datamodules.core.batches import padded_texts
from datamodules.files.splitting import SplitOptions
from datamodules.occupations.datamodule import OccupationDataModule
from datamodules.occupations.store import CodeBookOptions, Columns
from datamodules.tokenizers.codes import TextOptions, encode
from lit_models.occupation_coder.decoding import Decoded, DecodingOptions, decode
from lit_models.occupation_coder.encoders import CharacterEncoder
from lit_models.occupation_coder.loss import record_losses, summed
from lit_models.occupation_coder.module import LitOccupationCoder
from lit_models.occupation_coder.network import BEGIN, PAD, BlockDecoder, OccupationNetwork
from tests.benchmarks.figures import Aim
from tests.toy import csv_rows, ledger_lines, toy_trainer

REAL = Path(__file__).parents[3] / "shared" / "data" / "occupations"
SIZE, STEPS, REPEATS = 64, 40, 3
GREEDY = DecodingOptions("greedy")
PEERS = {"padded": "loop that pads to 128, tokenises per item", "fair": "loop with dynamic padding"}
pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.real_data,
    pytest.mark.skipif(not REAL.exists(), reason=f"real data is absent: {REAL}"),
]
PADDED_LENGTH = 128
ONE = {"seq2seq": 1.0, "flat": 1.0}


class Texts:
    """Rows of one table in the order of the file, normalised and encoded by the same functions."""

    def __init__(self, texts: list[str], code_ids: list[int], normalise: TextOptions) -> None:
        self.texts, self.normalise = texts, normalise
        self.code_ids = torch.tensor(code_ids)
        self.encoded = [encode(normalise(text), PADDED_LENGTH) for text in texts]

    def batch(self, rows: np.ndarray, is_padded: bool) -> dict[str, Any]:
        """Return one batch; `is_padded` tokenises again and pads to the full length."""
        if not is_padded:
            batch = padded_texts([self.encoded[row] for row in rows])
        else:
            points = [encode(self.normalise(self.texts[r]), PADDED_LENGTH) for r in rows]
            batch = padded_texts([*points, np.zeros(PADDED_LENGTH, np.int32)])
            batch = {name: value[:-1] for name, value in batch.items()}
            batch["attention_mask"] = batch["input_ids"] != 0
        batch["language_id"] = torch.zeros(len(rows), dtype=torch.int64)
        batch["code_ids"] = self.code_ids[rows][:, None]
        batch["num_with_codes"] = [0, len(rows)]
        batch["weight"] = torch.ones(len(rows))
        return batch

    def batches(self, is_padded: bool, seed: int | None) -> Iterator[dict[str, Any]]:
        """Yield batches, in random order where a seed is given."""
        order = np.arange(len(self.texts))
        if seed is not None:
            np.random.default_rng(seed).shuffle(order)
        for start in range(0, len(order), SIZE):
            yield self.batch(order[start : start + SIZE], is_padded)


def plain_training(network: OccupationNetwork, texts: Texts, is_padded: bool) -> float:
    """Return rows per second of a plain training loop, the first steps left out."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True)
    network.train()
    begin, rows, warm = 0.0, 0, 5
    for step, batch in enumerate(texts.batches(is_padded, seed=0)):
        if step == warm:
            begin, rows = time.perf_counter(), 0
        if step == warm + STEPS:
            break
        memory, flat = network(batch["input_ids"], batch["attention_mask"], batch["language_id"])
        losses = record_losses(memory, flat, network.decoder, batch)
        terms = summed(losses, batch["weight"])
        loss = sum(0.5 * term.total / term.count for term in terms.values())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rows += len(batch["weight"])
    return rows / (time.perf_counter() - begin)


@torch.inference_mode()
def greedy_by_whole_prefix(network: OccupationNetwork, batch: dict[str, Tensor]) -> Tensor:
    """Return symbols [B, K x L]: all positions, each from the whole prefix, no early stop."""
    trie = network.trie
    memory, _ = network(batch["input_ids"], batch["attention_mask"], batch["language_id"])
    symbols = torch.full((len(memory.hidden), 0), PAD)
    for _ in range(trie.max_codes * trie.block_size):
        asked = torch.cat([symbols, symbols.new_full((len(symbols), 1), BEGIN)], dim=1)
        best = network.decoder(asked, memory)[:, -1].argmax(-1)
        symbols = torch.cat([symbols, best[:, None]], dim=1)
    return symbols


@torch.inference_mode()
def greedy_by_cache(network: OccupationNetwork, batch: dict[str, Tensor]) -> Decoded:
    """Return decoded codes with the encoder run once and the key-value cache."""
    memory, flat = network(batch["input_ids"], batch["attention_mask"], batch["language_id"])
    return decode(network, memory, flat, GREEDY, ONE)


def plain_prediction(
    texts: Texts, is_padded: bool, one_batch: Callable[[dict[str, Tensor]], object]
) -> float:
    """Return rows per second of a plain prediction loop over all rows, in file order."""
    begin = time.perf_counter()
    for batch in texts.batches(is_padded, seed=None):
        one_batch(batch)
    return len(texts.texts) / (time.perf_counter() - begin)


def module():
    return LitOccupationCoder(
        partial(torch.optim.AdamW, lr=1e-3, fused=True),
        encoder=partial(CharacterEncoder, width=128, num_layers=4),
        decoder=partial(BlockDecoder, width=128, num_layers=4),
        decoding=GREEDY,
    )


def data(**options):
    return OccupationDataModule(
        train_files=str(REAL / "train.csv"),
        columns=Columns(text="occ1", language="lang", codes=["hisco_1"]),
        code_book=CodeBookOptions(path=str(REAL / "hisco_codes.csv")),
        split=SplitOptions(test_share=0.0),
        global_batch_size=SIZE,
        **options,
    )


def our_training(folder):
    """Return rows per second with ledger, checkpoints and both loggers, and the trained module."""
    trained = module()
    options = {"max_steps": STEPS + 5, "precision": 32, "limit_val_batches": 0}
    options |= {"gradient_clip_val": 1.0, "logger": [CSVLogger(folder), TensorBoardLogger(folder)]}
    toy_trainer(folder, **options).fit(trained, data())
    lines = ledger_lines(folder)[5:]
    seconds = sum(line["seconds"] for line in lines)
    return sum(line["samples"] for line in lines) / seconds, trained


def peer_texts(trained, size=None):
    """Return the real rows as the peers take them; both tables, or the first `size` rows."""
    rows = csv_rows(REAL / "train.csv") + csv_rows(REAL / "dev.csv")
    index = {code: i for i, code in enumerate(trained.recipe["code_book"]["codes"])}
    normalise = TextOptions.from_recipe(trained.recipe)
    known = [(r["occ1"], index[r["hisco_1"]]) for r in rows if r["hisco_1"] in index]
    return Texts(*map(list, zip(*known[:size], strict=True)), normalise)


def test_training_beside_plain_loops(tmp_path, monkeypatch, figures):
    rates = {who: [] for who in ("ours", *PEERS)}
    texts = None
    for repeat in range(REPEATS):
        monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / f"cache{repeat}"))
        rate, trained = our_training(tmp_path / str(repeat))
        rates["ours"].append(rate)
        texts = texts or peer_texts(trained)
        for who in PEERS:
            fresh = module()
            fresh.recipe = trained.recipe
            fresh.configure_model()
            rates[who].append(plain_training(fresh.network, texts, who == "padded"))
    for who, least in (("padded", 5.0), ("fair", 1.0)):
        figures.add(
            *("occupation_coder", "training", "rows/s", rates["ours"], PEERS[who], rates[who]),
            Aim(least, is_least=True),
        )


def test_greedy_decoding_beside_plain_loops(tmp_path, monkeypatch, figures):
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    files = [str(REAL / "train.csv"), str(REAL / "dev.csv")]
    num_rows = sum(len(csv_rows(file)) for file in files)
    _, trained = our_training(tmp_path)
    network = trained.network.eval()
    few, some = peer_texts(trained, 512), peer_texts(trained, 2048)
    ours, slow, fair = [], [], []
    for repeat in range(REPEATS):
        coder = module()  # from input table to coded table, by `trainer.predict`
        coder.recipe = trained.recipe
        coder.configure_model()
        coder.network.load_state_dict(trained.network.state_dict())
        trainer = toy_trainer(tmp_path / str(repeat), precision=32)
        predicted = data(predict_files=files, predict_output=f"{tmp_path}/{repeat}/coded.csv")
        begin = time.perf_counter()
        trainer.predict(coder, predicted, return_predictions=False)
        ours.append(num_rows / (time.perf_counter() - begin))
        slow.append(plain_prediction(few, True, partial(greedy_by_whole_prefix, network)))
        fair.append(plain_prediction(some, False, partial(greedy_by_cache, network)))
    for peer, theirs, aim in (
        ("decoding without cache", slow, Aim(10.0, is_least=True)),
        (PEERS["fair"], fair, None),
    ):
        figures.add(*("occupation_coder", "prediction, greedy", "rows/s", ours, peer, theirs), aim)
