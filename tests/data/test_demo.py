"""Embedded demo data: the same on every machine; some pairs of facts of a story are held out."""

import hashlib
from pathlib import Path

import pytest

from datamodules import TextDataModule, TokenizerOptions, demo
from datamodules.demo import HELD_OUT_PAIRS, PARTS, VALUES
from datamodules.files.splitting import stem_key
from tests.toy import csv_rows, json_rows

Rows = dict[str, list[dict]]


@pytest.fixture(scope="module")
def story_folder() -> Path:
    return demo.demo_stories()


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return csv_rows(demo.demo_occupations())


# Another digest means another file: then raise DEMO_VERSION too.
DIGESTS = {
    "occupations": "314a69cb92ad227b7882cdc838256812a544f09028c3ac772c325ecea7cafea6",
    "codes": "f564bb2874961c21c61b806e71f96b4adc2cf55dc2a35ddb6dad229fe0c19d17",
    "stories": "f2025ae77f47b5b3f8bcacdef3180f1ab627a42fdb497d1329992076b7338426",
}


def test_the_bytes_are_the_same_on_every_machine(story_folder):
    files = {
        "occupations": [demo.demo_occupations()],
        "codes": [demo.demo_occupations().with_name("codes.csv")],
        "stories": [story_folder / f"{part}.jsonl" for part in PARTS],
    }
    for name, paths in files.items():
        content = b"".join(path.read_bytes() for path in paths)
        assert hashlib.sha256(content).hexdigest() == DIGESTS[name], "the grammar changed"


def test_no_string_of_the_test_part_has_a_variant_in_the_others(rows):
    keys: dict[str, set[str]] = {}
    for row in rows:
        keys.setdefault(row["split"], set()).add(stem_key(row["text"]))
    assert sorted(keys) == ["test", "train", "validation"]
    assert not keys["test"] & (keys["train"] | keys["validation"])
    assert len(keys["test"]) > 1_000


def test_the_demo_text_holds_topics_and_docstrings_once_each():
    path = demo.demo_text()
    rows = json_rows(path)
    assert all(set(row) == {"text", "source"} and row["text"].strip() for row in rows)
    texts = {row["source"]: row["text"] for row in rows}
    assert texts["topic assert"].startswith('The "assert" statement\n***')
    assert texts["shutil.copytree"].startswith("shutil: copytree(src, dst, symlinks=False, ")
    assert len({row["text"] for row in rows}) == len(rows) > 1_500
    assert 1_000_000 < path.stat().st_size < 4_000_000


def test_demo_instructions_ask_for_a_name_and_answer_in_words():
    rows = json_rows(demo.demo_instructions())
    answers = {row["prompt"]: row["completion"] for row in rows}
    found = answers["What does FTP.storbinary of the module ftplib do?"]
    assert found == "Store a file in binary mode. A new port is created for you."
    assert len(set(answers.values())) == len(rows) > 2_000
    assert max(map(len, answers.values())) <= 400


@pytest.fixture(scope="module")
def stories(story_folder: Path) -> Rows:
    return {part: json_rows(story_folder / f"{part}.jsonl") for part in PARTS}


def pairs_in(row: dict) -> list[tuple[str, str]]:
    facts = row["attributes"]
    found = [((facts[a], facts[b]), pairs) for (a, b), pairs in HELD_OUT_PAIRS.items()]
    return [pair for pair, pairs in found if pair in pairs]


def test_held_out_pairs_stand_in_the_combinations_alone(stories):
    for part in ("train", "validation", "test"):
        assert not any(pairs_in(row) for row in stories[part])
    for row in stories["combinations"]:
        assert any(set(pair) <= set(row["text"].split()) for pair in pairs_in(row))
    stated = {pair for row in stories["combinations"] for pair in pairs_in(row)}
    assert stated == frozenset().union(*HELD_OUT_PAIRS.values())
    assert sum(len(pairs_in(row)) == 2 for row in stories["combinations"]) > 250
    trained = {value for row in stories["train"] for value in row["attributes"].values()}
    assert trained == {value for values in VALUES.values() for value in values}


def test_the_datamodule_reads_them_where_no_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "PARTS", {"train": 600, "validation": 20, "test": 10})
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path))
    data = TextDataModule(demo="stories", tokenizer=TokenizerOptions("words"), context_length=64)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    assert data.tokenizer.vocab_size == 128
    assert [len(data.store.stream(part).hashes) for part in range(3)] == [600, 20, 10]
    assert len(data.datasets["train"].lengths) == 600  # each story is a row
    text = data.datasets["test"].describe(0, 0)["document 1"]
    assert text.startswith("<|endoftext|> ")
    assert text.endswith(" . <|endoftext|>")
