"""Rows per second of the occupation coder beside plain loops on the same network, real data.

pytest -m benchmark tests/benchmarks/test_occupation_speed.py -s
"""

import csv
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from datamodules.files.splitting import SplitOptions
from datamodules.occupations.datamodule import OccupationDataModule
from datamodules.occupations.rows import Columns
from datamodules.occupations.store import CodeBookOptions
from datamodules.tokenizers.characters import TextNormalisation
from lit_models.occupation_coder.decoding import DecodingOptions
from lit_models.occupation_coder.encoders import CharacterEncoder
from lit_models.occupation_coder.module import LitOccupationCoder
from lit_models.occupation_coder.network import BlockDecoder, OccupationNetwork
from tests.benchmarks import occupation_peers as peers
from tests.benchmarks.figures import Aim
from tests.toy import ledger_lines, toy_trainer

REAL = Path(__file__).parents[3] / "shared" / "data" / "occupations"
SIZE, STEPS, REPEATS = 64, 40, 3
METHODS = ("flat", "greedy", "beam")
DECODED = {"flat": ", flat head", "greedy": ", greedy", "beam": ", beam of 5"}
PEERS = {
    "padded": "loop that pads to 128, tokenises per item",
    "fair": "loop with dynamic padding",
}
SLOW = {
    "flat": "loop that pads to 128",
    "greedy": "decoding without cache",
    "beam": "decoding without cache, encoder per beam",
}
pytestmark = [
    pytest.mark.benchmark,
    pytest.mark.real_data,
    pytest.mark.skipif(not REAL.exists(), reason=f"real data is absent: {REAL}"),
]


def module(method="greedy"):
    return LitOccupationCoder(
        partial(torch.optim.AdamW, lr=1e-3, fused=True),
        encoder=partial(CharacterEncoder, width=128, num_layers=4),
        decoder=partial(BlockDecoder, width=128, num_layers=4),
        decoding=DecodingOptions(method=method, beam_size=5),
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
    trainer = toy_trainer(folder, **options)
    trainer.fit(trained, data())
    lines = ledger_lines(folder)[5:]
    seconds = sum(line["seconds"] for line in lines)
    return sum(line["samples"] for line in lines) / seconds, trained


def our_prediction(folder, trained, method, files, num_rows):
    """Return rows per second from the table to the coded table, by `trainer.predict`."""
    coder = module(method)
    coder.recipe = trained.recipe
    coder.configure_model()
    coder.network.load_state_dict(trained.network.state_dict())
    trainer = toy_trainer(folder, precision=32)
    predicted = data(predict_files=files, predict_output=str(folder / f"{method}.csv"))
    begin = time.perf_counter()
    trainer.predict(coder, predicted, return_predictions=False)
    return num_rows / (time.perf_counter() - begin)


def fresh_network(trained) -> OccupationNetwork:
    other = module()
    other.recipe = trained.recipe
    other.configure_model()
    return other.network


def read_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def peer_texts(trained, size=None):
    """Return the real rows as the peers take them; both tables, or the first `size` rows."""
    rows = read_rows(REAL / "train.csv") + read_rows(REAL / "dev.csv")
    index = {code: i for i, code in enumerate(trained.recipe["code_book"]["codes"])}
    normalise = TextNormalisation.from_dict(trained.recipe["normalisation"])
    known = [(r["occ1"], index[r["hisco_1"]]) for r in rows if r["hisco_1"] in index]
    return peers.Texts(*map(list, zip(*known[:size], strict=True)), normalise)


def test_training_beside_plain_loops(tmp_path, monkeypatch, figures):
    rounds = {"training": {"ours": [], **{who: [] for who in PEERS}}}
    texts = None
    for repeat in range(REPEATS):
        monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / f"cache{repeat}"))
        rate, trained = our_training(tmp_path / str(repeat))
        rounds["training"]["ours"].append(rate)
        texts = texts or peer_texts(trained)
        for who in PEERS:
            network = fresh_network(trained)
            loop = peers.train(network, texts, SIZE, STEPS, is_padded=who == "padded")
            rounds["training"][who].append(loop)
    report(figures, rounds, "training")


def test_prediction_beside_plain_loops(tmp_path, monkeypatch, figures):
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    files = [str(REAL / "train.csv"), str(REAL / "dev.csv")]
    num_rows = sum(len(read_rows(Path(file))) for file in files)
    _, trained = our_training(tmp_path)
    network = trained.network.eval()
    few, some = peer_texts(trained, 512), peer_texts(trained, 2048)
    slow = {
        "flat": lambda b: network(b["input_ids"], b["attention_mask"], b["language_id"]),
        "greedy": partial(peers.greedy_by_whole_prefix, network),
        "beam": partial(peers.beam_by_whole_prefix, network, size=5),
    }
    rounds = {method: {"ours": [], "padded": [], "fair": []} for method in METHODS}
    for repeat in range(REPEATS):
        folder = tmp_path / str(repeat)
        for method, found in rounds.items():
            found["ours"].append(our_prediction(folder, trained, method, files, num_rows))
            one = torch.no_grad()(slow[method])
            found["padded"].append(peers.predict(few, SIZE, True, one))
            fair = partial(peers.cached, network, options=DecodingOptions(method, beam_size=5))
            found["fair"].append(peers.predict(some, SIZE, False, fair))
    report(figures, rounds, "prediction")


def report(figures, rounds, action):
    """Add the rows of one action, each beside both loops."""
    for what, by_who in rounds.items():
        aims = {"padded": 5.0, "fair": 1.0} if action == "training" else {"padded": 10.0}
        for who, words in PEERS.items():
            aim = Aim(aims[who], is_least=True) if who in aims and what != "flat" else None
            peer = words if action == "training" or who == "fair" else SLOW[what]
            figures.add(
                *("occupation_coder", f"{action}{DECODED.get(what, '')}", "rows/s"),
                *(by_who["ours"], peer, by_who[who], aim),
            )
