"""The module learns, writes tables, answers from Python, and refuses impossible input; its scores
equal sacrebleu's."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from datamodules import Seq2SeqDataModule
from datamodules.core.planned import LoaderOptions
from datamodules.files.splitting import TextSplit
from datamodules.tokenizers.text import TokenizerOptions
from lit_models import LitSeq2Seq
from lit_models.causal_lm.adapters import LoraOptions
from lit_models.seq2seq.decoding import Seq2SeqDecoding
from lit_models.seq2seq.module import WrittenMetrics
from lit_models.seq2seq.network import Seq2SeqConfig
from tests.seq2seq.tiny import saved
from tests.text_corpora import table
from tests.toy import csv_rows, toy_trainer

ADAMW = partial(torch.optim.AdamW, lr=0.01)
SMALL = Seq2SeqConfig(width=32, num_encoder_layers=1, num_decoder_layers=1, num_heads=2)
WORDS = ("smith", "baker", "weaver", "tailor", "miller", "tanner")


@pytest.fixture
def pairs(tmp_path):
    """A table of words, and the words without vowels."""
    rows = [
        (f"{''.join(c for c in w if c not in 'aeiou')} {n}", w) for n in range(9) for w in WORDS
    ]
    return table(tmp_path / "pairs.csv", rows)


def data_of(files, **options):
    options = {"global_batch_size": 9, "max_source_tokens": 64, "max_target_tokens": 64, **options}
    how = {"split": TextSplit(0.2, 0.1), "loader": LoaderOptions(num_workers=0)}
    return Seq2SeqDataModule(train_files=files, **how, **options)


def trained(folder, files, epochs=28, **options):
    decoding = Seq2SeqDecoding(max_new_tokens=8)
    module = LitSeq2Seq(ADAMW, decoding=decoding, **{"network": SMALL, **options})
    trainer = toy_trainer(folder, max_epochs=epochs, check_val_every_n_epoch=epochs)
    trainer.fit(module, data_of(files))
    return module, trainer


def test_it_learns_writes_every_row_and_answers_from_python(tmp_path, pairs):
    torch.manual_seed(0)
    module, trainer = trained(tmp_path, pairs)
    metrics = trainer.callback_metrics
    assert metrics["val/exact_match"] == 1
    assert metrics["val/chrf"] == metrics["val/bleu"] * 0 + 100
    sources = [("smth 3", "a"), ("bkr 77", "b"), ("smth 3", "c")]
    path = table(tmp_path / "sources.csv", sources, ("source", "note"))
    output = tmp_path / "done.csv"
    data = data_of(pairs, predict_files=path, predict_output=str(output))
    trainer.predict(module, data)
    rows = csv_rows(output)
    assert [(row["source"], row["note"]) for row in rows] == sources
    assert [row["translation"] for row in rows] == ["smith", "baker", "smith"]
    assert all(0.5 < float(row["confidence"]) <= 1 for row in rows)
    assert module.translate(["bkr 77", "smth 3", "bkr 7"]) == ["baker", "smith", "baker"]
    again = LitSeq2Seq.load_from_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert again.translate(["bkr 77"], num_beams=3) == ["baker"]


def test_a_pretrained_folder_is_fine_tuned_and_exported(tmp_path, pairs, done):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder, output = saved(tmp_path / "t5"), tmp_path / "untrained.csv"
    data = data_of(pairs, predict_files=pairs, predict_output=str(output))
    toy_trainer(tmp_path / "a").predict(LitSeq2Seq(ADAMW, pretrained=str(folder)), data)
    assert output.read_text().count("\n") == 9 * len(WORDS) + 1
    module, _ = trained(tmp_path, pairs, epochs=1, network=None, pretrained=str(folder))
    assert module.recipe["network"]["config"]["model_type"] == "t5"
    exported, words = tmp_path / "exported", ["export", str(tmp_path / "checkpoints/last.ckpt")]
    output = done(*words, "--to", str(exported), "--class_path=lit_models.LitSeq2Seq")
    assert "AutoModelForSeq2SeqLM" in output
    again = LitSeq2Seq.from_exported(exported)
    sources = ["bkr", "smth 3"]
    assert again.translations(sources) == module.float().translations(sources)
    before, after = (
        json.loads((one / "generation_config.json").read_text()) for one in (folder, exported)
    )
    assert before == after
    theirs = AutoModelForSeq2SeqLM.from_pretrained(exported, dtype=torch.float32)
    torch.testing.assert_close(
        again.network.model.state_dict(), theirs.state_dict(), rtol=0, atol=0
    )
    tokenizer = AutoTokenizer.from_pretrained(exported)
    assert tokenizer("bkr").input_ids == module.tokenizer.encode("bkr").tolist()
    more, _ = trained(tmp_path / "more", pairs, epochs=1, network=None, pretrained=str(exported))
    assert more.recipe["tokenizer"] == module.recipe["tokenizer"]


def test_positions_of_a_folder_bound_the_data_and_what_is_written(tmp_path):
    pairs = table(tmp_path / "pairs.csv", [(f"b{n}", "b") for n in range(40)])
    options = {"pretrained": str(saved(tmp_path / "bart", "Bart")), "network": None}
    data = data_of(pairs, max_source_tokens=65)
    with pytest.raises(ValueError, match="data.max_source_tokens is 65, and .* has 64 positions"):
        toy_trainer(tmp_path).fit(LitSeq2Seq(ADAMW, **options), data)
    module, _ = trained(tmp_path, pairs, 1, **options)
    assert len(module.translate(["s" * 99], max_new_tokens=99)[0].encode()) < 64


def test_weights_of_other_tokens_another_network_or_adapters_are_refused(tmp_path):
    pairs = table(tmp_path / "a.csv", [(f"b{n}", "b") for n in range(40)])
    lora = LoraOptions(["qkv"])
    module = LitSeq2Seq(ADAMW, network=SMALL, lora=lora)
    toy_trainer(tmp_path / "a", max_steps=1, limit_val_batches=0).fit(module, data_of(pairs))
    start = {"network": SMALL, "lora": lora, "init_from": tmp_path / "a/checkpoints/last.ckpt"}
    for kind, options, message in (
        ("characters", {}, "was trained with another tokenizer than that of the data"),
        ("bytes", {"network": replace(SMALL, num_heads=4)}, "num_heads 2 there and 4 here"),
        ("bytes", {"lora": None}, "was trained with LoRA, and this run has none"),
        ("bytes", {"network": Seq2SeqConfig(9, 8)}, "has 257 tokens and the network embeds 9"),
    ):
        data = data_of(pairs, tokenizer=TokenizerOptions(kind))
        with pytest.raises(ValueError, match=message):
            toy_trainer(tmp_path / "b").fit(LitSeq2Seq(ADAMW, **start | options), data)


TEXTS = ["the baker's old wife", "smed og husmand", "", "shoe maker, retired.", "wool weaver", "x"]
LONG = ["one two three four"]
TARGETS = ["the baker's wife", "smed og husmand", "tailor", "shoemaker", "a weaver of wool", "x"]


def scores_of(texts, targets, weights=None):
    metrics = WrittenMetrics()
    for first in range(0, len(texts), 2):
        part = slice(first, first + 2)
        weight = torch.ones(len(texts[part])) if weights is None else weights[part]
        metrics.add_batch(texts[part], targets[part], weight)
    return {name: float(metric.compute()) for name, metric in metrics.items()}


@pytest.mark.parametrize(
    ("texts", "targets"),
    [(TEXTS, TARGETS), (LONG, LONG), (LONG, ["xyz"]), ([""], LONG)],
    ids=["some right", "all right", "all wrong", "empty"],
)
def test_scores_of_a_split_are_those_of_all_its_texts_at_once(texts, targets):
    from sacrebleu.metrics import BLEU, CHRF

    found = scores_of(texts, targets)
    assert found["exact_match"] == np.mean([*map(str.__eq__, texts, targets)])
    assert found["chrf"] == pytest.approx(CHRF().corpus_score(texts, [targets]).score, abs=1e-9)
    assert found["bleu"] == pytest.approx(BLEU().corpus_score(texts, [targets]).score, abs=1e-9)


def test_fillers_count_nowhere():
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    found = scores_of([*TEXTS, "so", "no"], [*TARGETS, "so", "yes"], weights)
    assert found == scores_of(TEXTS, TARGETS)
