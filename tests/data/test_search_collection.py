"""Collections: read from the field's file formats, by number and id, in any process; a fault is
named with its file, line, value, rule and way out."""

import gzip
import json
import multiprocessing
import os
import pickle
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.files.rows import read_rejected
from datamodules.files.splitting import TEST, TRAIN, VALIDATION, Split
from datamodules.search.candidates import open_bm25
from datamodules.search.collection import Collection, CollectionRequest, open_collection
from datamodules.search.formats import CollectionFiles, TextRecord
from tests.search_collections import DOCUMENTS, QUERIES, write_beir, write_lines, write_qrels
from tests.search_collections import TRAIN as TRAIN_ROWS

WHOLE = Split(validation_share=0.0)


def opened(folder: Path, **options: Any) -> Collection:
    return open_collection(CollectionRequest(str(folder), **{"split": WHOLE, **options}))


def judged(collection: Collection, part: int) -> list[tuple[str, str, float]]:
    found = collection.judgements(part)
    return [
        (collection.queries[q].id, collection.documents[d].id, round(float(g), 6))
        for q, d, g in zip(found.query.tolist(), found.document.tolist(), found.grade, strict=True)
    ]


def test_beir_is_read(tmp_path):
    collection = opened(write_beir(tmp_path))
    assert (len(collection.documents), len(collection.queries)) == (3, 3)
    for i, (id, title, text) in enumerate(DOCUMENTS):
        assert collection.documents[i] == TextRecord(id, title, text)
        assert (collection.documents[i].id, collection.documents.indices_of([id])) == (id, i)
    for i, (id, text) in enumerate(QUERIES):
        assert (collection.queries[i].text, collection.queries[i].id) == (text, id)
    assert collection.documents.lengths.tolist() == [19, 14, 8]
    assert judged(collection, TRAIN) == [("q1", "d1", 2), ("q1", "d2", 0), ("q2", "d2", 1)]
    assert judged(collection, VALIDATION) == []
    assert judged(collection, TEST) == [("q3", "d3", 1)]
    assert collection.documents.indices_of(["d4", "d2"]).tolist() == [-1, 1]
    assert collection.queries.indices_of(["d1"]).tolist() == [-1]


def test_files_of_judgements_may_lie_anywhere(tmp_path):
    folder = write_beir(tmp_path)
    mine = write_qrels(tmp_path / "elsewhere" / "mine.tsv", [("q2", "d1", "3")])
    files = CollectionFiles(validation=str(mine), train=str(folder / "qrels" / "train.tsv"))
    collection = opened(folder, files=files)
    assert judged(collection, VALIDATION) == [("q2", "d1", 3)]
    assert judged(collection, TEST) == []
    assert len(judged(collection, TRAIN)) == 3


def test_byte_order_marks_windows_line_ends_and_numbers_as_ids_are_read(tmp_path):
    folder = write_beir(tmp_path)
    lines = ['{"_id": 7, "title": null, "text": "été"}', "", '{"_id": "8", "text": ""}']
    (folder / "corpus.jsonl").write_text("\ufeff" + "\r\n".join(lines) + "\r\n", "utf-8")
    (folder / "qrels" / "test.tsv").unlink()
    qrels = "\ufeffquery-id\tcorpus-id\tscore\r\nq1\t7\t1\r\n"
    (folder / "qrels" / "train.tsv").write_text(qrels, "utf-8", newline="")
    collection = opened(folder)
    assert [collection.documents[i].id for i in range(2)] == ["7", "8"]
    assert collection.documents[0] == TextRecord("7", "", "été")
    assert collection.documents.lengths.tolist() == [5, 0]
    assert judged(collection, TRAIN) == [("q1", "7", 1)]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_any_text_is_a_document(texts):
    with tempfile.TemporaryDirectory() as name:
        rows = [{"_id": f"x{i}", "text": text} for i, text in enumerate(texts)]
        folder = write_beir(Path(name), [])
        write_lines(folder / "corpus.jsonl", *map(json.dumps, rows))
        collection = open_collection(CollectionRequest(str(folder)), "reject")
        assert [collection.documents[i].text for i in range(len(texts))] == texts


