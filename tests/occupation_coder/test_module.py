"""LitOccupationCoder in a plain script: fit, reload, code."""

import functools
import math
import re

import pytest
import torch
from lightning.pytorch import Trainer

from datamodules.occupations.datamodule import OccupationDataModule
from datamodules.occupations.store import Columns
from lit_models.occupation_coder.encoders import CharacterEncoder
from lit_models.occupation_coder.linear import LinearOptions
from lit_models.occupation_coder.loss import OccupationLossOptions
from lit_models.occupation_coder.module import LitOccupationCoder
from lit_models.occupation_coder.network import BlockDecoder
from lit_models.seo.scorer import LitTextScorer
from lit_models.training.optim import WarmupDecay
from tests.toy import toy_trainer

ROWS = [
    ("carpenter", "95410"),
    ("joiner", "95415"),
    ("farm servant", "62120"),
    ("smith and farmer", "83110;61110"),
    ("master tailor", "79100"),
]


@pytest.fixture
def table(tmp_path, own_cache):
    path = tmp_path / "rows.csv"
    lines = [f"{text},en,{codes}" for text, codes in ROWS]
    path.write_text("\n".join(["occ1,lang,codes", *lines]) + "\n", encoding="utf-8")
    return path


def data_of(table):
    columns = Columns(text="occ1", language="lang", codes=["codes"], code_separator=";")
    files = dict.fromkeys(("train_files", "validation_files", "test_files"), table)
    return OccupationDataModule(**files, columns=columns, global_batch_size=5)


def small_coder(**options) -> LitOccupationCoder:
    size = {"width": 32, "num_layers": 1, "num_heads": 2, "feed_forward": 64}
    defaults = {
        "optimizer": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.0),
        "lr_scheduler": functools.partial(WarmupDecay, warmup=0.1),
        "encoder": functools.partial(CharacterEncoder, num_buckets=256, **size),
        "decoder": functools.partial(BlockDecoder, **size),
    }
    return LitOccupationCoder(**{**defaults, **options})


def trainer_of(tmp_path, epochs=30, **limits) -> Trainer:
    seldom = {"check_val_every_n_epoch": epochs, "num_sanity_val_steps": 0}
    limits = {"max_epochs": epochs, "precision": 32, "callbacks": [], **seldom, **limits}
    return toy_trainer(tmp_path / "run", enable_checkpointing=False, **limits)


def fitted(coder, table, folder, epochs=30, **limits):
    """Train, and return the path of a checkpoint."""
    trainer = trainer_of(folder, epochs, **limits)
    trainer.fit(coder, data_of(table))
    trainer.save_checkpoint(folder / "coder.ckpt")
    return folder / "coder.ckpt"


def test_one_batch_overfits_and_a_reloaded_coder_gives_the_same_codes(table, tmp_path, caplog):
    torch.manual_seed(0)
    coder = small_coder()
    path = fitted(coder, table, tmp_path)
    texts = [text for text, _ in ROWS]
    results = coder.code(texts, language="en")
    for result, (_, codes) in zip(results, ROWS, strict=True):
        assert set(result.codes) == set(codes.split(";"))
    again = LitOccupationCoder.load_from_checkpoint(path)
    assert again.temperature == coder.temperature != {"seq2seq": 1.0, "flat": 1.0}
    for one, two in zip(results, again.code(texts, language=["en"] * 5), strict=True):
        assert one.codes == two.codes
        assert one.set_confidence == pytest.approx(two.set_confidence, abs=1e-6)
    with pytest.raises(ValueError, match="language has 2 names for 1 texts"):
        again.code(["smith"], language=["en", "da"])
    scores = trainer_of(tmp_path).test(again, data_of(table), verbose=False)[0]
    assert scores["test/exact_match"] == 1.0
    assert math.isnan(scores["test/f1_unseen_text"])  # a mean over no records
    for method in ("flat", "greedy", "beam"):
        coded = again.code(["carpenter"], method=method)[0]
        assert coded.codes == ["95410"]
        assert 0 < coded.set_confidence <= 1
    coded = again.code(["carpenter"], k_best=2)[0]
    assert coded.next_sets[0][1] <= coded.set_confidence
    again.decoding.review_for_precision = 0.95
    with caplog.at_level("INFO"):
        trainer_of(tmp_path).validate(again, data_of(table), verbose=False)
    advice = re.search(r"predict with --model.decoding.review_below=(.*)", caplog.text)
    assert 0.5 < float(advice[1]) <= 1  # the five records are learned by heart


