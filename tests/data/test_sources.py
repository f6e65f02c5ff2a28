"""Tables in and out: every value stays the same text; faults name file and line."""

import csv
import gzip
import io
from pathlib import Path
from zipfile import ZipFile

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.files import tables
from datamodules.files.rows import BadRow
from datamodules.files.tables import Table, TableOptions, expand_files, write_batches

VALUES = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\n\0"), max_size=8
) | st.sampled_from(["nan", "-1", "007", "", 'say "a, b"', '"', '5" p', "NULL", "ß\t\r", "\ufeff"])


def rows_of(path: Path, options: TableOptions = TableOptions()) -> list[tuple[str, ...]]:  # noqa: B008
    return [tuple(row.values()) for _, row in Table(path, options).rows()]


def lines_of(path: Path) -> list[int]:
    return [line for line, _ in Table(path).rows()]


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3).flatmap(lambda n: st.lists(st.tuples(*[VALUES] * n), min_size=1)))
def test_any_table_of_strings_survives_every_format(tmp_path_factory, table):
    folder = tmp_path_factory.mktemp("table")
    names = [f"c{i}" for i in range(len(table[0]))]
    columns = [pa.array(column, pa.string()) for column in zip(*table, strict=True)]
    batch = pa.RecordBatch.from_arrays(columns, names=names)
    for suffix in (".csv", ".tsv.gz", ".parquet"):
        write_batches(folder / f"t{suffix}", [batch])
        assert rows_of(folder / f"t{suffix}") == table


def test_values_stay_text_and_rows_know_their_line(tmp_path):
    for first in ("", "sep=;"):  # Excel's line, here with another delimiter
        text = f'\ufeff{first}\ntext,code\nnan,01110\n\n"a, b",-1\r\n,2.0\n'
        path = write(tmp_path / "t.csv", text)
        assert rows_of(path) == [("nan", "01110"), ("a, b", "-1"), ("", "2.0")]
        assert lines_of(path) == [3, 5, 6]


def test_lines_of_a_quoted_text_are_no_rows(tmp_path):
    texts = ["Hello world\nyes, I am", "Prices\nof all:\nit costs 1,000", "line\n" * 2000]
    rows = [(str(number), text) for number, text in enumerate(texts)]
    lines = "".join(f'{number},"{text}"\n' for number, text in rows)
    assert rows_of(write(tmp_path / "t.csv", f"id,text\n{lines}")) == rows


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "windows-1252"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv.gz"])
def test_a_dialect_is_found_said_and_written_again(tmp_path, caplog, suffix, separator, encoding):
    rows = [("text", "code"), ("smed, husmand; mm.", "007"), ("på\nto linjer", "a|b"), ("ærø", "")]
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=separator, lineterminator="\r\n").writerows(rows * 9)
    content = text.getvalue().encode(encoding)
    packed = suffix.endswith(".gz")
    path = write(tmp_path / f"t{suffix}", gzip.compress(content, mtime=0) if packed else content)
    with caplog.at_level("INFO"):
        found = rows_of(path)
    plain = tables.SEPARATORS[suffix.removesuffix(".gz")]
    is_plain = separator == plain and encoding.startswith("utf-8")
    assert caplog.text.count("data.table") == (0 if is_plain else 1)
    assert found == [*rows[1:], *(rows * 8)]
    lines = [2, 3, 5] + [first + i for first in range(6, 46, 5) for i in (0, 1, 2, 4)]
    assert lines_of(path) == lines
    batch = pa.RecordBatch.from_arrays([*map(pa.array, zip(*found, strict=True))], names=rows[0])
    write_batches(tmp_path / f"out{suffix}", [batch], like=Table(path))
    out = (tmp_path / f"out{suffix}").read_bytes()
    assert (gzip.decompress(out) if packed else out) == content