@pytest.mark.parametrize(
    "lines",
    [
        ("q1\td1\t2", "q 2\td2\t0.5"),
        ("query-id\tcorpus-id\tscore", "q1\td1\t2", "", "q 2\td2\t0.50", "q1\td1\t2.0"),
        ("q1 0 d1 2", "q 2\td2\t0.5"),
    ],
)
def test_qrels_have_three_columns_with_or_without_a_header_or_four(tmp_path, lines):
    folder = write_beir(tmp_path)
    write_lines(folder / "qrels" / "train.tsv", *lines)
    with (folder / "queries.jsonl").open("a") as file:
        file.write('{"_id": "q 2", "text": "an id with a blank"}\n')
    collection = opened(folder)
    # A repeated judgement of equal grade counts once; a run may hold each id once.
    assert judged(collection, TRAIN) == [("q1", "d1", 2), ("q%202", "d2", 0.5)]
    assert collection.queries.indices_of(["q 2", "q%202"]).tolist() == [3, 3]


def test_the_demo_has_three_parts_and_no_query_is_a_title():
    collection = open_collection(CollectionRequest())
    parts = [collection.judgements(part) for part in (TRAIN, VALIDATION, TEST)]
    queries = [set(part.query.tolist()) for part in parts]
    assert sum(map(len, queries)) == len(collection.queries) == len(set.union(*queries))
    assert min(map(len, queries)) > 50
    for part in parts:
        assert set(part.grade.tolist()) == {1.0, 2.0}
        for query, document, grade in list(zip(*part, strict=True))[:100]:
            title = collection.documents[int(document)].title.lower()
            assert collection.queries[int(query)].text != title
            answer = f"how-{collection.documents[int(document)].id}"
            assert grade == 1 or collection.queries[int(query)].id == answer


PAGES = {
    "bread/rye bread.html": "<title>Rye  bread</title><h1>Rye bread</h1><p>Takes <b>sour</b> dough."
    "<link rel=canonical href=https://ex.org/rye>",
    "bread/index.html": "<h1>All breads</h1><p>White and dark.</p><script>x</script>",
    "hugo.md": "+++\r\ntags = ['rye']\r\ntitle = 'Rye, again'\r\n+++\r\n\r\n## How\r\nSlowly.\r\n",
    "oven.md": "# The *oven*\n\nHeat it to [230](http://x.y) degrees of _max_length_.\n",
    "notes.txt": "Flour\nKeep it *dry*: 2*3 of max_length.\n",
    "old.htm": "<meta charset=latin1><title>Caf\xe9</title><p>Cr\xe8me",
    ".hidden/x.html": "<p>no",
    "copy.html.gz": "<title>Copy</title>A <link rel=canonical href=https://ex.org/y><p>y",
    "y.HTML": "<svg><title>Menu</title></svg><title>Y</title>Yes<link rel=canonical href=https://ex.org/y>",
}
RECORDS = {
    "bread/index.html": ("All breads", "White and dark.", ""),
    "bread/rye%20bread.html": ("Rye bread", "Takes sour dough.", "https://ex.org/rye"),
    "copy.html.gz": ("Copy", "A\ny", "https://ex.org/y"),
    "hugo.md": ("Rye, again", "How\nSlowly.", ""),
    "notes.txt": ("Flour", "Keep it *dry*: 2*3 of max_length.", ""),
    "old.htm": ("Café", "Crème", ""),
    "oven.md": ("The oven", "Heat it to 230 degrees of max_length.", ""),
    "y.HTML": ("Y", "Yes", "https://ex.org/y"),
}


def write_pages(folder: Path) -> Path:
    for name, content in PAGES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pack = gzip.compress if name.endswith(".gz") else bytes
        (folder / name).write_bytes(pack(content.encode("latin1")))
    return folder


