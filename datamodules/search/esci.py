"""Shopping queries (ESCI): examples joined with products on locale and product id.

Source: Reddy et al., Shopping Queries Dataset (2022), https://github.com/amazon-science/esci-data.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datamodules.files.rows import BadRow, BadRows, open_parquet
from datamodules.files.splitting import PART_ALIASES
from datamodules.files.tables import Table
from datamodules.search.collection_writer import JudgementRows
from datamodules.search.layouts import named_or_found
from datamodules.search.request import CollectionFiles, EsciOptions
from datamodules.search.text_writer import TextTableWriter
from datamodules.search.texts import LineError, TextRecord, TextTable, id_hashes

EXAMPLE_COLUMNS = (
    *("query", "query_id", "product_id", "product_locale", "esci_label"),
    *("small_version", "large_version", "split"),
)
TEXT_COLUMNS = (*("product_description", "product_bullet_point", "product_brand", "product_color"),)
PRODUCT_COLUMNS = ("product_id", "product_locale", "product_title", *TEXT_COLUMNS)
ROWS_PER_BATCH = 16_384


class EsciReader:
    """Reads examples and products; the documents are the products that an example names.

    Args:
        folder: with the files.
        files: documents are the products, queries the examples, where they have other names.
        options: locale, version and gains.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: judgements are named; they stand in the examples.
    """

    def __init__(self, folder: str | None, files: CollectionFiles, options: EsciOptions) -> None:
        if files.judgements():
            raise ValueError(
                "data.collection.files.train, .validation and .test are none of esci's; its "
                "examples have a column split. Leave them out."
            )
        place = Path(folder).expanduser() if folder else None
        self.products = named_or_found(place, files.documents, "documents", ("*products*.parquet",))
        self.examples = named_or_found(place, files.queries, "queries", ("*examples*.parquet",))
        self.options = options

    def files(self) -> dict[str, list[Path]]:
        return {"documents": self.products, "queries": self.examples}

    def index_documents(self, table: TextTableWriter) -> None:
        judged = self._judged()
        for path, row, batch in _batches(self.products, PRODUCT_COLUMNS):
            ids = self._ids(batch)
            high, _ = id_hashes(ids)
            place = np.minimum(np.searchsorted(judged, high), len(judged) - 1)
            is_judged = judged[place] == high
            if self.options.locale is not None:  # one product id may stand in several locales
                is_judged &= np.array(_texts(batch, "product_locale")) == self.options.locale
            titles = _texts(batch, "product_title")
            texts = list(zip(*(_texts(batch, name) for name in TEXT_COLUMNS), strict=True))
            for i in np.flatnonzero(is_judged).tolist():
                text = "\n".join(filter(None, texts[i]))
                table.add_record(TextRecord(ids[i], titles[i], text), path, row + i)

    def index_queries(self, table: TextTableWriter) -> None:
        known: dict[int, int] = {}  # hash of the id -> of the text
        for path, rows, batch in self._chosen():
            ids = _texts(batch, "query_id")
            texts = _texts(batch, "query")
            high, _ = id_hashes(ids)
            for i, key in enumerate(high.tolist()):
                record = TextRecord(ids[i], "", texts[i])
                if key not in known:
                    known[key] = record.content_hash
                    table.add_record(record, path, int(rows[i]))
                elif known[key] != record.content_hash:
                    rule = f"query {ids[i]} has another text in an earlier row; keep one of them."
                    table.refuse(str(path), int(rows[i]), LineError(texts[i], rule))

    def judgements(self, bad_rows: BadRows) -> Iterator[JudgementRows]:
        gains = self.options.gains
        for path, rows, batch in self._chosen():
            columns = [_texts(batch, "query_id"), self._ids(batch)]
            labels, splits = _texts(batch, "esci_label"), _texts(batch, "split")
            by_part: dict[int, list[int]] = {}
            for i, (label, split) in enumerate(zip(labels, splits, strict=True)):
                rule = _rule_broken(label, split, gains)
                if rule is None:
                    by_part.setdefault(PART_ALIASES[split], []).append(i)
                else:
                    bad_rows.add(BadRow(str(path), int(rows[i]), *rule))
            for part, chosen in by_part.items():
                queries, documents = ([values[i] for i in chosen] for values in columns)
                grades = [gains[labels[i]] for i in chosen]
                yield JudgementRows(
                    part, str(path), rows[chosen].tolist(), queries, documents, grades
                )

    def write_triples(
        self, path: Path, queries: TextTable, documents: TextTable, bad_rows: BadRows
    ) -> int:
        return 0

    def _chosen(self) -> Iterator[tuple[Path, np.ndarray, pa.RecordBatch]]:
        """Yield the examples of the locale and version, with their rows from 1."""
        for path, row, batch in _batches(self.examples, EXAMPLE_COLUMNS):
            flag = batch.column(f"{self.options.version}_version").cast(pa.int64())
            is_chosen = pc.fill_null(pc.equal(flag, 1), False).to_numpy(zero_copy_only=False)
            if self.options.locale is not None:
                is_chosen &= np.array(_texts(batch, "product_locale")) == self.options.locale
            places = np.flatnonzero(is_chosen)
            if len(places):
                yield path, row + places, batch.take(pa.array(places))

    def _judged(self) -> np.ndarray:
        """Return the sorted hashes of all products that a chosen example names."""
        found = [id_hashes(self._ids(batch))[0] for _, _, batch in self._chosen()]
        if not found:
            locales = sorted(
                {
                    str(locale)
                    for _, _, batch in _batches(self.examples, EXAMPLE_COLUMNS)
                    for locale in batch.column("product_locale").unique().to_pylist()
                }
            )
            raise ValueError(
                f'{self.examples[0]} has no example of locale "{self.options.locale}" in the '
                f"{self.options.version} version; its locales are: {', '.join(locales)}. Choose "
                "another with data.collection.esci.locale or data.collection.esci.version."
            )
        return np.unique(np.concatenate(found))

    def _ids(self, batch: pa.RecordBatch) -> list[str]:
        """Return the ids of the products, with their locale where there are several."""
        ids = _texts(batch, "product_id")
        if self.options.locale is not None:
            return ids
        locales = _texts(batch, "product_locale")
        return [f"{locale}/{id}" for locale, id in zip(locales, ids, strict=True)]


def _batches(
    paths: list[Path], columns: tuple[str, ...]
) -> Iterator[tuple[Path, int, pa.RecordBatch]]:
    """Yield batches of these columns with the number of their first row, from 1."""
    for path in paths:
        with open_parquet(path) as file:
            Table(path).check(columns, "esci")
            row = 1
            for batch in file.iter_batches(ROWS_PER_BATCH, columns=list(columns)):
                yield path, row, batch
                row += batch.num_rows


def _texts(batch: pa.RecordBatch, column: str) -> list[str]:
    values: list[Any] = batch.column(column).to_pylist()
    return ["" if value is None else str(value) for value in values]


def _rule_broken(label: str, split: str, gains: dict[str, float]) -> tuple[str, str, str] | None:
    """Return value, rule and kind of a bad row; none where it is sound."""
    if label not in gains:
        return label, f"esci_label must be one of {', '.join(gains)}.", "label"
    if split not in PART_ALIASES:
        return split, "split must be train or test.", "split"
    return None
