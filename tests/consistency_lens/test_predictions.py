"""The file of `predict`: one line for each activation, whole characters, no file overwritten."""

import numpy as np
import pytest
from lightning.pytorch import seed_everything

from datamodules.activations.datamodule import AROUND, context_of
from datamodules.tokenizers import text as tokenizers
from tests.consistency_lens.small_lens import data_of, module_of, trainer
from tests.toy import json_rows

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


def predicted(folder, name, **options):
    seed_everything(1)
    data = data_of(folder, predict_output=str(folder / f"{name}.jsonl"), **options)
    module = module_of()
    trainer(folder / name).predict(module, data, return_predictions=False)
    return module, data, json_rows(folder / f"{name}.jsonl")


def test_every_activation_has_its_line_whatever_the_batches(tmp_path):
    module, data, lines = predicted(tmp_path, "whole")
    dataset = data.datasets["predict"]
    assert len(lines) == len(dataset.lengths) > 8
    assert [line["position"] for line in lines] == dataset.position.tolist()
    for number, line in enumerate(lines):
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
    _, _, again = predicted(tmp_path, "pieces", global_batch_size=5, micro_batch_size=2)
    for one, other in zip(lines, again, strict=True):
        assert one["error"] == pytest.approx(other["error"], abs=2e-6)
        assert one["explanation"] == other["explanation"]
    with pytest.raises(ValueError, match="whole.jsonl exists and is not overwritten"):
        predicted(tmp_path, "whole")
    with pytest.raises(FileExistsError, match="whole.jsonl exists and is not overwritten"):
        data.write_predictions({}, tmp_path / "whole.jsonl")


def test_explanations_of_byte_tokens_are_one_line_of_sound_json(tmp_path):
    options = tokenizers.TokenizerOptions("bytes")
    _, _, lines = predicted(tmp_path, "bytes", tokenizer=options, context_length=32)
    assert all(line["token"] for line in lines)