def test_titles_are_the_queries_of_pages_without_a_file_of_queries(tmp_path):
    collection = open_collection(CollectionRequest(folder=str(write_pages(tmp_path)), split=WHOLE))
    assert {d.id: (d.title, d.text, d.address) for d in collection.documents} == RECORDS
    assert judged(collection, TRAIN) == [(id, id, 1) for id in RECORDS]
    titles, texts, _ = zip(*RECORDS.values(), strict=True)
    assert [query.text for query in collection.queries] == [*titles]
    # Training and evaluation on titles must not find them in the documents.
    bare = collection.without_leak()
    assert [document.whole for document in bare.documents] == [*texts]
    assert bare.fingerprint != collection.fingerprint
    assert bare.without_leak().documents[0].whole == "White and dark."


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_folder_of_pages_has_queries_beside_it(tmp_path, kind):
    write_pages(tmp_path)
    (tmp_path / "cre\u0300me.html").write_text("<p>Cream")
    pairs = [
        ("sour dough", "https://ex.org/rye", 2),
        ("keep dry", "notes.txt", 1),
        ("sour dough", "/bread/index.html", 1),
        ("how hot", "oven.md", 1),
        ("bread", "rye%20bread.html", 1),
        ("cream", "cr\u00e8me.html", 1),  # macOS stores the letter and its accent apart
    ]
    if kind == "csv":
        lines = ["query;page;grade", *(f"{q};{page};{grade}" for q, page, grade in pairs)]
    else:
        lines = [f'{{"query": "{q}", "pages": ["{p}"], "grade": {g}}}' for q, p, g in pairs]
    write_lines(tmp_path / f"queries.{kind}", *lines)
    request = CollectionRequest(folder=str(tmp_path), split=WHOLE)
    collection = open_collection(request)
    texts = ["sour dough", "keep dry", "how hot", "bread", "cream"]
    assert [q.text for q in collection.queries] == texts
    assert judged(collection, TRAIN) == [
        ("1", "bread/index.html", 1),
        ("1", "bread/rye%20bread.html", 2),
        ("2", "notes.txt", 1),
        ("3", "oven.md", 1),
        ("4", "bread/rye%20bread.html", 1),
        ("5", "cre\u0300me.html", 1),
    ]
    assert collection.without_leak() is collection
    for name, page, message in (
        ("grill", "gone.html", '"gone.html": no page has this path, name or address'),
        ("grill", "https://ex.org/y", '"https://ex.org/y": no page .*or several have; name its p'),
        ("grill", "", rf'queries.{kind}:\d: "grill": the row names no page'),
    ):
        wrong = f'{{"query": "{name}", "page": "{page}"}}'
        more = f"{name};{page};1" if kind == "csv" else wrong
        write_lines(tmp_path / f"queries.{kind}", *lines, more)
        with pytest.raises(ValueError, match=message):
            open_collection(request)
    assert len(open_collection(request, "reject").queries) == 5


def with_queries(folder: Path, count: int) -> CollectionRequest:
    """A collection with many training queries, in a new folder."""
    write_beir(folder)
    rows = [{"_id": f"q{i}", "text": f"query {i}"} for i in range(count)]
    write_lines(folder / "queries.jsonl", *map(json.dumps, rows))
    write_qrels(folder / "qrels" / "train.tsv", [(f"q{i}", "d1", "1") for i in range(count)])
    (folder / "qrels" / "test.tsv").unlink()
    return CollectionRequest(str(folder))


def queries_of(collection: Collection, part: int) -> set[str]:
    return {collection.queries[q].id for q in collection.judgements(part).query.tolist()}


def test_two_processes_read_one_pickled_collection(tmp_path):
    collection = opened(write_beir(tmp_path))
    before = [collection.documents[i] for i in range(3)]  # handles and memory maps are not pickled
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(collection.documents.__getitem__, range(3), chunksize=1) == before
    copy = pickle.loads(pickle.dumps(collection))
    assert copy.documents.indices_of([id for id, *_ in DOCUMENTS]).tolist() == [0, 1, 2]
    assert copy.fingerprint == collection.fingerprint


