"""Reading of documents from files."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules.files.documents import Document, read_documents, text_files
from datamodules.files.rows import read_json_rows

TEXT = "First line.\nSecond, löng — line.\n\n \t \nThird 🙂 line,\nfourth line.\n\n\nThe end.\n"


def read(path, *text_column):
    return list(read_documents(path, *text_column))


def place_of(fragments):
    return [(f.place.rsplit(":", 1)[1], f.text) for f in fragments]


@pytest.mark.parametrize("line_break", ["\n", "\r\n", "\r"])
def test_a_text_file_is_one_document(tmp_path, line_break):
    path = tmp_path / "a.txt"
    path.write_bytes(("\ufeff" + TEXT).replace("\n", line_break).encode())
    assert read(path) == [Document(f"{path}:1", TEXT)]


def test_rows_of_jsonl_and_parquet_are_documents_with_their_line_or_row(tmp_path):
    lines = [json.dumps({"text": f"row {i}", "n": i}) for i in range(5)]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join([*lines[:2], "", *lines[2:]]), "utf-8")
    expected = [(str(i + 1 + (i > 1)), f"row {i}") for i in range(5)]
    assert place_of(read(tmp_path / "a.jsonl")) == expected
    (tmp_path / "a.json").write_text(f"[{', '.join(lines)}]")
    assert [text for _, text in read(tmp_path / "a.json")] == [text for _, text in expected]
    rows = [f"row {i}" for i in range(7)]
    table = pa.table({"body": rows, "other": [[i] for i in range(7)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    found = read(tmp_path / "a.parquet", "body")
    assert place_of(found) == [(str(i + 1), row) for i, row in enumerate(rows)]


def test_folders_give_all_their_text_files_in_order(tmp_path):
    for name in ("b.txt", "a/z.jsonl", "a/b/c.parquet", "a/l.json", "a/notes.md", ".git/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [str(p.relative_to(tmp_path)) for p in text_files(str(tmp_path), "data.train_files")]
    assert names == ["a/b/c.parquet", "a/z.jsonl", "b.txt"]
    found = text_files([f"{tmp_path}/{n}" for n in ("a", "*.txt", "a/l.json")], "data.train_files")
    assert [p.name for p in found] == ["c.parquet", "z.jsonl", "b.txt", "l.json"]


def test_missing_files_and_folders_without_text_are_named(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.md").write_text("x")
    (tmp_path / "corpus.txt").write_text("x")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "a.txt").symlink_to("gone")
    for names, message in (
        (["linked"], r"linked/a.txt does not exist"),
        (["empty"], r"data.train_files: the folder .*empty holds no text"),
        (["a.txt,b.txt"], r'Name several as a list: "\[.*a.txt,b.txt\]"'),
        (["corpsu.txt"], r'corpsu.txt does not exist. Did you mean ".*corpus'),
        (["empty/notes.md"], r'notes.md ends in ".md", which is none of .txt, .jsonl'),
        (["corpus.txt", "."], r"data.train_files names .*corpus.txt twice"),
    ):
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            text_files([str(tmp_path / name) for name in names], "data.train_files")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x"}', r'a.jsonl:2: the row has no "text"; it has: body. Name .*text_column'),
        ('{"text": 5}', r'a.jsonl:2: "text" holds int \(5\), and a document must be a text; wri'),
        ('{"text": ["x"]}', r'a.jsonl:2: "text" holds list'),
        ('["x"]', r"a.jsonl:2: the row is a JSON list; every row must be an object"),
        ('{"text": "x"', r"a.jsonl:2: the line is no JSON .* `jq -c . .*a.jsonl` prints objects"),
    ],
)
def test_a_wrong_row_is_named_with_file_line_and_way_out(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=message):
        read(path)


def test_text_that_is_not_utf_8_is_named_with_its_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"good\nna\xefve\n")
    with pytest.raises(ValueError, match=r"a.txt:2: byte 0xEF is not in the encoding utf-8"):
        read(path)
    path.write_bytes("good".encode("utf-16"))  # an option for tables only would have no effect here
    with pytest.raises(ValueError, match=r"iconv -f utf-16 -t utf-8 .*a.txt\)\.$"):
        read(path)


def test_damaged_files_are_named(tmp_path):
    for name in ("a.parquet", "empty.parquet"):
        (tmp_path / name).write_bytes(b"no parquet" if name[0] == "a" else b"")
        with pytest.raises(ValueError, match=f"{name} is damaged or no parquet file .*copy it ag"):
            list(read_json_rows(tmp_path / name))
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a.jsonl:1: the line is not UTF-8; every line of"):
        list(read_json_rows(tmp_path / "a.jsonl"))
    for content, words in (
        ("[1]", ":1: the row is a JSON int; every"),
        ("[{},", "is no JSON list"),
    ):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(ValueError, match=f"a.json.*{words}"):
            list(read_json_rows(tmp_path / "a.json"))
