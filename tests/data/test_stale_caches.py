"""What is kept in the cache is made anew where a fact changes, and only there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datamodules.core.store import cache_root
from datamodules.search import candidates as candidates_file
from datamodules.search import ranking_source
from datamodules.search.bm25 import Bm25Options
from datamodules.search.candidates import CandidateOptions
from datamodules.search.collection import Collection, open_collection
from datamodules.search.collection_tokens import kept_collection
from datamodules.search.groups import GroupOptions
from datamodules.search.request import CollectionRequest
from datamodules.text.encoding import TextEncoding
from datamodules.text.store import TokenRowsWriter
from datamodules.tokenizers.text_tokenizer import TokenizerOptions, make_tokenizer
from tests.seo.retrieval_collection import write_collection
from tests.seo.small_collection import ranking_data, relevance_files

LIMITS = {"max_length": 12, "max_query_length": 5, "lower_case": True}
MINED = GroupOptions(size=6, mined=3, unjudged_as_negative=True)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_collection(tmp_path / "files")


def opened(folder: Path) -> Collection:
    return open_collection(CollectionRequest("beir", str(folder)))


def encoding_of(kind: str = "bytes", **limits: Any) -> TextEncoding:
    texts = iter(["salt Bread iron", "boat wool. Sold by weight"])
    size = {} if kind == "bytes" else {"vocab_size": 300}
    tokenizer = make_tokenizer(TokenizerOptions(kind, **size), texts)
    return TextEncoding({"tokenizer": tokenizer.to_dict(), "text": {**LIMITS, **limits}})


def check(collection: Collection, encoding: TextEncoding, is_whole: bool = False) -> None:
    """Checks that kept tokens are those of the texts as they are now."""
    numbers = np.array([5, 2, 5])
    kept, limits = kept_collection(collection, encoding, numbers, None, is_whole), encoding.limits
    most = (None, None) if is_whole else (limits.max_length, limits.max_query_length)
    for number in range(collection.num_documents):
        ids = encoding.ids_once(collection.document_text(number))[: most[0]]
        assert kept.documents[number].tolist() == ids.tolist()
    for place, number in enumerate(numbers.tolist()):
        ids = encoding.ids_once(collection.query(number))[: most[1]]
        assert kept.query(place).tolist() == ids.tolist()


@pytest.mark.parametrize(
    "changed",
    [
        {"max_length": 20},
        {"max_query_length": 3},
        {"lower_case": False},
        {"kind": "bpe"},
    ],
)
def test_other_ways_to_read_a_text_give_other_tokens(folder: Path, changed: dict) -> None:
    rewrite(folder / "corpus.jsonl", str.title)
    collection = opened(folder)
    check(collection, encoding_of())
    check(collection, encoding_of(**changed))
    check(collection, encoding_of())


def test_cut_tokens_are_never_taken_for_whole_ones(folder: Path) -> None:
    collection = opened(folder)
    check(collection, encoding_of())
    check(collection, encoding_of(), is_whole=True)


@pytest.mark.parametrize("file", ["corpus.jsonl", "queries.jsonl"])
def test_other_texts_under_the_same_ids_give_other_tokens(folder: Path, file: str) -> None:
    check(opened(folder), encoding_of())
    rewrite(folder / file, lambda text: text.swapcase()[::-1])
    check(opened(folder), encoding_of())


def rewrite(path: Path, change: Any) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [json.dumps({**row, "text": change(row["text"])}) + "\n" for row in rows]
    path.write_text("".join(lines))


def test_what_was_interrupted_is_not_there_and_is_made_whole_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collection, encoding, add = opened(folder), encoding_of(), TokenRowsWriter.add

    def interrupted(self: TokenRowsWriter, rows: Any) -> None:
        add(self, rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(TokenRowsWriter, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check(collection, encoding)
    assert list((cache_root() / "token_rows").iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setenv("UNISONO_CACHE", str(folder.parent / "cache"))
    check(collection, encoding)


def pools_of(folder: Path, **options: Any) -> ranking_source.Pools:
    data = ranking_data(folder, **{"groups": MINED, **options})
    data.setup("fit")
    return data.datasets["train"].pools


def test_changed_scoring_gives_other_pools_and_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = relevance_files(tmp_path / "ranked")
    options = {"candidates": CandidateOptions("bm25", top=10)}
    pools = pools_of(folder, **options)
    assert pools_of(folder, **options).folder == pools.folder
    lists = len(list((cache_root() / "candidates").iterdir()))
    for module in (candidates_file, ranking_source):
        monkeypatch.setattr(module, "BM25_VERSION", candidates_file.BM25_VERSION + 1)
    assert pools_of(folder, **options).folder != pools.folder
    assert len(list((cache_root() / "candidates").iterdir())) > lists


def test_judged_candidates_have_pools_of_their_scoring_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = relevance_files(tmp_path / "ranked")
    judged = {"groups": GroupOptions(), "candidates": CandidateOptions()}
    before = pools_of(folder, **judged).folder
    other = CandidateOptions(bm25=Bm25Options(k1=1.2))
    assert pools_of(folder, **{**judged, "candidates": other}).folder != before
    monkeypatch.setattr(ranking_source, "BM25_VERSION", ranking_source.BM25_VERSION + 1)
    assert pools_of(folder, **judged).folder != before


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        ({"tokenizer": TokenizerOptions("words", vocab_size=50)}, True),
        ({"groups": GroupOptions(size=8, mined=2, unjudged_as_negative=True)}, True),
        ({"groups": GroupOptions(size=6, mined=3, after_rank=2, unjudged_as_negative=True)}, False),
        ({"groups": GroupOptions(size=6)}, False),
        ({"candidates": CandidateOptions("bm25", top=9)}, False),
    ],
)
def test_pools_are_made_anew_only_where_they_change(
    tmp_path: Path, changed: dict, is_same: bool
) -> None:
    folder = relevance_files(tmp_path / "ranked")
    options = {"candidates": CandidateOptions("bm25", top=10)}
    before, after = pools_of(folder, **options), pools_of(folder, **{**options, **changed})
    assert (before.folder == after.folder) == is_same
    assert is_same == all(
        np.array_equal(one, other)
        for one, other in zip(before.candidates, after.candidates, strict=True)
    )
