"""Collections are read from the field's own files, in their exact formats."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.files.splitting import TEST, TRAIN, VALIDATION
from datamodules.search.collection import (
    Collection,
    CollectionRequest,
    Document,
    QuerySplit,
    open_collection,
)
from datamodules.search.formats import CollectionFiles
from tests.search_collections import (
    DOCUMENTS,
    QUERIES,
    write_beir,
    write_lines,
    write_msmarco,
    write_qrels,
)

WHOLE = QuerySplit(validation_share=0.0)


def opened(format: str, folder: Path, **options: object) -> Collection:
    return open_collection(CollectionRequest(format, str(folder), **{"split": WHOLE, **options}))


def judged(collection: Collection, part: int) -> list[tuple[str, str, float]]:
    found = collection.judgements(part)
    return [
        (collection.query_id(q), collection.document_id(d), round(float(g), 6))
        for q, d, g in zip(found.query.tolist(), found.document.tolist(), found.grade, strict=True)
    ]


def test_beir_is_read(tmp_path: Path) -> None:
    collection = opened("beir", write_beir(tmp_path))
    assert (collection.num_documents, collection.num_queries) == (3, 3)
    for i, (id, title, text) in enumerate(DOCUMENTS):
        assert collection.document(i) == Document(title, text)
        assert (collection.document_id(i), collection.document_index(id)) == (id, i)
    for i, (id, text) in enumerate(QUERIES):
        assert (collection.query(i), collection.query_id(i)) == (text, id)
    assert collection.document_lengths.tolist() == [19, 14, 8]
    assert judged(collection, TRAIN) == [("q1", "d1", 2), ("q1", "d2", 0), ("q2", "d2", 1)]
    assert judged(collection, VALIDATION) == []
    assert judged(collection, TEST) == [("q3", "d3", 1)]
    with pytest.raises(KeyError, match='documents have no id "d4"'):
        collection.document_index("d4")
    with pytest.raises(KeyError, match='queries have no id "d1"'):
        collection.query_index("d1")
    with pytest.raises(IndexError, match="has 3 texts, there is no number 3"):
        collection.document(3)


def test_files_of_a_collection_may_lie_anywhere(tmp_path: Path) -> None:
    folder = write_beir(tmp_path)
    mine = write_qrels(tmp_path / "elsewhere" / "mine.tsv", [("q2", "d1", "3")])
    files = CollectionFiles(validation=str(mine), train=str(folder / "qrels" / "train.tsv"))
    collection = opened("beir", folder, files=files)
    assert judged(collection, VALIDATION) == [("q2", "d1", 3)]
    assert judged(collection, TEST) == []
    assert len(judged(collection, TRAIN)) == 3


def test_byte_order_marks_windows_line_ends_and_numbers_as_ids_are_read(tmp_path: Path) -> None:
    folder = write_beir(tmp_path)
    lines = ['{"_id": 7, "title": null, "text": "été"}', "", '{"_id": "8", "text": ""}']
    (folder / "corpus.jsonl").write_text("\ufeff" + "\r\n".join(lines) + "\r\n", "utf-8")
    (folder / "qrels" / "test.tsv").unlink()
    qrels = "\ufeffquery-id\tcorpus-id\tscore\r\nq1\t7\t1\r\n"
    (folder / "qrels" / "train.tsv").write_text(qrels, "utf-8", newline="")
    collection = opened("beir", folder)
    assert [collection.document_id(i) for i in range(2)] == ["7", "8"]
    assert collection.document(0) == Document("", "été")
    assert collection.document_lengths.tolist() == [5, 0]
    assert judged(collection, TRAIN) == [("q1", "7", 1)]


def test_quotes_of_msmarco_are_text(tmp_path: Path) -> None:
    folder = write_msmarco(tmp_path)
    collection = opened("msmarco", folder)
    texts = [collection.document(i).text for i in range(3)]
    assert texts == ['He said "lift" and left', '"Drag', "a\u00a0b, 5' 6\""]
    assert collection.query(collection.query_index("11")) == '"drag" meaning'
    assert judged(collection, TRAIN) == [("10", "0", 1), ("11", "1", 1)]
    assert judged(collection, VALIDATION) == [("20", "2", 1)]
    assert (collection.num_queries, collection.facts["queries"]["num_merged"]) == (4, 1)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\t\n\r"))))
def test_any_text_of_one_line_is_a_passage(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write_msmarco(Path(name))
        lines = [*(f"{i}\t{text}" for i, text in enumerate(texts)), *(f"p{i}\tx" for i in range(3))]
        (folder / "collection.tsv").write_text("\n".join(lines), "utf-8", newline="")
        collection = open_collection(CollectionRequest("msmarco", str(folder)), "reject")
        assert [collection.document(i).text for i in range(len(texts))] == texts


@pytest.mark.parametrize(
    "lines",
    [
        ("10\t0\t2", "11\t1\t0.5"),
        ("query-id\tcorpus-id\tscore", "10\t0\t2", "11\t1\t0.5"),
        ("10 0 0 2", "11\tQ0\t1\t0.5"),
    ],
)
def test_qrels_have_three_columns_with_or_without_a_header_or_four(
    tmp_path: Path, lines: tuple[str, ...]
) -> None:
    folder = write_msmarco(tmp_path)
    write_lines(folder / "qrels.train.tsv", *lines)
    assert judged(opened("msmarco", folder), TRAIN) == [("10", "0", 2), ("11", "1", 0.5)]


def test_the_demo_has_three_parts_and_no_query_is_a_title() -> None:
    collection = open_collection(CollectionRequest())
    parts = [collection.judgements(part) for part in (TRAIN, VALIDATION, TEST)]
    queries = [set(part.query.tolist()) for part in parts]
    assert sum(map(len, queries)) == collection.num_queries == len(set.union(*queries))
    assert min(map(len, queries)) > 50
    for part in parts:
        assert set(part.grade.tolist()) == {1.0, 2.0}
        for query, document, grade in list(zip(*part, strict=True))[:100]:
            title = collection.document(int(document)).title.lower()
            assert collection.query(int(query)) != title
            if grade == 2:
                assert collection.query_id(int(query)) == f"how-{collection.document_id(document)}"


PAGES = {
    "bread/rye bread.html": "<title>Rye  bread</title><h1>Rye bread</h1><p>Takes <b>sour</b> dough."
    "<link rel=canonical href=https://ex.org/rye>",
    "bread/index.html": "<h1>All breads</h1><p>White and dark.</p><script>x</script>",
    "oven.md": "# The *oven*\n\nHeat it to [230](http://x.y) degrees of _max_length_.\n",
    "notes.txt": "Flour\nKeep it *dry*: 2*3 of max_length.\n",
    "old.htm": "<meta charset=latin1><title>Caf\xe9</title><p>Cr\xe8me",
    ".hidden/x.html": "<p>no",
}
RECORDS = {
    "bread/index.html": ("All breads", "White and dark.", "bread/index.html"),
    "bread/rye%20bread.html": ("Rye bread", "Takes sour dough.", "https://ex.org/rye"),
    "notes.txt": ("Flour", "Keep it *dry*: 2*3 of max_length.", "notes.txt"),
    "old.htm": ("Café", "Crème", "old.htm"),
    "oven.md": ("The oven", "Heat it to 230 degrees of max_length.", "oven.md"),
}


def write_pages(folder: Path) -> Path:
    for name, content in PAGES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode("latin1"))
    return folder


def test_a_folder_of_pages_asks_for_its_titles(tmp_path: Path) -> None:
    collection = open_collection(CollectionRequest(folder=str(write_pages(tmp_path)), split=WHOLE))
    numbers = range(collection.num_documents)
    found = {
        collection.document_id(n): (*collection.document(n), collection.address(n)) for n in numbers
    }
    assert found == RECORDS
    assert judged(collection, TRAIN) == [(id, id, 1) for id in RECORDS]
    assert [collection.query(n) for n in numbers] == [title for title, _, _ in RECORDS.values()]
    # What is trained and measured on titles does not read them in the documents.
    bare = collection.without_leak()
    assert [bare.document_text(n) for n in numbers] == [text for _, text, _ in RECORDS.values()]
    assert bare.fingerprint != collection.fingerprint
    assert bare.without_leak().without_leak().document_text(0) == "White and dark."


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_folder_of_pages_has_queries_beside_it(tmp_path: Path, kind: str) -> None:
    write_pages(tmp_path)
    pairs = [
        ("sour dough", "https://ex.org/rye", 2),
        ("keep dry", "notes.txt", 1),
        ("sour dough", "/bread/index.html", 1),
        ("how hot", "oven.md", 1),
        ("bread", "rye bread.html", 1),
    ]
    if kind == "csv":
        lines = ["query;page;grade", *(f"{q};{page};{grade}" for q, page, grade in pairs)]
    else:
        lines = [f'{{"query": "{q}", "pages": ["{p}"], "grade": {g}}}' for q, p, g in pairs]
    write_lines(tmp_path / f"queries.{kind}", *lines)
    request = CollectionRequest(folder=str(tmp_path), split=WHOLE)
    collection = open_collection(request)
    assert [collection.query(n) for n in range(4)] == ["sour dough", "keep dry", "how hot", "bread"]
    assert judged(collection, TRAIN) == [
        ("1", "bread/index.html", 1),
        ("1", "bread/rye%20bread.html", 2),
        ("2", "notes.txt", 1),
        ("3", "oven.md", 1),
        ("4", "bread/rye%20bread.html", 1),
    ]
    assert collection.without_leak() is collection
    wrong = "grill;gone.html;1" if kind == "csv" else '{"query": "grill", "page": "gone.html"}'
    write_lines(tmp_path / f"queries.{kind}", *lines, wrong)
    with pytest.raises(ValueError, match='"gone.html": no page has this path, name or address'):
        open_collection(request)
    empty = "grill;;" if kind == "csv" else '{"query": "grill"}'
    write_lines(tmp_path / f"queries.{kind}", *lines, empty)
    with pytest.raises(ValueError, match=rf"queries.{kind}:\d: the row needs a query and its page"):
        open_collection(request)


def test_pages_need_a_folder(tmp_path: Path) -> None:
    files = CollectionFiles(documents=str(tmp_path / "a.html"))
    for options in ({"folder": str(tmp_path), "files": files}, {"files": files}):
        with pytest.raises(ValueError, match="format pages reads data.collection.folder"):
            CollectionRequest("pages", **options).reader()


def test_an_id_with_a_blank_is_no_column_of_trec(tmp_path: Path) -> None:
    folder = write_msmarco(tmp_path)
    write_lines(folder / "queries.train.tsv", "1 0\twhat is lift")
    write_lines(folder / "qrels.train.tsv", "1 0\t0\t2")
    assert judged(opened("msmarco", folder), TRAIN) == [("1 0", "0", 2)]
