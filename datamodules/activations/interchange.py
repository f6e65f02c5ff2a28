"""Parquet files of activations, with sidecars that describe their origin.

FILE.parquet has a column `activation_vector`, lists of float32. FILE.parquet.nla_meta.yaml has
`kind: nla_dataset` and, in `extraction`, width and layer, the format of natural-language
autoencoders (github.com/kitft/natural_language_autoencoders, nla/schema.py); `unisono` adds more.
Shapes: n rows, D features.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from datamodules.core.store import write_whole
from datamodules.files.rows import open_parquet
from datamodules.files.tables import write_batches

COLUMN, KIND = "activation_vector", "nla_dataset"
SUFFIX = ".nla_meta.yaml"
ROWS = 2048  # in memory at a time


def write_vectors(
    path: Path, facts: Mapping[str, Any], pieces: Iterable[dict[str, Any]], way_out: str
) -> None:
    """Write a new parquet file, atomically, and its sidecar.

    Args:
        path: .parquet; it must not exist.
        facts: d_model, layer_index and other values of `extraction`; `unisono`, plain values.
        pieces: columns of successive rows, with `activation_vector` [n, D] float32; one piece is in
            memory at a time.
        way_out: advice in the error if the file exists.
    """

    def batches() -> Iterator[pa.RecordBatch]:
        for columns in pieces:
            vectors = np.ascontiguousarray(columns[COLUMN], np.float32)
            ends = np.arange(len(vectors) + 1, dtype=np.int32) * vectors.shape[1]
            lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(vectors.ravel()))
            yield pa.RecordBatch.from_pydict({**columns, COLUMN: lists})

    write_batches(path, batches(), way_out)
    extraction = {name: value for name, value in facts.items() if name != "unisono"}
    meta = {"kind": KIND, "extraction": extraction, "unisono": facts.get("unisono", {})}
    write_whole(Path(f"{path}{SUFFIX}"), yaml.safe_dump(meta, sort_keys=False))


@dataclass(frozen=True)
class VectorFile:
    """A parquet file of activations, read `ROWS` rows at a time."""

    path: Path  # the parquet file
    width: int  # D
    layer: int | None  # index of the block, from 0; `None` if the sidecar names none
    subject: str | None  # digest of the model, in files written by this module

    @classmethod
    def open(cls, path: str | Path) -> "VectorFile":
        """Open the file at a path.

        Raises:
            FileNotFoundError: the file or its sidecar is missing.
            ValueError: one of the two has another format.
        """
        path = Path(path).expanduser()
        sidecar = Path(f"{path}{SUFFIX}")
        for one in (path, sidecar):
            if not one.is_file():
                raise FileNotFoundError(
                    f"{one} is not there; activations are a parquet file, and beside it its name "
                    f"with {SUFFIX}, which says of what model and layer they are."
                )
        try:
            meta = yaml.safe_load(sidecar.read_text("utf-8"))
            kind, extraction = meta["kind"], meta["extraction"]
            width = int(extraction["d_model"])
        except (TypeError, KeyError, ValueError, yaml.YAMLError) as error:
            raise ValueError(
                f"{sidecar} must have kind, and extraction with d_model ({error!r} is wrong); copy "
                "it again from where the activations are of."
            ) from error
        with open_parquet(path) as file:
            fields = {field.name: pa.types.is_nested(field.type) for field in file.schema_arrow}
        if kind != KIND or not fields.get(COLUMN):
            raise ValueError(
                f"{path} holds no activations: kind is {kind}, its columns are "
                f"{', '.join(fields)}; it needs kind {KIND} and {COLUMN}, lists of numbers."
            )
        layer = extraction.get("layer_index", meta.get("extraction_layer_index"))
        return cls(path, width, layer, (meta.get("unisono") or {}).get("subject"))

    def pieces(self) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
        """Yield rows and their activations [n, D] float32; ValueError names a row of another width
        or with a value that is not finite."""
        first = 0
        with pq.ParquetFile(self.path) as file:
            for rows in file.iter_batches(batch_size=ROWS):
                column = rows.column(COLUMN)
                sizes = np.array(column.value_lengths().fill_null(0))
                vectors = np.array(column.flatten(), np.float32)
                bad = np.flatnonzero(sizes != self.width)
                if not len(bad):
                    vectors = vectors.reshape(-1, self.width)
                    bad = np.flatnonzero(~np.isfinite(vectors).all(1))
                if len(bad):
                    raise ValueError(
                        f"{self.path}, row {first + int(bad[0]) + 1}: {COLUMN} must hold "
                        f"{self.width} finite numbers; write the file again without that row."
                    )
                first += len(rows)
                yield rows, vectors
