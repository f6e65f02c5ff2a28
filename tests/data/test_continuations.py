"""Texts that go on in the middle of a document, with tokenizers that mark where words begin."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from datamodules.files import documents
from datamodules.files.splitting import TRAIN, VALIDATION
from datamodules.text.prompts import completion_text
from datamodules.text.splitting import TextSplit
from datamodules.text.store import open_token_store
from datamodules.tokenizers.spelling import without_first_space
from datamodules.tokenizers.text_tokenizer import TextTokenizer
from datamodules.tokenizers.trained import byte_tokenizer, character_tokenizer
from lit_models.causal_lm.generation import _Stops
from tests.text_corpora import request, text_file

END, WORD, TAIL, LETTER, LINE, SPACE = 1, 258, 259, 260, 261, 262


def marked(kind: str) -> TextTokenizer:
    """Return a tokenizer as Llama has it: old (`prepend`), or newer ones (`always`, `first`)."""
    pieces = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁he", "n", "he", "\n", "▁"]
    model = models.BPE(
        {piece: i for i, piece in enumerate([*pieces, "h", "e"])},
        [("h", "e"), ("▁", "he")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    if kind == "prepend":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", kind, split=False)
    ends = [decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), *ends]
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    return TextTokenizer(backend, END)


KINDS = ["prepend", "always", "first"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_keeps_the_space_before_its_first_word(kind):
    tokenizer = marked(kind)
    assert tokenizer.decode([WORD, TAIL]) == "hen"
    assert tokenizer.decode_continuation([WORD, TAIL]) == " hen"
    assert tokenizer.decode_continuation([TAIL]) == "n"
    assert tokenizer.decode_continuation([]) == ""
    assert tokenizer.decode_continuation([2 + 0xC3, 2 + 0xA9, END]) == "é"
    assert tokenizer.decode_continuation([2 + 0xC3]) == "\ufffd"
    ids = np.array([WORD, TAIL, -1])
    assert completion_text(tokenizer, ids, 4) == " hen"
    assert _Stops(tokenizer, ["n"]).position_in([WORD, TAIL]) == 3  # of " hen"


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), character_tokenizer(iter(["日本 \n"]))])
def test_texts_that_are_spelled_exactly_continue_as_they_begin(tokenizer):
    for text in ("", "日", " 日本\n"):
        assert tokenizer.decode_continuation(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", KINDS)
def test_a_continuation_gets_no_mark_before_its_first_word(kind):
    tokenizer = marked(kind)
    assert tokenizer.encode("hen").tolist() == [WORD, TAIL]
    assert tokenizer.encode_batch(["hen", " hen"], continues=True)[0].tolist() == [LETTER, TAIL]
    assert tokenizer.encode_batch([" hen"], continues=True)[0].tolist() == [WORD, TAIL]
    assert tokenizer.encode("hen").tolist() == [WORD, TAIL]


def test_a_space_before_the_first_byte_pair_is_left_out_too():
    backend = Tokenizer(models.BPE({"Ġ": 0, "a": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer = TextTokenizer(backend, 0)
    assert tokenizer.backend.encode("a").ids == [0, 1]
    assert without_first_space(backend).encode("a").ids == [1]
    plain = byte_tokenizer().backend
    assert without_first_space(plain) is plain


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_has_the_same_tokens_however_it_is_read(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    text = "hen he\nhe hen\nhen\nhe he\n"
    path = text_file(tmp_path / "a.txt", text)
    tokenizer = marked(kind)
    whole = tokenizer.encode(text).tolist()
    monkeypatch.setattr(documents, "SECTION_BYTES", 8)
    monkeypatch.setattr("datamodules.text.store.STRETCH_CHARACTERS", 7)
    store = open_token_store(request([path], given=tokenizer))
    assert store.stream(TRAIN).tokens.tolist() == [*whole, END]
    cut = TextSplit(0.4, by="tail")  # behind the second line
    store = open_token_store(request([path], cut, given=tokenizer))
    parts = [store.stream(part).tokens.tolist() for part in (TRAIN, VALIDATION)]
    assert parts[0] + parts[1] == [*whole, END]
    assert parts[1][0] == LETTER
