"""Files of MS MARCO's passages and of Amazon's shopping queries (ESCI), as their authors give them.

Sources: Bajaj et al. 2016, "MS MARCO"; Reddy et al. 2022, "Shopping Queries Dataset".
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datamodules.files.rows import BadRow, BadRows
from datamodules.files.splitting import PART_ALIASES
from datamodules.files.tables import value_rows
from datamodules.search.formats import (
    BeirReader,
    CollectionFiles,
    JudgementRow,
    TextRecord,
    TextRow,
)

PASSAGES = "collection.tsv"
PRODUCTS, EXAMPLES = (f"shopping_queries_dataset_{n}.parquet" for n in ("products", "examples"))
GAINS = {"E": 1.0, "S": 0.1, "C": 0.01, "I": 0.0}  # exact, substitute, complement, irrelevant
PRODUCT_TEXT = ("product_brand", "product_color", "product_bullet_point", "product_description")


class MsMarcoReader(BeirReader):
    """Reader of `collection.tsv`, `queries*.tsv` (id, text) and `qrels*.tsv` of a folder.

    Arguments and errors as of `BeirReader`.
    """

    patterns = {"documents": PASSAGES, "queries": "queries*.tsv", "judgements": "qrels*.tsv"}

    def rows(self, role: str, bad_rows: BadRows) -> Iterator[TextRow]:
        """Yield every row of `documents` or `queries` that has an id and a text."""
        for path in self.texts[role]:
            with path.open(encoding="utf-8-sig", errors="replace") as file:
                for line, text in enumerate(file, start=1):
                    id, tab, own = text.rstrip("\r\n").partition("\t")
                    if tab and id.strip():
                        yield TextRow(TextRecord(id.strip(), "", own.strip()), path, line)
                    elif text.strip():
                        rule = "a row is an id and a text with a tab between them; correct it."
                        bad_rows.add(BadRow(str(path), line, text.strip(), rule))


class EsciReader:
    """Reader of the two parquet files; a product's id is its locale and number, its text brand,
    color, points and description. Grades are the gains of the dataset's own ranking task.

    Raises:
        FileNotFoundError: the examples are not there.
        ValueError: other files are named.
    """

    def __init__(self, folder: Path, named: CollectionFiles) -> None:
        if named != CollectionFiles():
            raise ValueError("a folder of ESCI is read without data.collection.files; leave them.")
        self.products, self.examples = folder / PRODUCTS, folder / EXAMPLES
        if not self.examples.is_file():
            raise FileNotFoundError(f"{folder} has {PRODUCTS} and no {EXAMPLES}.")

    def files(self) -> dict[str, list[Path]]:
        """Return all files by their role."""
        return {"documents": [self.products], "queries": [self.examples]}

    def rows(self, role: str, bad_rows: BadRows) -> Iterator[TextRow]:
        """Yield every product, or every query where it comes first."""
        known: set[str] = set()
        for line, row in value_rows(self.products if role == "documents" else self.examples):
            if role == "documents":
                text = "\n".join(row[name] for name in PRODUCT_TEXT if row.get(name))
                record = TextRecord(_product(row), row["product_title"] or "", text)
                yield TextRow(record, self.products, line)
            elif (id := str(row["query_id"])) not in known:
                known.add(id)
                yield TextRow(TextRecord(id, "", row["query"] or ""), self.examples, line)

    def judgements(self, bad_rows: BadRows) -> Iterator[JudgementRow]:
        """Yield every example of a known split."""
        for line, row in value_rows(self.examples):
            label, part = row["esci_label"], PART_ALIASES.get(row["split"])
            place = (str(self.examples), line)
            if part is None:
                rule = "its split is none of train and test; correct it."
                bad_rows.add(BadRow(*place, str(row["split"]), rule))
            else:
                values = (str(row["query_id"]), _product(row), GAINS.get(label, label))
                yield JudgementRow(part, *place, *values)


def _product(row: dict[str, Any]) -> str:
    return f"{row['product_locale']}-{row['product_id']}"
