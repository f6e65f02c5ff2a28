"""Tokens that are whole words: nothing is lost but the kind of white space, nothing is dropped."""

from pathlib import Path

import numpy as np
import pytest

from datamodules.tokenizers.text import (
    TextTokenizer,
    TokenizerOptions,
    make_tokenizer,
    word_tokenizer,
)
from tests.text_corpora import saved_tokenizer

TEXTS = ["the fox sat . then it ran ,", "a fox\n\tsaw\u2003Søren the \x1c .", "<unk> 日本 😀"]
# In the order of their ids.
WORDS = ["\x1c", ",", ".", "<unk>", "Søren", "a", "fox", "it", "ran", "sat", "saw", "the", "then"]
WORDS += ["日本", "😀"]


def made(*texts: str) -> TextTokenizer:
    return make_tokenizer(TokenizerOptions("words"), iter(texts or TEXTS))


def test_ids_are_the_words_in_order_and_end_of_text_is_the_last() -> None:
    tokenizer = made()
    assert tokenizer.vocab_size == len(WORDS) + 1
    assert tokenizer.end_id == tokenizer.begin_id == len(WORDS)
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        words = text.replace("\n\t", " ").replace("\u2003", " ").split(" ")
        assert ids.dtype == np.int64
        assert ids.tolist() == [WORDS.index(word) for word in words]
        assert tokenizer.decode(ids) == " ".join(words)
    assert made(*reversed(TEXTS)).digest == tokenizer.digest
    assert TextTokenizer.from_dict(tokenizer.to_dict()).digest == tokenizer.digest


def test_a_special_token_in_a_text_is_no_word() -> None:
    tokenizer = made("a fox<|endoftext|>a hen <|endoftext|>")
    assert tokenizer.vocab_size == 4
    ids = tokenizer.encode("hen<|endoftext|> fox a")
    assert ids.tolist() == [2, 3, 1, 0]
    assert tokenizer.decode(ids) == "hen fox a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hen <|endoftext|> fox a"


def test_what_follows_begins_with_a_space() -> None:
    tokenizer = made()
    first, then = tokenizer.encode("the fox"), tokenizer.encode("sat . then")
    whole = tokenizer.decode(np.concatenate([first, then]))
    assert tokenizer.decode(first) + tokenizer.decode_continuation(then) == whole
    assert tokenizer.encode_batch(["sat ."], continues=True)[0].tolist() == then[:2].tolist()
    offsets = tokenizer.encode_with_offsets(["the  fox"])[0].offsets
    assert offsets == [(0, 3), (5, 8)]
    assert tokenizer.byte_lengths() is None  # words spell no spaces


def test_transformers_reads_the_saved_folder_and_so_do_we(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = made()
    saved_tokenizer(tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "the fox <|endoftext|> the"]:
        ids = tokenizer.encode(text).tolist()
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    assert theirs.eos_token_id == theirs.pad_token_id == tokenizer.end_id
    ours = make_tokenizer(TokenizerOptions("folder", path=str(tmp_path)), iter(()))
    assert ours.to_dict() == tokenizer.to_dict()
    with pytest.raises(ValueError, match='does not know the word "wolf"'):
        ours.encode("the wolf")


@pytest.mark.parametrize("text", ["the wolf sat", "the fox<|endoftext|>wolf", "\x1c\x1d wolf"])
def test_an_unknown_word_is_named_with_its_neighbours(text: str) -> None:
    tokenizer = made("the fox sat .", "\x1c\x1d")
    with pytest.raises(ValueError, match='know the word "wolf" in .*wolf.*bytes or bpe, which'):
        tokenizer.encode_batch(["the fox", text])
    with pytest.raises(ValueError, match="does not know the word"):
        tokenizer.encode_with_offsets([text])
    assert len(tokenizer.encode("the<|endoftext|>fox")) == 3


def test_the_vocabulary_has_a_cap() -> None:
    assert word_tokenizer(["a b c"], 4).vocab_size == 4
    with pytest.raises(ValueError, match="more different words .*vocab_size 3; raise it"):
        word_tokenizer(["a b", "c"], 3)
    with pytest.raises(ValueError, match="kind words takes its vocabulary from the training text"):
        make_tokenizer(TokenizerOptions("words"), iter([" \n"]))
    assert TokenizerOptions("words").facts()["vocab_size"] == 8000
