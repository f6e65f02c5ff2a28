"""Wrong files of a collection: each fault with its file, line, value, rule and the way out."""

import re
from pathlib import Path
from typing import Any

import pytest

from datamodules.files.splitting import PART_NAMES
from datamodules.search.collection import (
    CollectionRequest,
    QuerySplit,
    open_collection,
)
from datamodules.search.formats import CollectionFiles
from tests.search_collections import TRAIN, write_beir, write_lines, write_msmarco, write_qrels

WHOLE = QuerySplit(validation_share=0.0)


def refused(request: CollectionRequest, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        open_collection(request)
    assert "--data.on_bad_rows=reject" in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("q9\td1\t1", r'train.tsv:5: no query has the id "q9"; take the judgement out or add'),
        ("q1\td9\t1", r'train.tsv:5: no document has the id "d9"; take the judgement out or'),
        ("q1\td3\tgood", r'train.tsv:5: "good": a grade must be a number, 0 or more'),
        ("q1\td3\t-1", r'train.tsv:5: "-1": a grade must be a number, 0 or more'),
        ("q1\td3\tnan", r'train.tsv:5: "nan": a grade must be a number'),
        ("q1\td3", r"train.tsv:5: .*: the line has 2 columns, and must have 3 with tabs between"),
        ("q1 d3 1", r"train.tsv:5: .*: the line has 1 columns, and must have 3 with tabs"),
        ("q1\td1\t1", r"train.tsv:5: .*grade 2 at .*train.tsv:2; decide on one of the two"),
    ],
)
def test_a_wrong_judgement_is_named(tmp_path: Path, row: str, message: str) -> None:
    folder = write_beir(tmp_path)
    with (folder / "qrels" / "train.tsv").open("a") as file:
        file.write(row + "\n")
    request = CollectionRequest("beir", str(folder), split=WHOLE)
    refused(request, message)
    collection = open_collection(request, "reject")
    assert len(collection.judgements(PART_NAMES.index("train")).query) == 3  # the sound ones
    assert [bad.line for bad in collection.bad_rows] == [5]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"_id": "d1", "text": "x"}',
            r'corpus.jsonl:4: "d1": this id stands at .*jsonl:1 already',
        ),
        ('{"_id": "d4"}', 'corpus.jsonl:4: "": the row has no "text"; it must have _id and text'),
        ('{"text": "x"}', 'corpus.jsonl:4: "": the row has no "id"; .* it has text'),
        ('{"_id": "d4", "text": 3}', 'jsonl:4: "3": the row has a "text" that is no text'),
        ('{"_id": " ", "text": "x"}', 'jsonl:4: " ": the id is empty; give every document'),
        ('["d4"]', r'corpus.jsonl:4: .*every line must be an object such as \{"_id"'),
        (
            '{"_id": ',
            "corpus.jsonl:4: .*the line is no JSON .*; every line must be one JSON object",
        ),
        ('{"_id": "d4", "text": "\\ud83d"}', r"corpus.jsonl:4: .*is half of a surrogate pair"),
        (
            '{"_id": "d4", "text": "x", "url": "\\ud83d"}',
            "corpus.jsonl:4: .*is half of a surrogate pair",
        ),
    ],
)
def test_a_wrong_document_is_named(tmp_path: Path, line: str, message: str) -> None:
    folder = write_beir(tmp_path)
    with (folder / "corpus.jsonl").open("a") as file:
        file.write(line + "\n")
    request = CollectionRequest("beir", str(folder))
    refused(request, message)
    collection = open_collection(request, "reject")
    assert collection.num_documents == 3
    assert collection.document(0).title == "Wings"  # the first of a repeated id stays


def test_an_empty_query_and_another_text_of_the_same_id_are_named(tmp_path: Path) -> None:
    folder = write_beir(tmp_path)
    with (folder / "queries.jsonl").open("a") as file:
        file.write('{"_id": "q4", "text": " "}\n{"_id": "q1", "text": "other"}\n')
    request = CollectionRequest("beir", str(folder))
    refused(request, 'queries.jsonl:4: "q4": the query is empty; write what was asked, or take')
    refused(request, 'queries.jsonl:5: "q1": this id stands at .*queries.jsonl:1 already')