def test_what_is_given_wins_over_what_is_found(tmp_path, caplog):
    path = write(tmp_path / "t.csv", "a;b,c\n1;2,3\n".encode("cp1250"))
    assert Table(path).names == ["a;b", "c"]
    assert Table(path, TableOptions(";", "cp1250")).names == ["a", "b,c"]
    marked = write(tmp_path / "m.csv", "\ufefftext\na\n")
    assert Table(marked, TableOptions(encoding="utf-8")).names == ["text"]
    for wrong in ({"separator": "\\t"}, {"encoding": "x8"}):
        with pytest.raises(ValueError, match="is no character; null finds one|encoding: x8; name"):
            TableOptions(**wrong)
    polish = write(tmp_path / "p.csv", "text\nśł\n".encode("cp1250"))
    assert rows_of(polish) != [("śł",)]
    assert rows_of(polish, TableOptions(encoding="cp1250")) == [("śł",)]
    with pytest.raises(ValueError, match="byte 0x9C is not in the encoding ascii; .* save the"):
        rows_of(polish, TableOptions(encoding="ascii"))


def test_a_sheet_is_read_and_written_as_text(tmp_path):
    book = openpyxl.Workbook()
    book.active.title = "1880"
    book.active.calculate_dimension = lambda: "A1:A2"  # as some programs write it
    for row in [(), ("text", "code"), ("smed", "007"), (None, None), (1.0, "=1+1"), ("a", 1, 2)]:
        book.active.append(row)
    book.active["A5"].number_format = "000"
    book.create_sheet("1901").append(["text"])
    book.create_chartsheet("plot", 0).add_chart(openpyxl.chart.BarChart())
    book.save(tmp_path / "t.xlsx")
    bad: list[BadRow] = []
    rows = list(Table(tmp_path / "t.xlsx").rows(["text"], bad.append))
    assert rows == [(3, {"text": "smed"}), (5, {"text": "001"})]
    assert [(b.line, b.value, "empty the cells" in b.rule) for b in bad] == [(6, "a | 1 | 2", True)]
    with ZipFile(tmp_path / "t.xlsx") as whole, ZipFile(tmp_path / "cut.xlsx", "w") as cut:
        for name in whole.namelist():
            cut.writestr(name, whole.read(name)[: -30 if name.endswith("sheet1.xml") else None])
    with pytest.raises(ValueError, match=r"cut.xlsx is damaged .*Error: .*copy it again"):
        list(Table(tmp_path / "cut.xlsx").rows(["text"], bad.append))
    with pytest.raises(ValueError, match='no sheet "1890"; it has: 1880, 1901'):
        Table(tmp_path / "t.xlsx", TableOptions(sheet="1890"))
    written = pa.RecordBatch.from_pydict({"text": ["=1+1", "007"], "n": [0.5, None]})
    write_batches(tmp_path / "out.xlsx", [written])
    sheet = openpyxl.load_workbook(tmp_path / "out.xlsx").active
    assert [*sheet.values] == [("text", "n"), ("=1+1", 0.5), ("007", None)]
    assert sheet["A2"].data_type == "s"  # text, not a formula
    with pytest.raises(ValueError, match="holds 32,767 characters, a text has 40,000; name a csv"):
        write_batches(tmp_path / "b.xlsx", [pa.RecordBatch.from_pydict({"text": ["a" * 40_000]})])


