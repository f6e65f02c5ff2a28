"""Rows of jsonl and parquet files, whole or in parts."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datamodules.files.rows import read_json_rows


def test_a_part_of_a_jsonl_file_keeps_its_line_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"a": [2]}\n{"a": 3}')
    assert [(r.line, r.values) for r in read_json_rows(path)] == [
        (1, {"a": 1}),
        (3, {"a": [2]}),
        (4, {"a": 3}),
    ]
    part = list(read_json_rows(path, start=9, end=20, first_line=2))
    assert [(r.place, r.values) for r in part] == [(f"{path}:3", {"a": [2]})]


def test_a_part_of_a_parquet_file_is_some_of_its_row_groups(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": range(6), "b": list("abcdef")}), path, row_group_size=2)
    part = list(read_json_rows(path, start=1, end=2, first_line=3, columns=("b",)))
    assert [(r.line, r.values) for r in part] == [(3, {"b": "c"}), (4, {"b": "d"})]
    whole = list(read_json_rows(path, columns=("c",)))
    assert whole[5].values == {"a": 5, "b": "f"}
    assert list(read_json_rows(path, 0, 0)) == []


def test_damaged_files_are_named(tmp_path):
    for name in ("a.parquet", "empty.parquet"):
        (tmp_path / name).write_bytes(b"no parquet" if name[0] == "a" else b"")
        with pytest.raises(ValueError, match=f"{name} is no readable parquet file .*write it ag"):
            list(read_json_rows(tmp_path / name))
    (tmp_path / "a.jsonl").write_bytes(b'{"a": "\xff"}\n')
    with pytest.raises(ValueError, match=r"a.jsonl:1: the line is not UTF-8; every line of"):
        list(read_json_rows(tmp_path / "a.jsonl"))
