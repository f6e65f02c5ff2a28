"""Tokenizers: no text is lost, bytes add up, and transformers reads the saved files.

A tokenizer of words loses only the kind of white space.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from datamodules.tokenizers.text import (
    TextTokenizer,
    TokenizerOptions,
    bpe_tokenizer,
    byte_tokenizer,
    make_tokenizer,
    word_tokenizer,
)
from tests.text_corpora import LETTER, TAIL, WORD, saved_tokenizer, sentence_piece

WORD_TEXTS = ["the fox sat . then it ran ,", "a fox\n\tsaw\u2003Søren the \x1c .", "<unk> 日本 😀"]
# In the order of their ids.
WORDS = ["\x1c", ",", ".", "<unk>", "Søren", "a", "fox", "it", "ran", "sat", "saw", "the", "then"]
WORDS += ["日本", "😀"]
TEXTS = [
    "The hen sat on the mat. The hen sat, and sat: again and again!\n\n\tThe end  ",
    "Søren naïvely ate 日本 rice 😀 with a ▁ and \x00.",
    "def f(x):\n    return x + 1\r\n",
]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
KINDS = {
    "characters": TokenizerOptions("characters", chat_template="plain"),
    "bytes": TokenizerOptions("bytes", chat_template="plain"),
    "bpe": TokenizerOptions("bpe", vocab_size=300, chat_template="plain"),
}


def made(kind: str) -> TextTokenizer:
    return make_tokenizer(KINDS[kind], iter(TEXTS))


def words_of(*texts: str) -> TextTokenizer:
    options = TokenizerOptions("words", chat_template="plain")
    return make_tokenizer(options, iter(texts or WORD_TEXTS))


def folder_of(backend: Tokenizer, folder: Path, **config: object) -> TokenizerOptions:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return TokenizerOptions("folder", path=str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_comes_back_and_its_bytes_add_up(kind: str) -> None:
    tokenizer = made(kind)
    lengths = tokenizer.byte_lengths()
    assert lengths is not None
    assert lengths.shape == (tokenizer.vocab_size,)
    for text, ids in zip(TEXTS, tokenizer.encode_batch(TEXTS), strict=True):
        assert ids.dtype == np.int64
        assert tokenizer.decode(ids) == text
        assert lengths[ids].sum() == len(text.encode())
    assert lengths[tokenizer.end_id] == 0
    assert tokenizer.special_ids.tolist() == [tokenizer.end_id]
    assert TextTokenizer.from_dict(tokenizer.to_dict()).digest == tokenizer.digest


@pytest.mark.parametrize("kind", [*KINDS, "words"])
def test_transformers_reads_the_saved_folder_and_so_do_we(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = words_of() if kind == "words" else made(kind)
    saved_tokenizer(tokenizer, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    texts = WORD_TEXTS if kind == "words" else TEXTS
    for text in [*texts, f"{texts[0]} <|endoftext|> {texts[2]}"]:
        ids = tokenizer.encode(text).tolist()
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)
    assert theirs.eos_token_id == theirs.pad_token_id == tokenizer.end_id
    rendered = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert rendered == tokenizer.render(CHAT, add_generation_prompt=True)
    ours = make_tokenizer(TokenizerOptions("folder", path=str(tmp_path)), iter(()))
    assert ours.to_dict() == tokenizer.to_dict()


def test_ids_are_the_words_in_order_and_end_of_text_is_the_last() -> None:
    tokenizer = words_of()
    assert tokenizer.vocab_size == len(WORDS) + 1
    assert tokenizer.end_id == tokenizer.begin_id == len(WORDS)
    for text, ids in zip(WORD_TEXTS, tokenizer.encode_batch(WORD_TEXTS), strict=True):
        words = text.replace("\n\t", " ").replace("\u2003", " ").split(" ")
        assert ids.dtype == np.int64
        assert ids.tolist() == [WORDS.index(word) for word in words]
        assert tokenizer.decode(ids) == " ".join(words)
    assert words_of(*reversed(WORD_TEXTS)).digest == tokenizer.digest
    assert TextTokenizer.from_dict(tokenizer.to_dict()).digest == tokenizer.digest


def test_a_special_token_in_a_text_is_no_word() -> None:
    tokenizer = words_of("a fox<|endoftext|>a hen <|endoftext|>")
    assert tokenizer.vocab_size == 4
    ids = tokenizer.encode("hen<|endoftext|> fox a")
    assert ids.tolist() == [2, 3, 1, 0]
    assert tokenizer.decode(ids) == "hen fox a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hen <|endoftext|> fox a"


def test_a_continuation_of_words_begins_with_a_space() -> None:
    tokenizer = words_of()
    first, then = tokenizer.encode("the fox"), tokenizer.encode("sat . then")
    whole = tokenizer.decode(np.concatenate([first, then]))
    assert tokenizer.decode(first) + tokenizer.decode_continuation(then) == whole
    assert tokenizer.encode_batch(["sat ."], continues=True)[0].tolist() == then[:2].tolist()
    assert tokenizer.encode_with_offsets(["the  fox"])[0].offsets == [(0, 3), (5, 8)]
    assert tokenizer.byte_lengths() is None  # words do not encode spaces


@pytest.mark.parametrize("text", ["the wolf sat", "the fox<|endoftext|>wolf", "\x1c\x1d wolf"])
def test_an_unknown_word_is_named(text: str) -> None:
    tokenizer = words_of("the fox sat .", "\x1c\x1d")
    with pytest.raises(ValueError, match='know the word "wolf"; write .*bytes or bpe, which'):
        tokenizer.encode_batch(["the fox", text])
    with pytest.raises(ValueError, match="does not know the word"):
        tokenizer.encode_with_offsets([text])
    assert len(tokenizer.encode("the<|endoftext|>fox")) == 3


def test_words_of_fewer_texts_become_the_unknown_token() -> None:
    texts = ["flow flows of air", "air flow at 3 angles", "angle of the wing"]
    tokenizer = make_tokenizer(TokenizerOptions(kind="words", min_count=2), iter(texts))
    unknown = tokenizer.backend.token_to_id("<|unknown|>")
    known = {"air", "flow", "of"}
    assert {w for w in tokenizer.backend.get_vocab() if not w.startswith("<|")} == known
    ids = tokenizer.encode("flow of molasses").tolist()
    assert ids[-1] == unknown not in ids[:-1]
    assert unknown in tokenizer.special_ids.tolist()


def test_a_vocabulary_of_words_has_a_cap() -> None:
    assert word_tokenizer(["a b c"], 4).vocab_size == 4
    for min_count in (None, 1):
        with pytest.raises(ValueError, match="more different words .*vocab_size 3; raise it, or d"):
            word_tokenizer(["a b", "c"], 3, min_count)
    assert TokenizerOptions("words").facts()["vocab_size"] == 8000


def test_byte_pairs_depend_on_the_texts_alone() -> None:
    texts = [" ".join(random.Random(i).choices(TEXTS[0].split(), k=20)) for i in range(50)]
    tokenizer = bpe_tokenizer(texts, 275)
    assert tokenizer.vocab_size == 275
    assert tokenizer.end_id == 274
    assert bpe_tokenizer(reversed(texts), 275).digest == tokenizer.digest
    assert len(tokenizer.encode(" sat")) == 1  # a frequent word
    assert bpe_tokenizer(["aaaa"], 275).vocab_size < 275  # no pairs are left to merge


def test_a_template_sees_the_special_tokens_and_runs_in_a_sandbox(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}")
    options = TokenizerOptions("bytes", chat_template=str(path))
    assert make_tokenizer(options, iter(())).render(CHAT) == "<|endoftext|>[Hi][Yes]"
    path.write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(ValueError, match="chat template refuses these messages .*__class__"):
        make_tokenizer(options, iter(())).render(CHAT)
    path.write_text("{% if true %}")
    with pytest.raises(ValueError, match="chat template refuses .*end of template"):
        make_tokenizer(options, iter(())).render(CHAT)


def test_a_character_that_is_not_in_the_vocabulary_is_named() -> None:
    tokenizer = made("characters")
    with pytest.raises(ValueError, match='does not know the character "Z"; write .*bytes or'):
        tokenizer.encode("The<|endoftext|> Zebra")
    with pytest.raises(ValueError, match="does not know"):
        tokenizer.encode_with_offsets(["fine", "Z"])
    # The characters of a special token need not be in the vocabulary: it is matched as a whole.
    assert tokenizer.encode("The<|endoftext|>")[-1] == tokenizer.end_id


def test_a_folder_whose_bytes_are_not_all_there_drops_nothing_either(tmp_path: Path) -> None:
    backend = Tokenizer(models.BPE({"h": 0, "e": 1, "n": 2, "Ġ": 3, "Ã": 4, "</s>": 5}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = make_tokenizer(folder_of(backend, tmp_path, eos_token="</s>"), iter(()))
    assert tokenizer.encode("hen hen</s>").tolist() == [0, 1, 2, 3, 0, 1, 2, 5]
    with pytest.raises(ValueError, match='the character "é"'):
        tokenizer.encode("hené")  # the first byte is in it, the second is not


def test_pieces_of_sentencepiece_spell_their_bytes(tmp_path: Path) -> None:
    options = folder_of(sentence_piece().backend, tmp_path, eos_token="</s>")
    tokenizer = make_tokenizer(options, iter(()))
    lengths = tokenizer.byte_lengths()
    assert lengths is not None
    text = "hen hen é日"
    ids = tokenizer.encode(text)
    assert lengths[ids].tolist() == [2, 1, 3, 1, *[1] * 6]  # he, n, ▁he, n, ▁, bytes of é and 日
    assert tokenizer.decode(ids) == text
    assert lengths[tokenizer.end_id] == 0
    assert tokenizer.begin_id is None


def test_pieces_that_spell_no_spaces_have_no_byte_lengths(tmp_path: Path) -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "hen": 1, "[SEP]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    options = folder_of(backend, tmp_path, eos_token={"content": "[SEP]"})
    assert make_tokenizer(options, iter(())).byte_lengths() is None


def test_a_folder_neither_cuts_nor_adds_tokens_and_knows_its_template(tmp_path: Path) -> None:
    backend = sentence_piece().backend
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    backend.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    options = folder_of(backend, tmp_path, eos_token="</s>", chat_template="old")
    tokens = make_tokenizer(options, iter(())).encode("hen hen").tolist()
    assert tokens == [LETTER, TAIL, WORD, TAIL]
    assert make_tokenizer(options, iter(())).chat_template == "old"
    (tmp_path / "chat_template.jinja").write_text("new")
    assert make_tokenizer(options, iter(())).chat_template == "new"
    given = TokenizerOptions("folder", path=str(tmp_path), chat_template="plain")
    assert "assistant" in str(make_tokenizer(given, iter(())).chat_template)


def test_a_changed_folder_or_template_changes_the_facts(tmp_path: Path) -> None:
    options = folder_of(sentence_piece().backend, tmp_path, eos_token="</s>")
    before = options.facts()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<unk>"}')
    assert options.facts() != before
    assert KINDS["bpe"].facts()["chat_template"].startswith("{%")
    assert TokenizerOptions("bpe").facts() == TokenizerOptions("bpe", vocab_size=8000).facts()


def test_a_folder_without_files_or_without_an_end_is_refused(tmp_path: Path) -> None:
    options = TokenizerOptions("folder", path=str(tmp_path))
    with pytest.raises(FileNotFoundError, match="holds no tokenizer.json; .*Nothing is downloaded"):
        make_tokenizer(options, iter(()))
    (tmp_path / "source.spm").touch()
    with pytest.raises(ValueError, match="is of OPUS-MT, whose two tokenizers"):
        make_tokenizer(options, iter(()))
    folder_of(sentence_piece().backend, tmp_path)
    said = 'no end-of-text token.*names None. Set "eos_token" in its tokenizer_'
    with pytest.raises(ValueError, match=said):
        make_tokenizer(options, iter(()))
    folder_of(sentence_piece().backend, tmp_path, eos_token="<end>")
    with pytest.raises(ValueError, match="no end-of-text token of its vocabulary.*names <end>"):
        make_tokenizer(options, iter(()))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="the tokenizer in .* cannot be read .* copy the folder"):
        make_tokenizer(options, iter(()))


def test_no_text_and_no_template_are_refused() -> None:
    for kind in ("characters", "bpe", "words"):
        with pytest.raises(ValueError, match=f"kind {kind} takes .* training text, and there is n"):
            make_tokenizer(TokenizerOptions(kind), iter([""]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no chat template.*data.tokenizer.chat_template: a Jinja"):
        byte_tokenizer().render(CHAT)
    with pytest.raises(FileNotFoundError, match='"plan" is no file and none of the .*plain'):
        make_tokenizer(TokenizerOptions("bytes", chat_template="plan"), iter(()))
