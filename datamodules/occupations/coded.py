"""Tables to code: each distinct (text, language) once, and the number of its input for every row.

Shapes: N rows, D distinct inputs, P characters of all inputs.
"""

from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules.core.batches import padded_texts
from datamodules.core.planned import PlannedDataset
from datamodules.core.store import (
    ArrayFile,
    ArrayFolder,
    cache_folder,
    file_digest,
    made_once,
    write_arrays,
)
from datamodules.files.rows import BadRows, OnBadRows
from datamodules.files.tables import Table, TableOptions, check_same_columns
from datamodules.occupations.store import Columns, RowReader, text_arrays
from datamodules.tokenizers.codes import CodeSystem, TextNormalisation

INDEX_VERSION = 4
NO_TEXT = -1


class PredictIndex(ArrayFolder):
    """The distinct inputs of some tables.

    Attributes:
        files: the tables.
        table: how they are written.
        notes: what of their rows is not as it should be.
        arrays: code_points [P] uint32, the texts one behind the other; text_offsets [D + 1] int64;
            is_truncated [D] bool; language_ids [D] int16, index in the recipe's languages,
            0 = unknown; input_of_row [N] int64, the number of the row's input, -1 = a row without
            text.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files = [Path(name) for name in self.facts["files"]]
        self.table = TableOptions(**self.facts["table"])
        self.notes: list[str] = self.facts["notes"]


class DistinctInputs(PlannedDataset):
    """The distinct (text, language) pairs of the tables to code, each once."""

    noun = "different inputs"

    def __init__(self, index: PredictIndex) -> None:
        self.index = index
        self.lengths = np.diff(index.arrays["text_offsets"])
        self.fingerprint = index.fingerprint
        self.target_counts = {}

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, Any]:
        """The padded batch of inputs [B], without codes."""
        language_ids = self.index.arrays["language_ids"][sample_ids].astype(np.int64)
        batch = padded_texts(self.index.parts("code_points", "text_offsets", sample_ids))
        return {**batch, "language_id": torch.from_numpy(language_ids)}


def open_index(
    files: Sequence[Path],
    columns: Columns,
    recipe: dict[str, Any],
    on_bad_rows: OnBadRows = "error",
    table: TableOptions = TableOptions(),  # noqa: B008 - frozen
) -> PredictIndex:
    """The index of these tables, made where the cache lacks it.

    Args:
        files: tables with a text column; code columns are not needed.
        columns: which column holds text and language.
        recipe: of the checkpoint that will code them.
        on_bad_rows: `error` names the lines that cannot be cut into columns, `reject` leaves them
            out.

    Raises:
        ValueError: tables differ in their columns, or rows break a rule.
    """
    tables = [Table(path, table) for path in files]
    for one in tables:
        columns.text_columns(one)
    check_same_columns(tables)
    key = {
        "version": INDEX_VERSION,
        "files": [[str(path.resolve()), file_digest(path)] for path in files],
        "columns": [columns.text, columns.language, columns.default_language],
        "encoding": {name: recipe[name] for name in ("normalisation", "max_length", "languages")},
        "on_bad_rows": on_bad_rows,
        "table": asdict(table),
    }

    def make(folder: Path) -> None:
        bad_rows, system = BadRows(on_bad_rows), CodeSystem()
        normalisation = TextNormalisation.from_dict(recipe["normalisation"])
        reader = RowReader(columns, normalisation, system, bad_rows, None, table)
        language_index = {name: i for i, name in enumerate(recipe["languages"])}
        inputs: dict[tuple[str, int], int] = {}  # text and index of the language
        with ArrayFile(folder / "input_of_row.npy", np.int64) as input_of_row:
            for path in files:
                numbers = (
                    NO_TEXT
                    if text is None
                    else inputs.setdefault((text, language_index.get(name, 0)), len(inputs))
                    for text, name in reader.inputs(path)
                )
                input_of_row.add(np.fromiter(numbers, np.int64))
        bad_rows.settle(folder)
        if not inputs:
            why = [*bad_rows.rows[:1], *reader.notes()][0]
            raise ValueError(f"{', '.join(map(str, files))}: no row can be coded. {why}")
        texts, languages = zip(*inputs, strict=True)
        arrays = text_arrays(texts, recipe["max_length"])
        arrays["language_ids"] = np.array(languages, np.int16)
        content = sha256()
        for values in arrays.values():
            content.update(values.tobytes())
        write_arrays(
            folder,
            arrays,
            files=[str(path.resolve()) for path in files],
            fingerprint=content.hexdigest(),
            notes=reader.notes(),
            table=asdict(table),
        )

    return PredictIndex(made_once(cache_folder("predict", key), make))
