"""Files of every kind, plain and packed: read alike, and each fault named with its place."""

import gzip
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules.files.documents import read_documents, text_files
from datamodules.files.rows import JSON_OUTPUT, JsonRow, read_json_rows
from datamodules.files.tables import ROW_SUFFIXES, Table, output_like
from datamodules.text.prompts import read_rows, rows_in_memory, write_rows

TEXTS = ["an owl", 'a "hen"\nand a cat', "æ"]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": lambda content: pa.compress(content, "zstd", asbytes=True),
}


def parquet() -> bytes:
    pq.write_table(pa.table({"n": [1, 2, 3], "text": TEXTS}), file := io.BytesIO())
    return file.getvalue()


@pytest.mark.parametrize("packing", PACK)
def test_documents_of_all_kinds_of_files_are_the_same(tmp_path, packing):
    table = '\ufeffn\ttext\n1\tan owl\n2\t"a ""hen""\nand a cat"\n3\tæ\n'
    contents = {".jsonl": LINES, ".ndjson": LINES, ".tsv": table.encode()}
    for kind, content in contents.items():
        path = tmp_path / f"x{kind}{packing}"
        path.write_bytes(PACK[packing](content))
        assert [document.text for document in read_documents(path)] == TEXTS
    path = tmp_path / f"x.txt{packing}"
    path.write_bytes(PACK[packing]("\ufeffan owl\r\nand a hen".encode()))
    assert list(read_documents(path)) == [(f"{path}:1", "an owl\nand a hen")]
    (tmp_path / "x.parquet").write_bytes(parquet())
    assert [document.text for document in read_documents(tmp_path / "x.parquet")] == TEXTS
    found = text_files(str(tmp_path), "files")
    assert {path.name.split(".")[1] for path in found} == {"jsonl", "ndjson", "txt", "parquet"}
    listed = tmp_path / f"x.json{packing}"
    listed.write_bytes(PACK[packing](b" [" + LINES.strip().replace(b"\n", b",") + b"]"))
    assert list(read_json_rows(listed))[2] == JsonRow(listed, 3, {"text": "æ"})


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
