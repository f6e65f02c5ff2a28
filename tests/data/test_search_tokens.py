"""Stored tokens of a collection: equal to fresh ones, and made anew when a fact changes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datamodules.search.collection import Collection, CollectionRequest, open_collection
from datamodules.search.datamodule import kept_texts
from datamodules.search.queries import Queries
from datamodules.text.encoding import TextEncoding
from datamodules.tokenizers.text import TextTokenizer, TokenizerOptions, make_tokenizer
from tests.search_collections import write_collection
from tests.text_corpora import rows_file
from tests.toy import json_rows

pytestmark = pytest.mark.usefixtures("own_cache")

LIMITS = {"max_length": 12, "max_query_length": 5, "lower_case": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_collection(tmp_path / "files")


def opened(folder: Path) -> Collection:
    return open_collection(CollectionRequest(str(folder)))


def encoding_of(kind: str = "bytes", **limits: Any) -> TextEncoding:
    texts = iter(["salt Bread iron", "boat wool. Sold by weight"])
    size = {} if kind == "bytes" else {"vocab_size": 300}
    tokenizer = make_tokenizer(TokenizerOptions(kind, **size), texts)
    return TextEncoding({"tokenizer": tokenizer.to_dict(), "text": {**LIMITS, **limits}})


def kept(collection: Collection, encoding: TextEncoding) -> tuple:
    everything = np.arange(len(collection.queries))
    queries = Queries(collection.queries, collection.fingerprint, numbers=everything)
    return kept_texts(collection, encoding, queries)


def check(collection: Collection, encoding: TextEncoding) -> None:
    """Checks that stored tokens equal those of the current texts."""
    documents, queries = kept(collection, encoding)
    for number in range(len(collection.documents)):
        ids = encoding.ids(collection.documents[number].whole)
        assert documents[number].tolist() == ids.tolist()
    for number in range(len(collection.queries)):
        ids = encoding.ids(collection.queries[number].text)
        assert queries[number].tolist() == ids.tolist()


@pytest.mark.parametrize("changed", [{"lower_case": False}, {"kind": "bpe"}])
def test_other_ways_to_read_a_text_give_other_tokens(folder: Path, changed: dict) -> None:
    rewrite(folder / "corpus.jsonl", str.title)
    collection = opened(folder)
    check(collection, encoding_of())
    check(collection, encoding_of(**changed))
    check(collection, encoding_of())


@pytest.mark.parametrize("file", ["corpus.jsonl", "queries.jsonl"])
def test_other_texts_under_the_same_ids_give_other_tokens(folder: Path, file: str) -> None:
    check(opened(folder), encoding_of())
    rewrite(folder / file, lambda text: text.swapcase()[::-1])
    check(opened(folder), encoding_of())


def rewrite(path: Path, change: Any) -> None:
    rows_file(path, [{**row, "text": change(row["text"])} for row in json_rows(path)])


def test_stored_tokens_are_not_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collection, encoding = opened(folder), encoding_of("bpe")
    kept(collection, encoding)

    def refuse(*_: object) -> None:
        raise AssertionError("a text is tokenised again")

    monkeypatch.setattr(TextEncoding, "ids_of", refuse)
    monkeypatch.setattr(TextTokenizer, "encode_batch", refuse)
    kept(collection, encoding)  # as another rank would
