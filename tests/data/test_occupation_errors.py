"""Wrong tables and options: each error gives file, line, value and way out."""

import numpy as np
import pytest

from datamodules import (
    CodeBookOptions,
    CodeSystem,
    Columns,
    OccupationDataModule,
    SplitOptions,
)
from datamodules.occupations.store import open_store
from datamodules.tokenizers.codes import CodeBook
from lit_models.errors import screen
from tests.occupation_tables import COLUMNS, ROWS, many, module, table


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("a", "danisch", "10000", ""), r't.csv:3: language "danisch".*Did you mean "danish"'),
        (("a", "en", "100001", ""), r't.csv:3: code "100001" has 6 symbols, and'),
        (("a", "en", "1000x", ""), r't.csv:3: code "1000x" holds the unknown symbol "x"'),
        (("a", "en", "2110", ""), r't.csv:3: code "2110" .*lost its leading zeros \("02110"\)'),
        (("a", "en", "#N/A", "NA"), r"t.csv:3: .*the row has no code; give it one or drop the row"),
        (("a", "en", "10000"), r't.csv:3: "a,en,10000": the row has 3 values, the header 4'),
    ],
)
def test_a_bad_row_is_named_with_file_line_value_and_rule(tmp_path, row, message):
    path = table(tmp_path / "t.csv", [ROWS[0], row])
    with pytest.raises(ValueError, match=message):
        OccupationDataModule(path, columns=COLUMNS).prepare_data()


def test_a_code_outside_the_book_and_too_many_codes_are_bad_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "book.csv").write_text("code,description\n41025,Merchant\n")
    options = {"code_book": CodeBookOptions("~/book.csv")}
    with pytest.raises(ValueError, match=r'code "71105" is not in the code book.*nearest: 41025'):
        module(tmp_path, ROWS[:2], **options).prepare_data()
    with pytest.raises(ValueError, match=r"train.csv:2: .*has 2 codes, this code system allows 1"):
        module(tmp_path, ROWS[3:4], code_system=CodeSystem(5, max_codes=1)).prepare_data()


def test_the_first_faults_and_the_way_out_fit_one_screen(tmp_path):
    rows = [(f"trade {i}", "en", f"{i}x", "") for i in range(30)]
    with pytest.raises(ValueError, match="30 rows break the rules of the data") as error:
        module(tmp_path, rows).prepare_data()
    lines = screen(str(error.value)).splitlines()
    assert "train.csv:6: " in str(error.value)
    assert lines[-3] == "… and 25 other faults"
    assert lines[-2].startswith("--data.on_bad_rows=reject")


def test_a_table_of_bad_rows_alone_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("datamodules.files.rows.ENOUGH", 4)
    rows = [(f"trade {i}", "en", f"{i}x", "") for i in range(30)]
    with pytest.raises(ValueError, match="4 or more rows break the rules of the data"):
        module(tmp_path, rows).prepare_data()


def test_equal_faults_are_one_line_with_their_number(tmp_path):
    others = [("smith", "klingon", "10000", ""), ("", "en", "10000", "")]
    rows = [*[(f"trade {i}", "en", "", "") for i in range(30)], *others]
    with pytest.raises(ValueError, match="32 rows break the rules of the data") as error:
        module(tmp_path, rows).prepare_data()
    lines = str(error.value).splitlines()
    assert len(lines) == 5
    assert "train.csv:2: " in lines[1]
    assert lines[1].endswith("the row has no code; give it one or drop the row. [and 29 more]")
    assert 'train.csv:32: language "klingon"' in lines[2]
    assert 'train.csv:33: "": the column "text" holds no text; fill it or drop the row' in lines[3]


@pytest.mark.parametrize("names", ["A,B", ["A", "B"]])
def test_the_number_of_codes_comes_from_the_columns(tmp_path, names):
    path = table(tmp_path / "t.csv", [("a", "1", "2"), ("b", "", "3"), ("c", "4", "")], "text,A,B")
    data = OccupationDataModule(
        path, columns=Columns(codes=names), code_system="from_data", split=SplitOptions(0.0, 0.0)
    )
    store = open_store(data.store_request())
    assert CodeBook.from_dict(store.recipe["code_book"]).max_codes == 2
    assert np.diff(store.arrays["code_offsets"]).tolist() == [2, 1, 1]


def test_rejected_rows_are_written_with_their_reason(own_folder, caplog):
    rows = [*many(10), ("", "en", "10000", ""), ("a", "en", "9x", ""), ("b", "en", '"9\rx"', "")]
    for _ in range(2):  # from the cache the second time
        data = module(own_folder, rows, on_bad_rows="reject")
        data.prepare_data()
        rejected = (own_folder / "rejected.csv").read_text().splitlines()
        assert rejected[0] == "file,line,value,kind,reason"
        cells = [line.split(",")[1:4] for line in rejected[1:]]
        assert cells[:2] == [["12", "", "text"], ["13", "9x", "code"]]
        assert "3 rows were rejected; they are listed" in caplog.text
        assert len(open_store(data.store_request(), "reject").arrays["part"]) == 10
        (own_folder / "rejected.csv").unlink()
