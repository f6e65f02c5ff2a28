"""Documents and rows from files of every kind, plain and packed; each fault has its place."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules.files.documents import Document, read_documents, text_files
from datamodules.files.rows import JSON_OUTPUT, JsonRow, read_json_rows
from datamodules.files.tables import ROW_SUFFIXES, Table, output_like
from datamodules.text.prompts import read_rows, rows_in_memory, write_rows

TEXTS = ["an owl", 'a "hen"\nand a cat', "æ"]
ROWS = [json.dumps({"text": text, "n": number}) for number, text in enumerate(TEXTS)]
LINES = "".join(f"{row}\n" for row in ROWS).encode()
PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda content: pa.compress(content, "zstd", asbytes=True),
}


@pytest.mark.parametrize("packing", PACK)
def test_documents_of_all_kinds_of_files_are_the_same(tmp_path, packing):
    table = '\ufeffn\ttext\n1\tan owl\n2\t"a ""hen""\nand a cat"\n3\tæ\n'
    blank = "\ufeff" + "\n".join([ROWS[0], "", *ROWS[1:]])  # the places count empty lines, too
    contents = {".jsonl": LINES, ".ndjson": blank.encode(), ".tsv": table.encode()}
    contents[".json"] = f" [{', '.join(ROWS)}]".encode()
    lines = {".jsonl": "123", ".ndjson": "134", ".tsv": "235", ".json": "123"}
    for kind, content in contents.items():
        path = tmp_path / f"x{kind}{packing}"
        path.write_bytes(PACK[packing](content))
        places = [f"{path}:{line}" for line in lines[kind]]
        assert list(read_documents(path)) == list(zip(places, TEXTS, strict=True))
    assert list(read_json_rows(path))[2] == JsonRow(path, 3, {"text": "æ", "n": 2})
    path = tmp_path / f"x.txt{packing}"
    for line_break in ("\n", "\r\n", "\r"):
        path.write_bytes(PACK[packing](f"\ufeffan owl{line_break}and a hen".encode()))
        assert list(read_documents(path)) == [Document(f"{path}:1", "an owl\nand a hen")]
    table = pa.table({"body": TEXTS, "other": [[1], [2], [3]]})
    pq.write_table(table, path := tmp_path / "x.parquet", row_group_size=2)
    expected = [(f"{path}:{number}", text) for number, text in enumerate(TEXTS, start=1)]
    assert list(read_documents(path, "body")) == expected
    found = text_files(str(tmp_path), "files")
    assert {path.name.split(".")[1] for path in found} == {"jsonl", "ndjson", "txt", "parquet"}


@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.parametrize("kind", [".jsonl", ".txt", ".csv"])
def test_a_packed_file_that_is_cut_is_damaged_and_a_wrong_row_has_its_line(tmp_path, packing, kind):
    path = tmp_path / f"x{kind}{packing}"
    path.write_bytes(
        PACK[packing]((LINES if kind == ".jsonl" else b"text,n\nan owl,1\n") * 999)[:-9]
    )
    with pytest.raises(ValueError, match=r"is damaged \(Truncated compressed stream\); write or"):
        list(Table(path).rows() if kind == ".csv" else read_documents(path))
    faults = {
        ".jsonl": (LINES + b"{", ":4: the line is no JSON"),
        ".txt": (b"an owl\nand \xff", ":2: byte 0xFF is not in the encoding utf-8"),
        ".csv": (b"text,n\nan owl,1\na hen,2,3\n", ":3: .*the row has 3 values"),
    }
    path.write_bytes(PACK[packing](faults[kind][0]))
    with pytest.raises(ValueError, match=f"{path}{faults[kind][1]}"):
        list(read_documents(path))


def test_a_prediction_of_a_packed_file_is_packed_where_tables_can_be_written_so(tmp_path):
    names = {"a.tsv.gz": "a.x.tsv.gz", "a.CSV": "a.x.csv", "a.csv.zst": "a.x.csv"}
    names |= {"a.jsonl.gz": "a.x.jsonl.gz", "a.ndjson.zst": "a.x.ndjson"}
    assert {name: output_like([tmp_path / name], "x", ROW_SUFFIXES) for name in names} == names
    assert output_like([tmp_path / "a.json"], "x", JSON_OUTPUT) == "a.x.jsonl"
    rows, path = [{"prompt": "é"}, {"prompt": ""}], tmp_path / "out.jsonl.gz"
    write_rows(rows_in_memory(rows), [{"n": 1}, {"n": 2}], path)
    assert gzip.decompress(path.read_bytes()).startswith('{"prompt": "é", "n": 1}\n{'.encode())
    assert [row.values["n"] for row in read_rows([path])] == [1, 2]


def test_folders_give_all_their_text_files_in_order(tmp_path):
    for name in ("b.txt", "a/z.jsonl", "a/b/c.parquet", "a/l.json", "a/notes.md", ".git/x.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [str(p.relative_to(tmp_path)) for p in text_files(str(tmp_path), "data.train_files")]
    assert names == ["a/b/c.parquet", "a/z.jsonl", "b.txt"]
    found = text_files([f"{tmp_path}/{n}" for n in ("a", "*.txt", "a/l.json")], "data.train_files")
    assert [p.name for p in found] == ["c.parquet", "z.jsonl", "b.txt", "l.json"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", r"data.train_files: the folder .*empty holds no text"),
        ("linked", r"linked/a.txt does not exist"),
        ("a.txt,b.txt", r'Name several as a list: "\[.*a.txt,b.txt\]"'),
        ("corpsu.txt", r'corpsu.txt does not exist. Did you mean ".*corpus'),
        ("empty/notes.md", r'notes.md ends in ".md", which is none of .txt, .jsonl'),
        ("*.txt", r"data.train_files names .*corpus.txt twice"),
    ],
)
def test_missing_files_and_folders_without_text_are_named(tmp_path, name, message):
    for path in (tmp_path / "empty" / "notes.md", tmp_path / "corpus.txt"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "a.txt").symlink_to("gone")
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        text_files([str(tmp_path / "corpus.txt"), str(tmp_path / name)], "data.train_files")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"body": "x"}', r':1: the row has no "text"; it has: body. Name .*text_col'),
        ("a.jsonl", b'{"text": 5}', r':1: "text" holds int \(5\), and a document must be a text; '),
        ("a.jsonl", b'["x"]', r":1: the row is a JSON list; every row must be an object"),
        ("a.jsonl", b'{}\n{"text": "x"', r":2: the line is no JSON .* `jq -c . .*a.jsonl` prints"),
        ("a.jsonl", b'{"a": "\xff"}\n', r":1: the line is not UTF-8; every line of"),
        ("a.json", b"[1]", ":1: the row is a JSON int; every"),
        ("a.json", b"[{},", " is no JSON list"),
        ("a.parquet", b"no parquet", r" is damaged or no parquet file .*copy it again"),
        ("a.parquet", b"", r" is damaged or no parquet file .*copy it again"),
        ("a.txt", b"good\nna\xefve\n", r":2: byte 0xEF is not in the encoding utf-8"),
        # An option for tables would have no effect here.
        ("a.txt", "good".encode("utf-16"), r".*iconv -f utf-16 -t utf-8 .*a.txt\)\.$"),
    ],
)
def test_a_wrong_file_is_named_with_line_and_way_out(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}{message}"):
        list(read_json_rows(path) if content.startswith(b"{}") else read_documents(path))
