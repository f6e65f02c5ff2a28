"""Explanations of texts and of activations, the best of several, and the file of `predict`: one
line for each activation, whole characters, no file overwritten."""

import math

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything

from datamodules.activations.datamodule import AROUND, context_of
from datamodules.text.prompts import prompt_tokens
from datamodules.tokenizers import text as tokenizers
from lit_models.consistency_lens.lens import DRAW, best_reading
from lit_models.training.dropout import mixed
from tests.consistency_lens.small_lens import data_of, module_of, trainer
from tests.consistency_lens.tiny import activations, lens_of, moved
from tests.toy import json_rows

TEXTS = ["the owl at the cat", "a cat"]
TEXT = "naïve 日本語 🙂🙃 text, and more: ça va? "
TOKENIZERS = {
    "bytes": tokenizers.byte_tokenizer(),
    "bpe": tokenizers.bpe_tokenizer(iter([TEXT * 3]), 300),
    "words": tokenizers.word_tokenizer(iter(["the owl saw the cat"]), 50),
}


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_part_of_a_character_is_shown_as_such(kind):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("aé語b")
    found = [context_of(tokenizer, ids, position) for position in range(len(ids))]
    assert found[0]["token"][0] == "a"
    assert all(set("".join(context.values())) <= set("aé語b\ufffd") for context in found)


def test_contexts_of_words_are_joined_as_the_text_is():
    tokenizer = TOKENIZERS["words"]
    found = context_of(tokenizer, tokenizer.encode("the owl saw the cat"), 2)
    assert [part.split() for part in found.values()] == [["the", "owl"], ["saw"], ["the", "cat"]]
    assert "".join(found.values()).strip() == "the owl saw the cat"
    long = context_of(tokenizer, tokenizer.encode("the cat " * 20), 20)
    assert [len(part.split()) for part in long.values()] == [AROUND, 1, AROUND]


