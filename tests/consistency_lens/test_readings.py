"""Explanations of texts and of activations, and the best of several."""

import math

import pytest
import torch
from lightning.pytorch import seed_everything

from datamodules.text.prompts import prompt_tokens
from lit_models.consistency_lens.lens import DRAW, best_reading
from lit_models.training.dropout import mixed
from tests.consistency_lens.small_lens import data_of, module_of, trainer
from tests.consistency_lens.tiny import activations, lens_of, moved
from tests.toy import json_rows

TEXTS = ["the owl at the cat", "a cat"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Return a module, and the lines that it predicts for each `best_of`."""
    folder = tmp_path_factory.mktemp("readings")

    def predicted(best_of, **options):
        name = f"{best_of}{len(options)}.jsonl"
        data = data_of(folder, predict_output=str(folder / name), **options)
        seed_everything(1, verbose=False)
        module = module_of(best_of=best_of)
        trainer(folder / name[:-6]).predict(module, data, return_predictions=False)
        return module, json_rows(folder / name)

    pieces = {"global_batch_size": 5, "micro_batch_size": 2}
    return {"one": predicted(1), "four": predicted(4), "pieces": predicted(4, **pieces)}


def test_the_best_of_several_readings_is_written_whatever_the_batches(lines):
    (_, one), (_, four), (_, pieces) = lines.values()
    better = [b["error"] < a["error"] for a, b in zip(one, four, strict=True)]
    assert 0 < sum(better) < len(better)
    for a, b, c in zip(one, four, pieces, strict=True):
        assert (b["error"] < a["error"]) == (b["explanation"] != a["explanation"])
        assert b["error"] <= a["error"]
        assert b["explanation"] == c["explanation"]


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
    module, _ = lines["one"]
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
