"""Token stores hold every token once, in the parts requested, with begin and end tokens."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from datamodules.core.store import cache_root
from datamodules.files.splitting import TEST, TRAIN, VALIDATION, TextSplit
from datamodules.text.prompts import completion_text
from datamodules.tokenizers import text as tokenizers
from lit_models.causal_lm.generation import Stops
from tests.text_corpora import (
    END_ID,
    LETTER,
    TAIL,
    WORD,
    request,
    rows_file,
    same,
    sentence_piece,
    text_file,
    texts_of,
)

pytestmark = pytest.mark.usefixtures("own_cache")

END, ROOT = 256, Path(__file__).parents[2]
BYTES = tokenizers.make_tokenizer(tokenizers.TokenizerOptions(), iter(()))


@pytest.mark.parametrize(
    ("begin_id", "expected"),
    [
        (END, None),  # one token separates two documents
        (None, "Hi<|endoftext|>you<|endoftext|>"),
        (72, None),
    ],
)
def test_begin_tokens_stand_before_each_document_or_nowhere(tmp_path, begin_id, expected):
    files = [text_file(tmp_path / "a.txt", "Hi"), text_file(tmp_path / "b.txt", "you")]
    store = request(files, given=tokenizers.TextTokenizer(BYTES.backend, END, begin_id)).open()
    stream = store.stream(TRAIN)
    sign = [] if begin_id is None else [begin_id]
    between = [END] if begin_id == END else [END, *sign]
    ids = BYTES.encode("Hi").tolist(), BYTES.encode("you").tolist()
    assert stream.tokens.tolist() == [*sign, *ids[0], *between, *ids[1], END]
    assert stream.starts.tolist() == [0, 2 + len(between)]
    assert stream.num_positions.tolist() == [2 + len(sign), 3 + len(sign)]
    assert stream.tokens.dtype == np.uint16
    if expected:
        assert "".join(texts_of(store)) == expected


def test_a_tail_has_no_begin_token_and_ends_with_the_document(tmp_path):
    files = [text_file(tmp_path / "a.txt", "abcdefgh"), text_file(tmp_path / "b.txt", "ABCDEFGH")]
    store = request(files, TextSplit(0.25, 0.25, by="tail")).open()
    sign = "<|endoftext|>"
    assert texts_of(store) == [sign + "abcd", sign + "ABCD"]
    assert texts_of(store, VALIDATION) == ["ef", "EF"]
    assert texts_of(store, TEST) == ["gh" + sign, "GH" + sign]
    own = {TRAIN: files[:1], VALIDATION: files[1:]}  # then no part is cut off
    store = request(own, TextSplit(0.25, 0.25, by="tail")).open()
    found = [texts_of(store, part) for part in (TRAIN, VALIDATION)]
    assert found == [[f"{sign}abcdefgh{sign}"], [f"{sign}ABCDEFGH{sign}"]]


@pytest.mark.parametrize("by", ["documents", "tail"])
def test_stretches_of_any_size_give_the_same_store(tmp_path, monkeypatch, by):
    rows = [{"text": f"row {i} " + "wörd " * (i % 7)} for i in range(20)]
    files = [
        text_file(tmp_path / "a.txt", "One line.\nAnd anöther line.\n" * 10),
        Path(rows_file(tmp_path / "b.jsonl", rows)),
        text_file(tmp_path / "c.txt", "The end."),
    ]
    corpus = request(files, TextSplit(0.3, 0.1, by=by))
    whole = corpus.open()
    for size in (7, 500):
        monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / f"cache-{size}"))
        monkeypatch.setattr("datamodules.text.store.STRETCH_CHARACTERS", size)
        cut = corpus.open()
        assert same(cut, whole)
        assert [p.name for p in (cache_root() / "tokens").iterdir()] == [cut.folder.name]


def test_a_vocabulary_comes_from_training_documents_alone(tmp_path):
    files = {
        TRAIN: [text_file(tmp_path / "a.txt", "abc")],
        VALIDATION: [text_file(tmp_path / "b.txt", "ab")],
    }
    options = tokenizers.TokenizerOptions(kind="characters")
    assert request(files, options=options).open().tokenizer.vocab_size == 4
    text_file(tmp_path / "b.txt", "abd")
    with pytest.raises(ValueError, match=r'b.txt:1: the tokenizer does not know the character "d"'):
        request(files, options=options).open()


def test_documents_without_text_are_counted_and_said(tmp_path, caplog):
    caplog.set_level("INFO", logger="lightning.pytorch.datamodules")
    path = text_file(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": " "}\n{"text": null}\n')
    assert len(request([path]).open().stream(TRAIN).hashes) == 1
    (said,) = caplog.messages
    assert said.startswith("Tokenised 1 documents of 1 files, 3 tokens, in ")
    assert said.endswith(f"; 2 documents without a text are left out, the first at {path}:2.")


def test_no_text_at_all_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"no text, but 1 documents without any \(.*a.txt:1\)"):
        request([text_file(tmp_path / "a.txt", "\n")]).open()
    with pytest.raises(ValueError, match=r"the files hold no text; give them at least one"):
        request([text_file(tmp_path / "a.jsonl", "")]).open()
    assert not list((cache_root() / "tokens").iterdir())


def test_half_a_character_and_foreign_tokens_are_named(tmp_path):
    path = text_file(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": "ab\\ud83d"}\n')
    with pytest.raises(ValueError, match=r'a.jsonl:2: "\\ud83d" is half of a surrogate pair'):
        request([path]).open()


@pytest.mark.parametrize("texts", ["one two three four", "one three", "one two threE"])
def test_a_file_that_changes_while_it_is_read_makes_no_store(tmp_path, monkeypatch, texts):
    def written(texts):
        return rows_file(tmp_path / "b.jsonl", [{"text": text} for text in texts.split()])

    path = Path(written("one two three"))

    def changed(*given):
        written(texts)
        return tokenizers.make_tokenizer(*given)

    corpus = request([path])
    with monkeypatch.context() as patch:
        patch.setattr("datamodules.text.store.make_tokenizer", changed)
        with pytest.raises(RuntimeError, match="while it was read; start again"):
            corpus.open()
    written("one two three")
    assert len(corpus.open().stream(TRAIN).hashes) == 3


def test_a_store_is_made_once_and_named_by_all_it_depends_on(tmp_path, monkeypatch):
    path = text_file(tmp_path / "a.txt", "Some text.\n\nAnd more.")
    base = request([path])
    store = base.open()
    others = [
        request([path], TextSplit(0.1)),
        request([path], options=tokenizers.TokenizerOptions(kind="characters")),
        request([path], text_column="body"),
        request({TRAIN: [path], VALIDATION: [path]}),
    ]
    assert len({base.folder(), *(other.folder() for other in others)}) == 5
    moved = tmp_path / "moved"
    moved.mkdir()
    assert request([text_file(moved / "b.txt", path.read_text())]).folder() == base.folder()
    monkeypatch.setattr("datamodules.text.store.make_tokenizer", None)  # making one would now fail
    assert request([path]).open().fingerprint == store.fingerprint
    text_file(path, "Other text")
    assert base.folder() != store.folder


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr("datamodules.text.store.STRETCH_CHARACTERS", 1 << 13)
    monkeypatch.setattr("datamodules.text.store.BATCH_CHARACTERS", 1 << 13)
    line = json.dumps({"text": "a line of text " * 70}) + "\n"
    peaks = []
    for num in (200, 2000):  # 0.2 and 2 MB
        path = text_file(tmp_path / f"{num}.jsonl", line * num)
        request([path]).folder()  # its digest reads the file in large steps
        tracemalloc.start()
        request([path]).open()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 0.3 * path.stat().st_size  # a few numbers for each document


def parts_of(hashes, split):
    return split.drawn(np.zeros(len(hashes), np.int8), np.array(hashes, np.uint64)).tolist()


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1), st.randoms(use_true_random=False))
def test_equal_documents_share_a_part_whatever_the_order(hashes, random):
    split = TextSplit(0.3, 0.2)
    of_text = {}
    for text, part in zip(hashes, parts_of(hashes, split), strict=True):
        assert of_text.setdefault(text, part) == part
    shuffled = random.sample(hashes, len(hashes))
    assert [of_text[text] for text in shuffled] == parts_of(shuffled, split)


@pytest.mark.parametrize(
    ("num_documents", "counts"), [(1, [1]), (2, [1, 1]), (3, [1, 1, 1]), (8, [6, 1, 1])]
)
def test_few_documents_leave_training_first_and_then_validation(num_documents, counts):
    assert np.bincount(parts_of(range(num_documents), TextSplit(0.1, 0.1))).tolist() == counts


def test_another_seed_draws_other_documents():
    parts = [parts_of(range(100), TextSplit(0.2, 0.1, seed=seed)) for seed in (0, 1)]
    assert parts[0] != parts[1]


def test_tails_are_those_of_nano_gpt():
    tails = TextSplit(by="tail").tails
    assert tails(1) == [(VALIDATION, 0, 1)]
    assert tails(10) == [(TRAIN, 0, 9), (VALIDATION, 9, 10)]
    assert tails(1_115_394) == [(TRAIN, 0, 1_003_854), (VALIDATION, 1_003_854, 1_115_394)]
    assert TextSplit(0.25, 0.25, by="tail").tails(4) == [(0, 0, 2), (1, 2, 3), (2, 3, 4)]


KINDS = ["prepend", "always", "first"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_keeps_the_space_before_its_first_word(kind):
    tokenizer = sentence_piece(kind)
    assert tokenizer.decode([WORD, TAIL]) == "hen"
    assert tokenizer.decode_continuation([WORD, TAIL]) == " hen"
    assert tokenizer.decode_continuation([TAIL]) == "n"
    assert tokenizer.decode_continuation([]) == ""
    assert tokenizer.decode_continuation([2 + 0xC3, 2 + 0xA9, END_ID]) == "é"
    assert tokenizer.decode_continuation([2 + 0xC3]) == "\ufffd"
    assert completion_text(tokenizer, np.array([WORD, TAIL, -1]), 4) == " hen"
    assert Stops(tokenizer, ["n"]).position_in([WORD, TAIL]) == 3  # of " hen"


def test_a_space_before_the_first_byte_pair_is_left_out_too():
    backend = Tokenizer(models.BPE({"Ġ": 0, "a": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer = tokenizers.TextTokenizer(backend, 0)
    ids = [tokenizer.encode_batch(["a"], (), continues)[0].tolist() for continues in (False, True)]
    assert ids == [[0, 1], [1]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_has_the_same_tokens_however_it_is_read(kind, tmp_path, monkeypatch):
    text = "hen he\nhe hen\nhen\nhe he\n"
    path = text_file(tmp_path / "a.txt", text)
    tokenizer = sentence_piece(kind)
    whole = tokenizer.encode(text).tolist()
    monkeypatch.setattr("datamodules.text.store.STRETCH_CHARACTERS", 7)
    store = request([path], given=tokenizer).open()
    assert store.stream(TRAIN).tokens.tolist() == [*whole, END_ID]
    cut = TextSplit(0.4, by="tail")  # behind the second line
    store = request([path], cut, given=tokenizer).open()
    parts = [store.stream(part).tokens.tolist() for part in (TRAIN, VALIDATION)]
    assert parts[0] + parts[1] == [*whole, END_ID]
    assert parts[1][0] == LETTER
