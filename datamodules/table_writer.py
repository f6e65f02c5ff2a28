"""Tables out: a csv, tsv or parquet file that is whole or not there at all."""

import csv
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from datamodules.delimited import DELIMITERS
from datamodules.sources import PARQUET_SUFFIXES, SUFFIXES, as_text


class TableWriter:
    """Writes record batches to a temporary file that takes the final name when all went well.

    Use it in a `with` block; an exception inside leaves no file and overwrites nothing.

    Args:
        path: .csv, .tsv or .parquet.
        overwrite: whether an existing file may be replaced.

    Raises:
        FileExistsError: the file exists and must not be replaced.
        ValueError: the suffix is unknown.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        check_suffix(path)
        self.path = path
        self.overwrite = overwrite
        self._check_free()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._file: IO[Any] | None = None
        self._sink: Any = None
        self._schema: pa.Schema | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends these rows; every batch has the columns of the first one."""
        with naming(self.path):
            self._write(batch)

    def _write(self, batch: pa.RecordBatch) -> None:
        if self._schema is None:
            self._open(batch.schema)
        if batch.schema.names != self._schema.names:  # type: ignore[union-attr]
            raise ValueError(
                f"{self.path}: the columns changed from {self._schema.names} "  # type: ignore[union-attr]
                f"to {batch.schema.names}; tables of one output need the same columns."
            )
        if self.path.suffix.lower() in PARQUET_SUFFIXES:
            self._sink.write_batch(batch)
        else:
            texts = [as_text(c, n) for c, n in zip(batch.columns, batch.schema.names, strict=True)]
            self._sink.writerows(zip(*(text.to_pylist() for text in texts), strict=True))

    def __enter__(self) -> "TableWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._schema is None:
                raise ValueError(f"{self.path}: no rows were written; a table needs a header.")
            with naming(self.path):
                self._close()
            if kind is None:
                self._check_free()
                os.replace(self._temporary, self.path)
        finally:
            self._temporary.unlink(missing_ok=True)

    def _open(self, schema: pa.Schema) -> None:
        self._schema = schema
        if self.path.suffix.lower() in PARQUET_SUFFIXES:
            self._file = self._temporary.open("wb")
            self._sink = pq.ParquetWriter(self._file, schema)
        else:
            self._file = self._temporary.open("w", encoding="utf-8", newline="")
            delimiter = DELIMITERS[self.path.suffix.lower()]
            self._sink = csv.writer(self._file, delimiter=delimiter, lineterminator="\n")
            self._sink.writerow(schema.names)

    def _close(self) -> None:
        if self._file is None:
            return
        try:
            if isinstance(self._sink, pq.ParquetWriter):
                self._sink.close()
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _check_free(self) -> None:
        if not self.overwrite:
            _check_free(self.path, "choose another name, or allow overwriting")


@contextmanager
def new_text_file(path: Path, way_out: str = "choose another name") -> Iterator[IO[str]]:
    """Give a file that gets its name when all went well, and that must be new.

    Args:
        path: its name.
        way_out: for the message where the name is taken.

    Raises:
        FileExistsError: the name is taken.
    """
    _check_free(path, way_out)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), open(unfinished, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _check_free(path, way_out)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _check_free(path: Path, way_out: str) -> None:
    if path.exists():
        raise FileExistsError(f"{path} exists and is not overwritten; move it, {way_out}.")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an error of the storage the name of the file, which a write to an open one lacks."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def check_suffix(path: Path) -> None:
    """Raises ValueError unless tables of this suffix can be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f'{path} ends in "{path.suffix}"; write to one of {", ".join(SUFFIXES)}.')


def table_writer(path: str | Path, overwrite: bool = False) -> TableWriter:
    """A writer for this csv, tsv or parquet file: use it as `with table_writer(path) as table`."""
    return TableWriter(Path(path), overwrite)