def test_whole_numbers_in_parquet_have_no_decimal_point(tmp_path):
    table = pa.table(
        {
            "i": pa.array([7, None]),
            "f": pa.array([81945.0, 1.5]),
            "n": pa.array([float("nan"), -3.0]),
            "b": pa.array([True, False]),
            "d": pa.array(["x", None]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    rows = [("7", "81945", "", "true", "x"), ("", "1.5", "-3", "false", "")]
    assert rows_of(tmp_path / "t.parquet") == rows


def test_a_structured_parquet_column_is_refused(tmp_path):
    pq.write_table(pa.table({"a": ["b"], "codes": [["1", "2"]]}), tmp_path / "t.parquet")
    # Also where the column is no input, but only copied beside the predictions.
    for read in (rows_of, lambda path: tables.check_same_columns([Table(path)])):
        with pytest.raises(ValueError, match=r'column "codes" holds list<.*join the values'):
            read(tmp_path / "t.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "text,code\n", r"t.csv holds a header and no rows"),
        ("t.xlsx", b"PK\x03\x04abc", r"t.xlsx is damaged or no Excel file"),
        ("t.csv", b"\x1f\x8babc", r"t.csv is damaged"),
        ("t.csv", b"text,code\na,1\nb\0c,2\n", r"t.csv:3: a NUL byte: this is a binary file"),
        ("t.csv", "føåæ\n".encode() + b"sm\xf8r", r":2: byte 0xF8 is not in the encoding utf-8"),
        ("t.csv", b"text\nM\x81ller\n", r"0x81 is not in the encoding windows-1252.*-f cp850 "),
        ("t.csv", "text,code\na,1\nb\n", r't.csv:3: "b": the row has 1 values, the header 2'),
        ("t.csv", "text,code\na,1,2\n", r"t.csv:2: .*has 3 values, the header 2.*quote values"),
        ("t.csv", 'text,code\n"a,1\nb"x,2\n', r"t.csv:2: .*a quote opens a value and is not clo"),
        ("t.csv", 'text,code\na,1\nb,"2', r"t.csv:3: .*is not closed, .*which glues rows"),
        ("t.csv", 'text,code\n"a" b,1\n', r"t.csv:2: .*or text follows its end"),
        ("t.csv", "text,code\na\rb,1\n", r"t.csv:2: .*carriage return stands inside the line"),
        ("t.csv", "text\ra\rb\r", r"t.csv:1: .*carriage return .*by a line feed where all"),
        ("t.csv", 'text,"code\na,1\n', r"t.csv:1: the header cannot be read: a quote opens"),
        ("t.csv", "text,text\na,1\n", r'the column name "text" occurs 2 times'),
        ("t.csv", "A list;;\ntext;code;\n", r'"" occurs 2 times .* a title above the header'),
        ("t.parquet", b"PAR1 is not enough", r"t.parquet is damaged or no parquet file"),
    ],
)
def test_a_wrong_file_is_named_with_line_and_way_out(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message):
        rows_of(path)


def test_bad_lines_can_be_collected_and_the_rest_is_read(tmp_path):
    path = write(tmp_path / "t.csv", 'text,code\na,1\n"b,2\nc,3,4\nd,5\n')
    bad: list[BadRow] = []
    rows = [(2, {"text": "a"}), (5, {"text": "d"})]
    assert list(Table(path).rows(["text"], bad.append)) == rows
    assert [(b.line, b.value) for b in bad] == [(3, '"b,2'), (4, "c,3,4")]


def test_missing_files_folders_and_suffixes_name_the_way_out(own_folder):
    for name in ("train.csv", "train.xls", "a.csv"):
        write(own_folder / name, "text\na\n")
    found = expand_files(own_folder / "*.csv", "train_files")
    assert [path.name for path in found] == ["a.csv", "train.csv"]
    with pytest.raises(FileNotFoundError, match=r'no file matches ".*\*.tsv"'):
        expand_files([own_folder / "*.tsv"], "train_files")
    with pytest.raises(ValueError, match=r"is a folder, .*; name files"):
        expand_files(str(own_folder), "train_files")
    with pytest.raises(ValueError, match=r'ends in ".xls", which is none of .csv'):
        expand_files(str(own_folder / "train.xls"), "train_files")
    with pytest.raises(ValueError, match="train.csv twice; its rows would count double"):
        expand_files([str(own_folder / "*.csv"), "train.csv"], "train_files")


def test_a_missing_column_is_answered_with_the_likely_one(tmp_path):
    path = write(tmp_path / "t.csv", "Occupation,lang\na,en\n")
    with pytest.raises(ValueError, match=r'no column "ocupation" .columns.text.; it has.*"Occup'):
        Table(path).check(["ocupation"], "columns.text")


def test_the_writer_overwrites_nothing_and_leaves_no_half_file(tmp_path):
    batch = pa.RecordBatch.from_pydict({"text": ["a"]})
    path = write(tmp_path / "t.csv", "kept")

    def stopped():
        yield batch
        raise RuntimeError("stop")

    with pytest.raises(FileExistsError, match="exists and is not overwritten"):
        write_batches(path, [batch])
    with pytest.raises(RuntimeError, match="stop"):
        write_batches(path, stopped(), way_out=None)
    assert path.read_text() == "kept"
    write_batches(path, [batch], way_out=None)
    assert path.read_text() == "text\na\n"
    with pytest.raises(ValueError, match=r'ends in ".xls"; write to one of'):
        write_batches(tmp_path / "t.xls", [batch])
    assert [p.name for p in tmp_path.iterdir()] == ["t.csv"]