def test_a_trained_coder_goes_on_with_its_own_codes_and_languages_alone(table, tmp_path):
    coder = small_coder()
    fitted(coder, table, tmp_path, epochs=1)
    path = fitted(coder, table, tmp_path / "again", epochs=1)  # the same data, read again
    fitted(LitOccupationCoder.load_from_checkpoint(path), table, tmp_path / "loaded", epochs=1)
    for old, new, named in (("95410", "95420", "code_book"), (",en,", ",sv,", "languages")):
        other = tmp_path / f"{named}.csv"
        other.write_text(table.read_text("utf-8").replace(old, new), "utf-8")
        for module in (coder, LitOccupationCoder.load_from_checkpoint(path)):
            with pytest.raises(ValueError, match=f"made for another {named} than the data has"):
                trainer_of(tmp_path, epochs=1).fit(module, data_of(other))
        trainer = trainer_of(tmp_path, epochs=2)
        with pytest.raises(ValueError, match=f"made for another {named} than the data has"):
            trainer.fit(small_coder(), data_of(other), ckpt_path=path, weights_only=True)


def test_a_given_temperature_stays_where_nothing_is_validated(table, tmp_path):
    coder = small_coder(temperature={"flat": 2.5})
    path = fitted(coder, table, tmp_path, epochs=1, limit_val_batches=0)
    with pytest.raises(ValueError, match="of another family: .*; give one of LitTextScorer"):
        LitTextScorer.load_from_checkpoint(path)
    again = LitOccupationCoder.load_from_checkpoint(path, temperature={"flat": 9.0})
    assert again.temperature == {"seq2seq": 1.0, "flat": 2.5}  # what the weights came with
    flat = functools.partial(again.code, ["carpenter"], language="en", method="flat")
    soft = flat()[0].set_confidence
    again.temperature["flat"] = 1.0
    assert flat()[0].set_confidence != pytest.approx(soft, rel=0.01)


def test_a_resumed_run_takes_the_temperature_that_is_given_to_it(table, tmp_path):
    coder, never = small_coder(temperature={"flat": 2.5}), {"limit_val_batches": 0}
    path = fitted(coder, table, tmp_path, epochs=1, **never)
    for temperature, expected in (({"flat": 2.5}, 1.5), ({"flat": 9.0}, 9.0)):
        content = torch.load(path, weights_only=True)
        content["occupation_recipe"]["temperature"]["flat"] = 1.5  # as a validation found it
        torch.save(content, path)
        coder, trainer = small_coder(temperature=temperature), trainer_of(tmp_path, 2, **never)
        trainer.fit(coder, data_of(table), ckpt_path=path, weights_only=True)
        assert coder.temperature == {"seq2seq": 1.0, "flat": expected}


def test_a_linear_flat_head_overfits_and_comes_back_from_a_safe_checkpoint(table, tmp_path):
    torch.manual_seed(0)
    linear = LinearOptions(num_features=512)
    loss = OccupationLossOptions(linear=linear, repeats=0.5, unused_codes=False)
    coder = small_coder(loss=loss)
    path = fitted(coder, table, tmp_path)
    torch.load(path, weights_only=True)
    again = LitOccupationCoder.load_from_checkpoint(path)
    texts = [text for text, _ in ROWS]
    for method in ("flat", "mixed"):
        results = again.code(texts, language="en", method=method)
        for one, two in zip(coder.code(texts, language="en", method=method), results, strict=True):
            assert one == two
        for result, (_, codes) in zip(results, ROWS, strict=True):
            assert set(result.codes) == set(codes.split(";"))
    other = OccupationLossOptions(linear=LinearOptions(num_features=512, within_words=True))
    with pytest.raises(ValueError, match="within_words False, but it is True here"):
        trainer_of(tmp_path).validate(small_coder(loss=other), data_of(table), ckpt_path=path)