def predicted(folder, name, best_of=1, **options):
    """Return a module, its data, and the lines that it predicts."""
    data = data_of(folder, predict_output=str(folder / f"{name}.jsonl"), **options)
    seed_everything(1, verbose=False)
    module = module_of(best_of=best_of)
    trainer(folder / name).predict(module, data, return_predictions=False)
    return module, data, json_rows(folder / f"{name}.jsonl")


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Return the folder of some predictions, and what `predicted` returns for each of them."""
    folder = tmp_path_factory.mktemp("readings")
    pieces = {"global_batch_size": 5, "micro_batch_size": 2}
    every = {"one": predicted(folder, "one"), "four": predicted(folder, "four", 4)}
    return {"folder": folder, **every, "pieces": predicted(folder, "pieces", 4, **pieces)}


def test_the_best_of_several_readings_is_written_whatever_the_batches(lines):
    one, four, pieces = (lines[name][-1] for name in ("one", "four", "pieces"))
    better = [b["error"] < a["error"] for a, b in zip(one, four, strict=True)]
    assert 0 < sum(better) < len(better)
    for a, b, c in zip(one, four, pieces, strict=True):
        assert (b["error"] < a["error"]) == (b["explanation"] != a["explanation"])
        assert b["error"] <= a["error"]
        assert b["explanation"] == c["explanation"]
        assert b["error"] == pytest.approx(c["error"], abs=2e-6)


def test_the_best_reading_is_that_of_a_slow_search():
    lens, given, keys = moved(lens_of(), 0.3).eval(), activations(6), torch.arange(6) + 40
    found = best_reading(lens.requires_grad_(False), given, keys, 5)
    taken = set()
    for row in range(6):
        one, key = given[[row]], keys[[row]]
        said = [lens.verbalizer.explain(one)]
        said += [lens.verbalizer.explain(one, mixed(key, DRAW + draw)) for draw in range(4)]
        errors = [float((lens.reconstructor(s.embeddings) - one).square().sum()) for s in said]
        best = errors.index(min(errors))
        taken.add(best)
        assert torch.equal(found.token_ids[row], said[best].token_ids[0])
        torch.testing.assert_close(found.logits[row], said[best].logits[0])
    assert len(taken) > 2


@torch.no_grad()
def test_a_reading_says_what_the_words_are_worth(lines):
    module, *_ = lines["one"]
    lens, tokenizer = module.lens, module.tokenizer
    for text, of_text in zip(TEXTS, module.readings(TEXTS, None), strict=True):
        (ids,) = prompt_tokens(tokenizer, [text])
        hidden = lens.subject.of_layers(torch.tensor([ids]))[-1][0]
        assert [r.position for r in of_text] == list(range(len(ids)))
        assert "".join(r.token for r in of_text[1:]).split() == text.split()
        for true, reading in zip(hidden, of_text, strict=True):
            said = lens.verbalizer.explain(true[None])
            rebuilt = lens.reconstructor(said.embeddings)[0]
            words, chances = said.token_ids[0].tolist(), said.logits[0].double().softmax(-1)
            product = math.prod(float(chances[i, word]) for i, word in enumerate(words))
            cosine = float(rebuilt @ true / (rebuilt.norm() * true.norm()))
            saved = 1 - float((rebuilt - true).square().sum() / (lens.mean - true).square().sum())
            assert reading.explanation == tokenizer.decode(words)
            assert reading.confidence == pytest.approx(product ** (1 / len(words)), rel=1e-4)
            assert (reading.cosine, reading.fve) == pytest.approx((cosine, saved), abs=1e-4)
        assert module.readings([text]) == [of_text[-1:]]
        assert module.readings([text], 0) == module.readings([text], -len(ids)) == [of_text[:1]]
        assert module.readings([text], best_of=8)[0][0].fve >= of_text[-1].fve
    assert [r[0].explanation for r in module.readings(TEXTS)] == module.explain(TEXTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"position": 3}, "position 3 is none of the 3 tokens of 'a cat'; give one from 0 to 2"),
        ({"position": -4}, "position -4 is none of the 3"),
        ({"best_of": 0}, "readings.best_of must be at least 1, got 0"),
    ],
)
def test_a_position_that_does_not_exist_is_refused(lines, options, message):
    with pytest.raises(ValueError, match=message):
        lines["one"][0].readings(["a cat"], **options)


def test_every_activation_has_its_line(lines):
    module, data, rows = lines["one"]
    dataset = data.datasets["predict"]
    assert len(rows) == len(dataset.lengths) > 8
    assert [line["position"] for line in rows] == dataset.position.tolist()
    for number, line in enumerate(rows):
        tokens = dataset.pieces.tokens(int(dataset.piece[number]))
        text = dataset.pieces.store.tokenizer.decode(tokens, skip_special_tokens=False)
        assert (line["before"] + line["token"] + line["after"]).strip() in text
        shown = dataset.pieces.store.tokenizer.encode(line["token"].strip())
        assert shown.tolist() == [tokens[line["position"]]]
        assert line["document"].startswith("test:")
        assert len(line["explanation"].split()) == module.lens_options.num_words
        nearest = list(line["nearest_controls"].values())
        assert nearest == sorted(nearest)
        assert len(nearest) == 3
        assert np.isfinite(line["error"])
    with pytest.raises(ValueError, match="one.jsonl exists and is not overwritten"):
        predicted(lines["folder"], "one")
    with pytest.raises(FileExistsError, match="one.jsonl exists and is not overwritten"):
        data.write_predictions({}, lines["folder"] / "one.jsonl")


def test_explanations_of_byte_tokens_are_one_line_of_sound_json(tmp_path):
    options = tokenizers.TokenizerOptions("bytes")
    _, _, lines = predicted(tmp_path, "bytes", tokenizer=options, context_length=32)
    assert all(line["token"] for line in lines)
