"""T5 training on ragged pairs beside the Seq2SeqTrainer of transformers, and greedy decoding beside
`generate`."""

import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch.nn.utils.rnn import pad_sequence

from datamodules import Seq2SeqDataModule
from datamodules.core.batches import padded_texts
from datamodules.core.planned import LoaderOptions
from datamodules.demo import demo_titles, titles
from datamodules.text.pairs import text_ids
from datamodules.tokenizers.text import byte_tokenizer
from lit_models import LitSeq2Seq
from lit_models.seq2seq.decoding import Seq2SeqDecoding, write
from lit_models.training import default_callbacks
from lit_models.training.run import ProgressLine
from tests.benchmarks.figures import Aim
from tests.benchmarks.language_models import WARM_UP, Clock, adamw, trainer_of, trainer_speed
from tests.text_corpora import saved_tokenizer

pytestmark = pytest.mark.benchmark
FAMILY, ROUNDS, STEPS, BATCH, PAIRS = "seq2seq", 3, 20, 16, 1600
WORK = "T5, 4 + 4 layers x 256, pairs of 60 and 50 bytes in the mean"
ROWS, DECODED, TRAINED = 128, 256, 150  # at a batch size of 32, both decode fewer tokens/s


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A T5 with random weights, its byte tokenizer, and ragged pairs."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"d_model": 256, "d_kv": 64, "d_ff": 1024, "num_layers": 4, "num_heads": 4}
    ids = {"decoder_start_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    config = T5Config(vocab_size=257, dropout_rate=0.0, **ids, **sizes)
    made = tmp_path_factory.mktemp("seq2seq")
    T5ForConditionalGeneration(config).save_pretrained(made / "t5")
    saved_tokenizer(byte_tokenizer(), made / "t5")
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(60) - 0.25, 0.7, PAIRS).astype(int).clip(2, 250)
    targets = (lengths * rng.lognormal(-0.2, 0.2, PAIRS)).astype(int).clip(1, 250)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz ", np.uint8)
    with (made / "pairs.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("source", "target"))
        for number, sizes_of in enumerate(zip(lengths, targets, strict=True)):
            a, b = ("x" + rng.choice(letters, n).tobytes().decode() + "x" for n in sizes_of)
            rows.writerow((f"{number}{a}", b))
    return made


class PairClock(Clock):
    """Counts the tokens of sources and targets."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, _: Any):
        super().on_train_batch_end(trainer, module, outputs, batch, _)
        self.tokens[-1] += int(batch["attention_mask"].sum())


def own_speed(folder: Path, place: Path) -> float:
    """Return the useful tokens per second of a run here."""
    seed_everything(0, verbose=False)
    pairs, clock = str(folder / "pairs.csv"), PairClock()
    options: Any = {"global_batch_size": BATCH, "loader": LoaderOptions(num_workers=0)}
    data = Seq2SeqDataModule(pairs, max_target_tokens=256, validation_files=pairs, **options)
    module = LitSeq2Seq(adamw, pretrained=str(folder / "t5"))
    on = [*default_callbacks(), ProgressLine(), clock]
    trainer_of(place, on, max_steps=STEPS).fit(module, data)
    return sum(clock.tokens[WARM_UP:]) / (clock.ends[-1] - clock.ends[WARM_UP - 1])


def padded_pairs(examples: list[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    sources, targets = ([np.array(e[n]) for e in examples] for n in ("input_ids", "labels"))
    batch = padded_texts(sources)
    labels = pad_sequence([*map(torch.from_numpy, targets)], True, -100)
    batch["attention_mask"] = batch["attention_mask"].long()
    return {**batch, "labels": labels}, sum(map(len, [*sources, *targets]))


def peer_speed(folder: Path, place: Path, is_grouped: bool) -> float:
    """Return the same for the Seq2SeqTrainer, which pads each batch by itself."""
    from transformers import AutoModelForSeq2SeqLM

    with (folder / "pairs.csv").open(newline="") as file:
        rows = [[[*text.encode(), 256] for text in row] for row in csv.reader(file)][1:]
    data = [{"input_ids": a, "labels": b, "length": len(a) + len(b)} for a, b in rows]
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "t5")
    return trainer_speed(model, data, padded_pairs, place, STEPS, is_grouped, BATCH, "Seq2Seq")


def test_ragged_pairs_beside_the_trainer_of_transformers(folder, tmp_path, figures):
    pytest.importorskip("accelerate", reason="the peer needs accelerate")
    torch.set_num_threads(2)
    speeds: dict[str, list[float]] = {"padding": [], "grouped by length": [], "unisono": []}
    for turn in range(ROUNDS):
        for way in ("padding", "grouped by length"):
            place = tmp_path / f"{way} {turn}"
            speeds[way].append(peer_speed(folder, place, way != "padding"))
        speeds["unisono"].append(own_speed(folder, tmp_path / str(turn)))
    for way, aim in (("padding", Aim(1.2, is_least=True)), ("grouped by length", None)):
        row = (FAMILY, "ragged pairs", "useful tokens/s", speeds["unisono"])
        figures.add(*row, f"Seq2SeqTrainer, {way}", speeds[way], aim, note=WORK)


def test_greedy_decoding_beside_generate(folder, tmp_path, figures):
    """Both decode with a model that a minute of training has taught to end, at one batch size; ours
    takes the batches of a prediction, theirs the order of the file."""
    torch.set_num_threads(2)
    pairs = demo_titles()
    options: Any = {"global_batch_size": 32, "loader": LoaderOptions(num_workers=0)}
    data = Seq2SeqDataModule(predict_files=str(pairs), **options)
    module, decoding = LitSeq2Seq(adamw, pretrained=str(folder / "t5")), Seq2SeqDecoding(64)
    trainer_of(tmp_path, default_callbacks(), max_steps=TRAINED).fit(module, data)
    sources, network = [t for t, _ in titles(DECODED, seed=7)], module.eval().network
    marked = text_ids(module.tokenizer, sources)
    in_order = np.argsort([len(ids) for ids in marked], kind="stable")

    def batches(order: np.ndarray) -> list[dict[str, Any]]:
        parts = np.split(order, range(ROWS, DECODED, ROWS))
        return [padded_texts([marked[i] for i in part]) for part in parts]

    ours, theirs, model = [], [], network.model
    for _ in range(ROUNDS):
        begun, num_tokens = time.perf_counter(), 0
        for batch in batches(in_order):
            given = (batch["input_ids"], batch["attention_mask"], torch.arange(ROWS))
            found = write(network, *given, decoding, module.tokenizer.end_id, 257)
            num_tokens += int((found.token_ids >= 0).sum())
        ours.append(num_tokens / (time.perf_counter() - begun))
        begun, their_tokens = time.perf_counter(), 0
        for batch in batches(np.arange(DECODED)):
            mask = batch["attention_mask"].long()
            given = {"input_ids": batch["input_ids"], "attention_mask": mask}
            answer = model.generate(**given, max_new_tokens=64, do_sample=False)
            their_tokens += int((answer[:, 1:] != module.tokenizer.end_id).sum())
        theirs.append(their_tokens / (time.perf_counter() - begun))
        assert abs(num_tokens - their_tokens) < 0.01 * num_tokens  # rounding changes a few
    aim, what = Aim(2.0, is_least=True), f"greedy decoding of {DECODED} job titles"
    figures.add(FAMILY, what, "tokens/s", ours, "generate", theirs, aim, note=WORK)