def test_missing_parts_are_drawn_from_the_training_queries_by_their_ids(tmp_path):
    request = with_queries(tmp_path / "a", 400)
    shares = Split(validation_share=0.2, test_share=0.1)
    drawn = open_collection(CollectionRequest(request.folder, split=shares))
    parts = [queries_of(drawn, part) for part in (TRAIN, VALIDATION, TEST)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 400
    assert 50 < len(parts[VALIDATION]) < 110
    assert 20 < len(parts[TEST]) < 60
    fewer = with_queries(tmp_path / "b", 200)  # other queries move none of these to another part
    few = open_collection(CollectionRequest(fewer.folder, split=shares))
    for part in (TRAIN, VALIDATION, TEST):
        assert queries_of(few, part) <= parts[part]
    seeded = Split(validation_share=0.2, test_share=0.1, seed=1)
    other = open_collection(CollectionRequest(request.folder, split=seeded))
    assert queries_of(other, VALIDATION) != parts[VALIDATION]


def test_a_part_with_files_of_its_own_is_left_alone(tmp_path):
    request = with_queries(tmp_path, 50)
    write_qrels(tmp_path / "qrels" / "dev.tsv", [("q3", "d1", "1")])
    collection = open_collection(request)
    assert queries_of(collection, VALIDATION) == {"q3"}
    assert len(queries_of(collection, TRAIN)) == 50
    assert queries_of(collection, TEST) == set()


def test_judgements_are_sorted_whatever_the_order_of_their_lines(tmp_path):
    rows = [("q2", "d3", "1"), ("q1", "d2", "2"), ("q2", "d1", "0"), ("q1", "d1", "1")]
    found = opened(write_beir(tmp_path, rows)).judgements(TRAIN)
    assert [values.tolist() for values in found] == [[0, 0, 1, 1], [0, 1, 0, 2], [1, 2, 0, 1]]
    assert (found.query.dtype, found.grade.dtype) == (np.int64, np.float32)


def test_a_changed_file_changes_no_open_collection_and_is_indexed_anew(tmp_path):
    folder = write_beir(tmp_path)
    request = CollectionRequest(str(folder))
    collection = open_collection(request)
    corpus = folder / "corpus.jsonl"
    status, content = corpus.stat(), corpus.read_text()
    corpus.write_text(content.replace("lift of a wing", "LIFT of a wing"))
    os.utime(corpus, ns=(status.st_atime_ns, status.st_mtime_ns))  # same size, same time
    assert collection.documents[0].text == "lift of a wing"
    anew = open_collection(request)
    assert anew.documents[0].text == "LIFT of a wing"
    assert anew.fingerprint != collection.fingerprint


def test_the_same_files_elsewhere_have_the_same_fingerprint(tmp_path):
    first, second = (opened(write_beir(tmp_path / name)) for name in ("a", "b"))
    assert first.fingerprint == second.fingerprint
    assert first.folder != second.folder


def test_a_page_of_another_name_is_another_text_for_bm25(tmp_path):
    page = tmp_path / "apple.txt"
    page.write_text("of fruit")  # without a title, so the file's name is the title
    assert open_bm25(opened(tmp_path)).search(["pear"], 1).scores.tolist() == [[0]]
    page.rename(tmp_path / "pear.txt")
    assert open_bm25(opened(tmp_path)).search(["pear"], 1).scores[0, 0] > 0


def test_memory_does_not_grow_with_the_texts(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))
    peaks, text = [], "a passage of several words " * 60
    for number in (200, 2000):  # 0.3 and 3 MB
        folder = write_beir(tmp_path / str(number))
        rows = ({"_id": f"d{i}", "text": f"{text}{i}"} for i in range(1, number + 1))
        write_lines(folder / "corpus.jsonl", *map(json.dumps, rows))
        tracemalloc.start()
        assert all(document.text.startswith(text) for document in opened(folder).documents)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] - peaks[0] < 0.3 * (folder / "corpus.jsonl").stat().st_size


