"""Attributes and files of documents, looked up by the hash of their text."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules import ActivationDataModule, TextSplit, TokenizerOptions
from datamodules.activations.documents import NONE, DocumentFacts, first_tokens, group_names
from datamodules.text.store import TokenStore
from tests.search_collections import write_lines
from tests.text_corpora import SPACE, TAIL, WORD, rows_file, sentence_piece, text_file

ROWS = [
    {"text": "an owl at home", "attributes": {"pet": "owl"}},
    {"text": "a cat at sea", "attributes": {"place": "sea", "pet": "cat"}},
    {"text": "nothing is known"},
    {"text": "a hen", "attributes": {"pet": None, "place": None}},
]


def facts(files: list[Path]) -> tuple[TokenStore, DocumentFacts]:
    data = ActivationDataModule(
        train_files=[str(path) for path in files],
        tokenizer=TokenizerOptions("words"),
        split=TextSplit(0),
    )
    data.store = data.open_store()
    return data.store, data.facts(0)


def words(store: TokenStore, found: DocumentFacts) -> list[list[str | None]]:
    """Return the attributes of each document as words, by name."""
    decode, order = store.tokenizer.decode, [found.names.index(name) for name in ("pet", "place")]
    rows = found.attributes[:, order].tolist()
    return [[None if t == NONE else decode([t]).strip() for t in row] for row in rows]


EXPECTED = [["owl", None], ["cat", "sea"], [None, None], [None, None]]


@pytest.mark.parametrize("kind", ["jsonl", "struct", "map"])
def test_words_of_rows_become_tokens(tmp_path, kind):
    path, text = tmp_path / "mine.parquet", pa.array([row["text"] for row in ROWS])
    given = [row.get("attributes") for row in ROWS]
    pairs = [None if row is None else list(row.items()) for row in given]
    as_map = pa.array(pairs, pa.map_(pa.string(), pa.string()))
    column = as_map if kind == "map" else pa.array(given)
    pq.write_table(pa.table({"text": text, "attributes": column}), path)
    if kind == "jsonl":
        path = Path(rows_file(tmp_path / "mine.jsonl", ROWS))
    store, found = facts([path])
    assert found.names == ["pet", "place"]
    assert words(store, found) == EXPECTED


def test_a_word_that_the_tokenizer_cannot_spell_is_named(tmp_path):
    path = rows_file(tmp_path / "mine.jsonl", [{"text": "an owl", "attributes": {"pet": "yeti"}}])
    with pytest.raises(ValueError, match='does not know the word "yeti"'):
        facts([path])


@pytest.mark.parametrize("wrong", ["owl", ["owl"], 3, {"pet": ["owl"]}])
def test_other_than_a_mapping_to_words_is_refused_with_its_place(tmp_path, wrong):
    path = rows_file(tmp_path / "mine.jsonl", [ROWS[0], {"text": "x y", "attributes": wrong}])
    message = 'mine.jsonl:2: "attributes" must map names to words, .*; mend it, or give'
    with pytest.raises(ValueError, match=message):
        facts([path])


def test_documents_know_their_file_of_any_kind(tmp_path):
    files = [
        rows_file(tmp_path / "rows.jsonl", ROWS[:2]),
        text_file(tmp_path / "text.txt", "an owl flew\n"),
        rows_file(tmp_path / "more.jsonl", [{"text": "a hen sat"}]),
    ]
    _, found = facts(files)
    assert found.group.tolist() == [0, 0, 1, 2]
    assert found.group_names == ["rows", "text", "more"]


@pytest.mark.parametrize("named", [{}, {"test_files": "test"}])
def test_folders_of_texts_and_what_is_drawn_of_training_are_one_group(own_folder, named):
    for number in range(40):
        for folder in ("train", "test"):
            write_lines(Path(folder, f"{number}.txt"), f"{folder} {number}")
    split, spelling = TextSplit(0.2, 0.2), TokenizerOptions("bytes")
    data = ActivationDataModule(train_files="train", split=split, tokenizer=spelling, **named)
    data.store = data.open_store()
    found = data.facts(2)
    assert (set(found.group.tolist()), found.group_names) == ({0}, ["all"])


@pytest.mark.parametrize(
    ("files", "names"),
    [
        (["a/one.txt", "b/two.txt"], ["one", "two"]),
        (["a/one.txt", "b/one.txt"], ["a/one.txt", "b/one.txt"]),
        (["a/all.jsonl", "a/two.txt"], ["a/all.jsonl", "a/two.txt"]),
    ],
)
def test_no_two_files_have_one_name_and_none_is_all(files, names):
    assert group_names([Path(file) for file in files]) == names


def test_a_token_of_white_space_alone_is_passed_over():
    tokenizer = sentence_piece()
    assert tokenizer.encode(" n").tolist() == [SPACE, TAIL]
    assert tokenizer.encode(" hen").tolist() == [WORD, TAIL]
    assert first_tokens(["n", "hen", ""], tokenizer) == {"n": TAIL, "hen": WORD, "": NONE}
