"""Stories whose facts are known: the same everywhere, and some pairs of facts are held out."""

import hashlib
import json
from itertools import product
from pathlib import Path

import pytest

from datamodules import TextDataModule, TokenizerOptions, demo, demo_stories
from datamodules.demo_stories import (
    HELD_OUT_PAIRS,
    NAMES,
    PARTS,
    PRONOUNS,
    VALUES,
    VERBS,
    vocabulary,
)

Rows = dict[str, list[dict]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.demo_stories(tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="module")
def rows(folder: Path) -> Rows:
    return {
        part: [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]
        for part in PARTS
    }


def pairs_in(row: dict) -> list[tuple[str, str]]:
    facts = row["attributes"]
    found = [((facts[a], facts[b]), pairs) for (a, b), pairs in HELD_OUT_PAIRS.items()]
    return [pair for pair, pairs in found if pair in pairs]


def test_the_bytes_are_the_same_on_every_machine(folder: Path) -> None:
    content = b"".join((folder / f"{part}.jsonl").read_bytes() for part in PARTS)
    digest = hashlib.sha256(content).hexdigest()
    assert digest == demo.DIGESTS["stories"], "the grammar changed: put the new digest in demo.py"


def test_a_damaged_file_is_made_anew_and_a_whole_one_is_kept(folder: Path) -> None:
    whole = (folder / "test.jsonl").read_bytes()
    (folder / "test.jsonl").write_bytes(whole[:100])
    assert demo.demo_stories(folder.parent) == folder
    assert (folder / "test.jsonl").read_bytes() == whole
    before = (folder / "train.jsonl").stat().st_mtime_ns
    assert demo.demo_stories(folder.parent) == folder
    assert (folder / "train.jsonl").stat().st_mtime_ns == before


def test_no_text_stands_twice_and_files_have_their_sizes(rows: Rows) -> None:
    assert {part: len(found) for part, found in rows.items()} == PARTS
    texts = [row["text"] for found in rows.values() for row in found]
    assert len(set(texts)) == len(texts) == 33_000


def test_a_story_tells_all_its_facts_and_what_follows_from_them(rows: Rows) -> None:
    assert len(VALUES) == 10
    for row in rows["train"][:2000] + rows["combinations"]:
        words, facts = row["text"].split(), row["attributes"]
        assert list(facts) == list(VALUES)
        assert all(facts[name] in VALUES[name] and facts[name] in words for name in VALUES)
        of_others = {v for name in VALUES for v in VALUES[name] if v != facts[name]}
        assert not of_others & set(words)
        assert 50 <= len(words) <= 60  # with end-of-text, a row of 64 holds one story, never two
        assert words.count(facts["pet"]) >= 2
        assert words.count(facts["object"]) >= 2
        used = {verb for verbs in VERBS.values() for verb in verbs} & set(words)
        assert len(used & set(VERBS[facts["mood"]])) == len(used) == 1
        other = "he" if facts["name"] in NAMES["she"] else "she"
        assert not set(PRONOUNS[other].values()) & set(words)


def test_held_out_pairs_are_an_eighth_and_each_value_is_trained() -> None:
    for (first, second), pairs in HELD_OUT_PAIRS.items():
        assert len(pairs) * 8 == len(VALUES[first]) * len(VALUES[second])
        assert len({b for _, b in pairs}) == len({a for a, _ in pairs}) == len(pairs)
        assert pairs <= set(product(VALUES[first], VALUES[second]))


def test_held_out_pairs_stand_in_the_combinations_alone(rows: Rows) -> None:
    for part in ("train", "validation", "test"):
        assert not any(pairs_in(row) for row in rows[part])
    for row in rows["combinations"]:
        assert any(set(pair) <= set(row["text"].split()) for pair in pairs_in(row))
    stated = {pair for row in rows["combinations"] for pair in pairs_in(row)}
    assert stated == frozenset().union(*HELD_OUT_PAIRS.values())
    assert sum(len(pairs_in(row)) == 2 for row in rows["combinations"]) > 250
    trained = {value for row in rows["train"] for value in row["attributes"].values()}
    assert trained == {value for values in VALUES.values() for value in values}


def test_the_datamodule_reads_them_where_no_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_stories, "PARTS", {"train": 600, "validation": 20, "test": 10})
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path))
    data = TextDataModule(demo="stories", tokenizer=TokenizerOptions("words"), context_length=64)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    assert data.tokenizer.vocab_size == len(vocabulary()) + 1 == 128
    counts = [data.store.part_facts(part).num_documents for part in range(3)]
    assert counts == [600, 20, 10]
    assert len(data.datasets["train"].lengths) == 600  # each story is a row
    text = data.datasets["test"].describe(0, 0)["document 1"]
    assert text.startswith("<|endoftext|> ")
    assert text.endswith(" . <|endoftext|>")


def test_another_demo_is_refused() -> None:
    with pytest.raises(ValueError, match='demo must be one of documentation, stories, got "tales"'):
        TextDataModule(demo="tales")  # type: ignore[arg-type]