def refused(folder: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        opened(folder)
    assert "--data.on_bad_rows=reject" in str(error.value)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("qrels/train.tsv", "q9\td1\t1", r'train.tsv:5: no query has the id "q9"; take the judg'),
        ("qrels/train.tsv", "q1\td9\t1", r'train.tsv:5: no document has the id "d9"; take the '),
        ("qrels/train.tsv", "q1\td3\tgood", r'train.tsv:5: "good": a grade must be a number, 0 '),
        ("qrels/train.tsv", "q1\td3\t-1", r'train.tsv:5: "-1": a grade must be a number, 0 or m'),
        ("qrels/train.tsv", "q1\td3\tnan", r'train.tsv:5: "nan": a grade must be a number'),
        ("qrels/train.tsv", "q1 d3 1", r"train.tsv:5: .*has 1 columns, and must have 3 with tabs"),
        ("qrels/train.tsv", "q1\td1\t1", r"train.tsv:5: .*grade 2 further up; decide on one"),
        ("corpus.jsonl", '{"_id": "d1", "text": "x"}', r'4: "d1": a row further up has this id;'),
        ("corpus.jsonl", '{"_id": "d4"}', 'corpus.jsonl:4: "": "text" is missing or no text'),
        ("corpus.jsonl", '{"text": "x"}', 'corpus.jsonl:4: "": "id" is missing or no text; a row'),
        ("corpus.jsonl", '{"_id": "d4", "text": 3}', 'jsonl:4: "3": "text" is missing or no text'),
        ("corpus.jsonl", '{"_id": " ", "text": "x"}', 'jsonl:4: " ": "_id" is missing or no text'),
        ("corpus.jsonl", '{"_id": "d4", "text": "\\ud83d"}', "jsonl:4: .*is half of a surrogate"),
        ("queries.jsonl", '{"_id": "q4", "text": " "}', '4: "q4": the query is empty; write what'),
        ("queries.jsonl", '{"_id": "q1", "text": "x"}', '4: "q1": a row further up has this id;'),
    ],
)
def test_a_wrong_row_is_named_and_left_out(tmp_path, name, row, message):
    folder = write_beir(tmp_path)
    with (folder / name).open("a") as file:
        file.write(row + "\n")
    refused(folder, message)
    collection = open_collection(CollectionRequest(str(folder), split=WHOLE), "reject")
    assert len(collection.judgements(TRAIN).query) == 3  # only the valid ones
    assert (len(collection.documents), len(collection.queries)) == (3, 3)
    assert collection.documents[0].title == "Wings"  # the first of repeated ids stays
    assert [bad.line for bad in read_rejected(collection.folder)] == [4 + name.startswith("qrels")]


def test_what_is_not_utf8_or_json_is_named(tmp_path):
    folder = write_beir(tmp_path)
    (folder / "qrels" / "train.tsv").write_bytes("q1\tcafé\t1\n".encode("latin1"))
    refused(folder, 'train.tsv:1: no document has the id "caf\ufffd"; take the judgement out')
    for wrong, what in (("café".encode("latin1"), "not UTF-8"), (b'{"_id": ', "no JSON")):
        (folder / "corpus.jsonl").write_bytes(wrong + b"\n")
        with pytest.raises(ValueError, match=f"corpus.jsonl:1: the line is {what}"):
            opened(folder)


def test_files_that_are_missing_or_unclear_are_named(tmp_path):
    folder = write_beir(tmp_path)
    write_qrels(folder / "qrels" / "valid.tsv", TRAIN_ROWS)
    write_qrels(folder / "qrels" / "dev.tsv", TRAIN_ROWS)
    with pytest.raises(ValueError, match=r"dev.tsv and .*valid.tsv both hold .* of validation; na"):
        opened(folder)
    (folder / "qrels" / "valid.tsv").rename(folder / "qrels" / "mine.tsv")
    with pytest.raises(ValueError, match=r"mine.tsv: its name tells no part, .*; rename it, or"):
        opened(folder)
    write_lines(folder / "corpus.jsonl", "")
    (folder / "qrels" / "mine.tsv").unlink()
    with pytest.raises(ValueError, match="the files hold no documents; check that they are those"):
        opened(folder)


def test_the_format_is_found_from_the_folder(tmp_path):
    assert CollectionRequest(folder=str(write_beir(tmp_path / "beir"))).reader()[0] == "beir"
    write_lines(tmp_path / "site" / "a" / "PAGE.HTM", "<p>x")
    assert CollectionRequest(folder=str(tmp_path / "site")).reader()[0] == "pages"
    with pytest.raises(ValueError, match=r"with data.collection.files.queries alone; leave"):
        CollectionRequest(str(tmp_path / "site"), CollectionFiles(train="y")).reader()
    assert CollectionRequest().reader()[0] == "demo"
    (tmp_path / "bare").mkdir()
    words = "bare holds none of the files that tell a format .*corpus.jsonl.*html"
    with pytest.raises(ValueError, match=words):
        CollectionRequest(folder=str(tmp_path / "bare")).reader()
    with pytest.raises(FileNotFoundError, match="collection.folder .*gone is no folder"):
        CollectionRequest(folder=str(tmp_path / "gone")).reader()
