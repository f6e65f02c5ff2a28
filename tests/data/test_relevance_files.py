"""Wrong files and options of a collection: what cannot be read at all, and the way out."""

import re
from pathlib import Path
from typing import Any

import pytest

from datamodules.search.collection import open_collection
from datamodules.search.request import (
    CollectionFiles,
    CollectionRequest,
    EsciOptions,
    QuerySplit,
)
from tests.relevance_collections import (
    TRAIN,
    write_beir,
    write_beir_parquet,
    write_esci,
    write_lines,
    write_msmarco,
    write_parquet,
    write_qrels,
)


def test_a_missing_header_is_named_and_the_first_judgement_not_swallowed(tmp_path: Path) -> None:
    folder = write_beir(tmp_path)
    write_qrels(folder / "qrels" / "train.tsv", TRAIN, header=False)
    message = (
        r'train.tsv:1: "q1\td1\t2" is no header; the first line of this file must name its '
        "columns, query-id, corpus-id, score, with tabs between them: write it above"
    )
    with pytest.raises(ValueError, match=message):
        open_collection(CollectionRequest("beir", str(folder)))


def test_a_locale_that_no_example_has_and_judgements_beside_esci_are_refused(
    tmp_path: Path,
) -> None:
    folder = str(write_esci(tmp_path))
    message = 'no example of locale "jp" in the small version; its locales are: es, us. Choose'
    with pytest.raises(ValueError, match=message):
        open_collection(CollectionRequest("esci", folder, esci=EsciOptions(locale="jp")))
    with pytest.raises(ValueError, match="are none of esci's; its examples have a column split"):
        open_collection(CollectionRequest("esci", folder, CollectionFiles(train="x.tsv")))


def test_a_truncated_parquet_file_and_missing_columns_are_named(tmp_path: Path) -> None:
    folder = write_beir_parquet(tmp_path)
    shard = folder / "corpus" / "corpus-00001-of-00002.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[:-20])
    request = CollectionRequest("beir", str(folder))
    with pytest.raises(ValueError, match=re.escape(str(shard)) + " is damaged or no parquet file"):
        open_collection(request)
    write_parquet(shard, [{"_id": "d3", "body": "x"}])
    with pytest.raises(ValueError, match='has no column "text".*it has: _id, body'):
        open_collection(request)
    products = write_esci(tmp_path / "esci") / "shopping_queries_dataset_products.parquet"
    products.write_bytes(products.read_bytes()[:200])
    with pytest.raises(ValueError, match="products.parquet is no readable parquet file"):
        open_collection(CollectionRequest("esci", str(tmp_path / "esci")))


def test_files_that_are_missing_or_unclear_are_named(tmp_path: Path) -> None:
    folder = write_beir(tmp_path)
    request = CollectionRequest("beir", str(folder))
    write_qrels(folder / "qrels" / "valid.tsv", TRAIN)
    write_qrels(folder / "qrels" / "dev.tsv", TRAIN)
    with pytest.raises(ValueError, match=r"dev.tsv and .*valid.tsv both hold .* of validation; na"):
        open_collection(request)
    (folder / "qrels" / "valid.tsv").rename(folder / "qrels" / "mine.tsv")
    with pytest.raises(ValueError, match=r"mine.tsv: its name tells no part, .*; rename it, or"):
        open_collection(request)
    (folder / "corpus.jsonl").unlink()
    message = (
        r"has no documents \(corpus.jsonl or corpus/\*.parquet\); .*collection.files.documents"
    )
    with pytest.raises(FileNotFoundError, match=message):
        open_collection(request)
    write_lines(folder / "corpus.jsonl.gz", "")
    with pytest.raises(FileNotFoundError, match=r"corpus.jsonl.gz is compressed; unpack it with"):
        open_collection(request)
    write_lines(folder / "corpus.jsonl", "")
    (folder / "qrels" / "mine.tsv").unlink()
    with pytest.raises(ValueError, match="the files hold no documents; check that they are those"):
        open_collection(request)
    mixed = [str(folder / "queries.jsonl"), str(write_parquet(tmp_path / "q.parquet", [{"a": 1}]))]
    files = CollectionFiles(queries=mixed)
    with pytest.raises(ValueError, match="are jsonl and parquet; write all files of one kind"):
        open_collection(CollectionRequest("beir", str(folder), files))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "trec"}, 'format must be one of demo, beir, msmarco, esci, pages, got "trec"'),
        ({"format": "demo", "folder": "x"}, 'format "demo" reads no files, and some are named; le'),
        (
            {"format": "beir"},
            'format "beir" needs files; name their folder with data.collection.folder, or',
        ),
        (
            {"format": "beir", "files": CollectionFiles(triples="x.tsv")},
            'triples belong to format "msmarco", got "beir"',
        ),
    ],
)
def test_options_in_conflict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CollectionRequest(**options)


def test_the_format_is_found_from_the_folder(tmp_path: Path) -> None:
    made = {"beir": write_beir, "msmarco": write_msmarco, "esci": write_esci}
    for layout, write in made.items():
        assert CollectionRequest(folder=str(write(tmp_path / layout))).layout == layout
    write_lines(tmp_path / "site" / "a" / "page.htm", "<p>x")
    assert CollectionRequest(folder=str(tmp_path / "site")).layout == "pages"
    assert CollectionRequest().layout == "demo"
    files = CollectionFiles(documents="a.tsv", train="b.tsv")
    assert CollectionRequest(files=files).layout == "msmarco"
    (tmp_path / "bare").mkdir()
    words = "bare holds none of the files that tell a format .*corpus.jsonl.*html"
    with pytest.raises(ValueError, match=words):
        CollectionRequest(folder=str(tmp_path / "bare")).reader()
    with pytest.raises(FileNotFoundError, match="collection.folder .*gone is no folder"):
        CollectionRequest(folder=str(tmp_path / "gone")).reader()


def test_shares_versions_and_gains_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"validation_share must be 0 to 0.9, got 1.0"):
        QuerySplit(validation_share=1.0)
    with pytest.raises(ValueError, match=r"must be at most 0.9, got 1: too little is left"):
        QuerySplit(validation_share=0.5, test_share=0.5)
    with pytest.raises(ValueError, match='esci.version must be "small" or "large", got "tiny"'):
        EsciOptions(version="tiny")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the gain of S must be 0 or more, got -0.1"):
        EsciOptions(substitute=-0.1)


def test_another_way_with_bad_rows_is_refused() -> None:
    with pytest.raises(ValueError, match='on_bad_rows must be "error" or "reject", got "drop"'):
        open_collection(CollectionRequest(), "drop")  # type: ignore[arg-type]
