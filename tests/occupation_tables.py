"""Small tables of job descriptions and the datamodule that reads them."""

from pathlib import Path
from typing import Any

from datamodules import CodeSystem, Columns, OccupationDataModule, SplitOptions
from datamodules.files.rows import OnBadRows
from datamodules.occupations.store import PredictIndex, StoreRequest, open_index
from tests.text_corpora import table as csv_table

ROWS = [
    ("Wine and spirit merchant", "en", "41025", ""),
    ("Miner (deceased)", "en", "71105", ""),
    ("ROENTGEN  nan", "ge", "06510", "-1"),
    ("smed", "dk", "83110", "95410"),
    ("nan", "", "-1", ""),
]
COLUMNS = Columns(language="language")


def table(
    path: Path, rows: list[tuple[str, ...]], header: str = "text,language,code_1,code_2"
) -> str:
    return csv_table(path, rows, header.split(","))


def many(num_rows: int, codes: int = 4) -> list[tuple[str, ...]]:
    return [(f"trade {i} of {i % 7}", "en", f"{10000 + i % codes}", "") for i in range(num_rows)]


def module(folder: Path, rows: list[tuple[str, ...]], **options: Any) -> OccupationDataModule:
    options = {"columns": COLUMNS, "split": SplitOptions(0.0, 0.0), **options}
    return OccupationDataModule(table(folder / "train.csv", rows), **options)


def index_of(
    files: list[Path],
    recipe: dict[str, Any],
    columns: Columns | None = None,
    on_bad_rows: OnBadRows = "error",
) -> PredictIndex:
    """The inputs of tables that a model with this recipe codes."""
    request = StoreRequest({}, columns or Columns(), CodeSystem(), recipe=recipe)
    return open_index(files, request, on_bad_rows)
