"""Wrong files of a collection: each fault with its file, line, value, rule and the way out."""

import re
from pathlib import Path
from typing import Any

import pytest

from datamodules.files.splitting import PART_NAMES
from datamodules.search.collection import open_collection
from datamodules.search.request import (
    CollectionFiles,
    CollectionRequest,
    QuerySplit,
)
from tests.relevance_collections import (
    EXAMPLES,
    PRODUCTS,
    example,
    product,
    write_beir,
    write_esci,
    write_lines,
    write_msmarco,
)

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
        ("q1 0 d3 1", r"train.tsv:5: .*: the line has 1 columns, and must have 3 with tabs"),
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
    refused(request, "qrels.train.tsv:3: .*the line is not UTF-8; convert it, such as with iconv")


def test_wrong_lines_of_msmarco_are_named(tmp_path: Path) -> None:
    folder = write_msmarco(tmp_path)
    write_lines(folder / "collection.tsv", "0\ta", "1\ttab\tinside", "2 no tab", "1\ta", "2\tb")
    write_lines(folder / "qrels.train.tsv", "10 0 0 1 5", "10 0 0 1")
    write_lines(folder / "triples.tsv", "10\t0", "10\t0\t9", "99\t0\t1", "10\t0\t1")
    files = CollectionFiles(triples=str(folder / "triples.tsv"))
    request = CollectionRequest("msmarco", str(folder), files=files)
    refused(request, "6 rows break the rules of the data")
    messages = [
        "collection.tsv:2: .*has 3 columns, and must have 2, id and text, with one tab between",
        "collection.tsv:3: .*has 1 columns, and must have 2",
        r"qrels.train.tsv:1: .*has 5 columns, and must have TREC's 4 \(query, 0, document, grade",
        "triples.tsv:1: .*has 2 columns, and must have 3 ids with tabs",
        'triples.tsv:2: "9": this document is unknown; take the triple out, or add what it',
        'triples.tsv:3: "99": this query is unknown',
    ]
    for message, bad in zip(messages, open_collection(request, "reject").bad_rows, strict=True):
        assert re.search(message, str(bad))
    collection = open_collection(request, "reject")
    assert collection.triples is not None
    expected = [[collection.query_index("10")], [0], [1]]
    assert [values.tolist() for values in collection.triples] == expected


def test_fractional_grades_are_taken_and_repeated_judgements_merged(tmp_path: Path) -> None:
    rows = [("q1", "d1", "1.5"), ("q1", "d1", "1.50"), ("q1", "d2", "0"), ("q2", "d2", "2.0")]
    folder = write_beir(tmp_path, rows)
    collection = open_collection(CollectionRequest("beir", str(folder), split=WHOLE))
    assert collection.judgements(PART_NAMES.index("train")).grade.tolist() == [1.5, 0, 2]
    assert collection.facts["num_merged_judgements"] == 1
    assert collection.facts["num_fractional_grades"] == 2


@pytest.mark.parametrize(
    ("examples", "products", "message"),
    [
        ([example(9, "A", "X")], PRODUCTS, 'examples.parquet:1: "X": esci_label must be one of E'),
        ([example(9, "A", "E", split="dev?")], PRODUCTS, '"dev\\?": split must be train or test'),
        ([example(9, "Z", "E")], PRODUCTS, 'examples.parquet:1: no document has the id "Z"'),
        (
            [*EXAMPLES, example(9, "B", "E", query="blue")],
            PRODUCTS,
            'examples.parquet:8: "blue": query 1 has another text in an earlier row; keep one',
        ),
        (EXAMPLES, [*PRODUCTS, product("A", "x")], 'products.parquet:7: "A": this id stands at'),
    ],
)
def test_wrong_rows_of_esci_are_named(
    tmp_path: Path, examples: Any, products: Any, message: str
) -> None:
    sound = example(0, "B", "E", query="sound", query_id=7)
    folder = write_esci(tmp_path, [*examples, sound], products)
    refused(CollectionRequest("esci", str(folder)), message)