def test_lines_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    folder = write_msmarco(tmp_path)
    for name in ("collection.tsv", "qrels.train.tsv"):
        with (folder / name).open("ab") as file:
            file.write("9\tcafé\n".encode("latin1"))
    request = CollectionRequest("msmarco", str(folder))
    refused(request, "collection.tsv:4: .*byte 0xE9 at place 6 of the line is not UTF-8.*iconv")
    refused(request, "qrels.train.tsv:3: .*byte 0xE9 at place 6 of the line is not UTF-8")


def test_wrong_lines_of_msmarco_are_named(tmp_path: Path) -> None:
    folder = write_msmarco(tmp_path)
    write_lines(folder / "collection.tsv", "0\ta", "1\ttab\tinside", "2 no tab", "1\ta", "2\tb")
    write_lines(folder / "qrels.train.tsv", "10 0 0 1 5", "10 0 0 1")
    request = CollectionRequest("msmarco", str(folder))
    refused(request, "3 rows break the rules of the data")
    messages = [
        "collection.tsv:2: .*has 3 columns, and must have 2, id and text, with one tab between",
        "collection.tsv:3: .*has 1 columns, and must have 2",
        "qrels.train.tsv:1: .*has 1 columns, and must have 3 .*or TREC's 4 .query, 0, document",
    ]
    for message, bad in zip(messages, open_collection(request, "reject").bad_rows, strict=True):
        assert re.search(message, str(bad))


def test_fractional_grades_are_taken_and_repeated_judgements_merged(tmp_path: Path) -> None:
    rows = [("q1", "d1", "1.5"), ("q1", "d1", "1.50"), ("q1", "d2", "0"), ("q2", "d2", "2.0")]
    folder = write_beir(tmp_path, rows)
    collection = open_collection(CollectionRequest("beir", str(folder), split=WHOLE))
    assert collection.judgements(PART_NAMES.index("train")).grade.tolist() == [1.5, 0, 2]
    assert collection.facts["num_merged_judgements"] == 1
    assert collection.facts["num_fractional_grades"] == 2


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
    message = r"has no documents \(corpus.jsonl\); .*collection.files.documents"
    with pytest.raises(FileNotFoundError, match=message):
        open_collection(request)
    write_lines(folder / "corpus.jsonl.gz", "")
    with pytest.raises(FileNotFoundError, match=r"corpus.jsonl.gz is compressed; unpack it with"):
        open_collection(request)
    write_lines(folder / "corpus.jsonl", "")
    (folder / "qrels" / "mine.tsv").unlink()
    with pytest.raises(ValueError, match="the files hold no documents; check that they are those"):
        open_collection(request)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "trec"}, 'format must be one of demo, beir, msmarco, pages, got "trec"'),
        ({"format": "demo", "folder": "x"}, 'format "demo" reads no files, and some are named; le'),
        (
            {"format": "beir"},
            'format "beir" needs files; name their folder with data.collection.folder, or',
        ),
    ],
)
def test_options_in_conflict_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CollectionRequest(**options)


def test_the_format_is_found_from_the_folder(tmp_path: Path) -> None:
    made = {"beir": write_beir, "msmarco": write_msmarco}
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


def test_shares_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"validation_share must be 0 to 0.9, got 1.0"):
        QuerySplit(validation_share=1.0)
    with pytest.raises(ValueError, match=r"must be at most 0.9, got 1: too little is left"):
        QuerySplit(validation_share=0.5, test_share=0.5)


def test_another_way_with_bad_rows_is_refused() -> None:
    with pytest.raises(ValueError, match='on_bad_rows must be "error" or "reject", got "drop"'):
        open_collection(CollectionRequest(), "drop")  # type: ignore[arg-type]
