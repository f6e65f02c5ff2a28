"""Of a collection only those documents are tokenised that a stage reads, and numbers are mapped."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from datamodules import RankingDataModule, RetrievalDataModule, TokenizerOptions
from datamodules.search.candidates import CandidateOptions
from datamodules.search.collection_tokens import is_among
from datamodules.search.groups import GroupOptions
from datamodules.search.negatives import HardNegatives
from datamodules.search.request import CollectionFiles, CollectionRequest
from datamodules.search.training_mix import TrainingMix
from datamodules.text.store import TokenRows
from tests.process_memory import private_bytes
from tests.relevance_collections import write_lines
from tests.seo.retrieval_collection import write_collection

NUM_DOCUMENTS = 300  # far more than are judged
BYTES = TokenizerOptions("bytes")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def prepared(folder: Path, family: Any, **options: Any) -> Any:
    request = CollectionRequest("beir", str(write_collection(folder / "files", NUM_DOCUMENTS)))
    data = family(collection=request, tokenizer=BYTES, **options)
    data.prepare_data()
    data.setup("fit")
    return data


def read_ones(rows: TokenRows, data: Any, encoding: Any, most: int | None) -> set[int]:
    """Return the documents that are kept, whose tokens are checked."""
    there = np.flatnonzero(np.diff(rows.starts)).tolist()
    for number in there:
        ids = encoding.ids_once(data.collection.document_text(number))
        assert rows[number].tolist() == ids[:most].tolist()
    return set(there)


def test_which_numbers_are_among_others() -> None:
    lists = np.array([[3, -1], [0, 3], [-1, -1]])
    assert np.flatnonzero(is_among(6, lists, np.array([5], np.int32))).tolist() == [0, 3, 5]
    assert not is_among(3).any()
    many = np.arange(0, 30_000, 3)
    assert np.flatnonzero(is_among(30_000, many)).tolist() == many.tolist()


@pytest.mark.parametrize("stage", ["train", "validation"])
@pytest.mark.parametrize("source", ["judged", "bm25"])
def test_a_ranker_reads_candidates(tmp_path: Path, stage: str, source: Any) -> None:
    candidates = CandidateOptions(source, top=None if source == "judged" else 2)
    data = prepared(tmp_path, RankingDataModule, candidates=candidates)
    dataset = data.datasets[stage]
    texts, places = dataset.source.texts, range(len(dataset.lengths))
    expected = set(dataset.source.judgements.judgements.document.tolist())
    for place in places:
        expected |= set(dataset.source.first.listed(place).tolist())
    found = read_ones(
        texts.tokens.documents, data, texts.encoding, texts.encoding.limits.max_length
    )
    assert found == expected
    assert {int(n) for place in places for n in dataset.example(place, 1).document} <= found


def test_a_retriever_reads_judged_documents_where_it_searches_for_none(tmp_path: Path) -> None:
    data = prepared(tmp_path, RetrievalDataModule, bm25=None, num_others=5)
    train, validation = data.datasets["train"], data.datasets["validation"]
    most = train.encoding.limits.max_length
    judged = set(train.judged.judgements.document.tolist())
    assert read_ones(train.tokens.documents, data, train.encoding, most) == judged
    searched = set(validation.documents.tolist())
    assert read_ones(validation.tokens.documents, data, train.encoding, most) == searched
    assert len(searched) < 30


@pytest.mark.parametrize(
    "options",
    [{"negatives": HardNegatives(1, "bm25", depth=8)}, {"mix": TrainingMix(sentences=1)}],
)
def test_it_reads_all_where_any_can_come(tmp_path: Path, options: dict) -> None:
    train = prepared(tmp_path, RetrievalDataModule, bm25=None, **options).datasets["train"]
    assert (np.diff(train.tokens.documents.starts) > 0).all()


def test_whole_documents_are_kept_once_for_training_and_evaluation(tmp_path: Path) -> None:
    mix = TrainingMix(judged=1, sentences=1, token_dropout=0.2)
    data = prepared(tmp_path, RetrievalDataModule, bm25=None, mix=mix)
    train, validation = data.datasets["train"], data.datasets["validation"]
    assert validation.tokens.documents.place == train.tokens.documents.place
    assert len(read_ones(train.tokens.documents, data, train.encoding, None)) == NUM_DOCUMENTS
    limits = validation.encoding.limits
    widths = [len(validation.example(n, 0).framed.ids) for n in range(len(validation.lengths))]
    assert max(widths) <= limits.max_length


def triples_held(folder: Path, count: int) -> tuple[int, Any]:
    passages = [f"{number}\tpassage {number} of a few words" for number in range(50)]
    write_lines(folder / "collection.tsv", *passages)
    for part in ("train", "dev"):
        write_lines(folder / f"queries.{part}.tsv", *(f"{part}{n}\task {n}" for n in range(9)))
        write_lines(folder / f"qrels.{part}.tsv", *(f"{part}{n}\t0\t{n}\t1" for n in range(9)))
    chosen = (f"train{n % 9}\t{n % 7}\t{10 + n % 11}" for n in range(count))
    files = CollectionFiles(triples=str(write_lines(folder / "triples.tsv", *chosen)))
    ids = CollectionRequest("msmarco", str(folder), files=files)
    data = RankingDataModule(collection=ids, tokenizer=BYTES, groups=GroupOptions(triples=True))
    data.prepare_data()
    data.setup("fit")
    return private_bytes(data.datasets["train"]), data


def test_triples_stay_in_their_file(tmp_path: Path) -> None:
    few, _ = triples_held(tmp_path / "few", 100)
    many, data = triples_held(tmp_path / "many", 20_100)
    assert (many - few) / 20_000 < 8.1  # the lengths for the plan alone
    train = data.datasets["train"]
    encoding, tokens = train.source.texts.encoding, train.source.texts.tokens
    found = read_ones(tokens.documents, data, encoding, encoding.limits.max_length)
    assert found == {*range(7), *range(10, 21)}
    for place in (0, 20_099):
        text = train.source.queries.text(place)
        assert tokens.query(place).tolist() == encoding.ids_once(text).tolist()
