"""A folder of encoded texts: matrices that are memory-mapped, ids, and a run of the queries."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.core.store import sync
from datamodules.files.tables import naming

NumberType = Literal["float32", "float16"]
ROWS_AT_ONCE = 65_536
TEXTS = ("documents", "queries")
RUN_FILE = "run.trec"


class EncodedCollection:
    """What a prediction of a retriever wrote.

    Attributes:
        documents: [D, W] memory-mapped, unit vectors.
        queries: [Q, W] memory-mapped.
        document_ids, query_ids: as in the collection.

    Args:
        folder: of the prediction.

    Raises:
        FileNotFoundError: it holds no encoded texts.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / "facts.json").is_file():
            raise FileNotFoundError(
                f"{folder} holds no encoded texts; make it with unisono predict of a retriever."
            )
        self.folder = folder
        self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text("utf-8"))
        self.documents, self.queries = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in TEXTS
        )

    @property
    def document_ids(self) -> list[str]:
        """One id per row of `documents`."""
        return list(read_ids(self.folder / "documents.ids.jsonl"))

    @property
    def query_ids(self) -> list[str]:
        """One id per row of `queries`."""
        return list(read_ids(self.folder / "queries.ids.jsonl"))


def write_encoded(
    folder: Path,
    vectors: dict[str, np.ndarray],
    ids: dict[str, Iterable[str]],
    number_type: NumberType,
    facts: dict[str, Any],
    finish: Callable[[EncodedCollection], None],
) -> None:
    """Write encoded texts, whole or not at all.

    Args:
        folder: which must not be there yet.
        vectors: `documents` and `queries`, [n, W]; larger than memory where they are mapped.
        ids: of each row.
        number_type: of the matrices.
        facts: what else a reader should know.
        finish: called with the unfinished folder, to which it may add files.

    Raises:
        FileExistsError: the folder is there.
    """
    with _whole_folder(folder) as unfinished:
        for name in TEXTS:
            with naming(folder):
                _write_matrix(unfinished / f"{name}.npy", vectors[name], number_type)
                _write_ids(unfinished / f"{name}.ids.jsonl", ids[name])
        (unfinished / "facts.json").write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
        finish(EncodedCollection(unfinished))


@contextmanager
def _whole_folder(folder: Path) -> Iterator[Path]:
    """Give an unfinished folder, which takes its name when all in it is on the disk."""
    if folder.exists():
        raise FileExistsError(f"{folder} exists and is not overwritten; move it away.")
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with naming(folder):
        unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for path in unfinished.iterdir():
            sync(path)
        sync(unfinished)
        os.rename(unfinished, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def read_ids(path: Path) -> Iterator[str]:
    """Yield the ids of a file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _write_matrix(path: Path, values: np.ndarray, number_type: NumberType) -> None:
    header = {"descr": np.dtype(number_type).str, "fortran_order": False, "shape": values.shape}
    with path.open("wb") as file:  # not mapped: a full disk is then an error, not a signal
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(values), ROWS_AT_ONCE):
            file.write(np.asarray(values[start : start + ROWS_AT_ONCE], number_type).tobytes())


def _write_ids(path: Path, ids: Iterable[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(id) + "\n" for id in ids)
