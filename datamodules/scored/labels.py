"""Labels of heads: cells of a table become numbers, and predictions columns of a table.

A cell that is empty (or NA, null, none) is a missing label: NaN, never 0.
"""

import logging
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from datamodules.files.rows import RowFault

log = logging.getLogger(__name__)
Kind = Literal["regression", "ordinal", "binary", "multiclass", "multilabel"]
MISSING = ("", "na", "n/a", "nan", "null", "none")
NO, YES = ("0", "false", "no"), ("1", "true", "yes")
MOST_LEVELS = 100
DIGITS = 6  # of a prediction


@dataclass(frozen=True)
class LabelOptions:
    """Kind of a head's labels, and their column.

    Args:
        kind: `regression` of a number; `ordinal` for levels with an order; `binary` for 0/1,
            true/false, yes/no; `multiclass` for one of several names; `multilabel` for several at
            once, names that `separator` cuts. (A column of 0/1 for each is a binary head each.)
        column: of the table; `None` is the name of the head.
        classes: names of the classes; those of `ordinal` in their order, the two of `binary` with
            the positive one last. `None` takes those of the data: for `ordinal` the whole numbers
            from the smallest to the largest.
        separator: between the names in one cell of a `multilabel` head. The separator alone is
            the empty set, an empty cell a missing label.

    Raises:
        ValueError: options that contradict each other.
    """

    kind: Kind
    column: str | None = None
    classes: list[str] | None = None
    separator: str | None = None

    def __post_init__(self) -> None:
        if (self.kind == "multilabel") != (self.separator is not None):
            raise ValueError(
                f"separator {self.separator!r} on a {self.kind} head: a multilabel head needs one, "
                "and no other has one."
            )
        if self.classes is None:
            if self.kind == "multilabel":
                raise ValueError("a multilabel head needs the names of its classes.")
        elif self.kind == "regression":
            raise ValueError(f"classes {self.classes} have no effect on a regression head.")
        elif len(set(self.classes)) != len(self.classes) or len(self.classes) < 2:
            raise ValueError(f"classes must be two or more different names, got {self.classes}.")
        elif self.kind == "binary" and len(self.classes) != 2:
            raise ValueError(f"a binary head has two classes, got {self.classes}.")


class LabelReader:
    """Reads the cells of one head, whose names it learns where they are not given."""

    def __init__(self, name: str, options: LabelOptions) -> None:
        self.name, self.options = name, options
        self.column = options.column or name
        self.width = len(options.classes or ()) if options.kind == "multilabel" else 1
        self.is_open = options.classes is None and options.kind in ("ordinal", "multiclass")
        self._ids = {c: float(i) for i, c in enumerate(options.classes or [])}
        are_whole = all(name.lstrip("-").isdecimal() for name in self._ids)
        self._are_numbers = options.kind == "ordinal" and are_whole
        if options.kind == "binary" and options.classes in (None, ["0", "1"]):  # as a recipe has it
            self._ids = {**dict.fromkeys(NO, 0.0), **dict.fromkeys(YES, 1.0)}
            self._are_numbers = True

    def parse(self, cell: str) -> list[float]:
        """Return the numbers of one cell, NaN where the label is missing.

        Raises:
            RowFault: the cell breaks a rule.
        """
        kind, cell = self.options.kind, cell.strip()
        if cell.lower() in MISSING and cell not in self._ids:
            return [math.nan] * self.width
        if kind == "multilabel":
            parts = [part.strip() for part in cell.split(self.options.separator) if part.strip()]
            ids = {int(self._class(part)) for part in parts}
            return [float(i in ids) for i in range(self.width)]
        if kind == "regression" or (kind == "ordinal" and self.is_open):
            value = _number(cell)
            if value is None or not math.isfinite(value):
                raise self._fault(cell, "must be a finite number, such as 3.5.")
            if kind == "ordinal" and not value.is_integer():
                raise self._fault(cell, "must be a whole number, or one of the option classes.")
            return [value]
        return [self._class(cell)]

    def finish(self, values: np.ndarray) -> tuple[np.ndarray, list[str] | None]:
        """Return the numbers of all rows with classes in their final order, and their names.

        Args:
            values: [N, width] float64, from `parse`; its classes may still be as they came.

        Raises:
            ValueError: fewer than two classes, or too many levels.
        """
        kind = self.options.kind
        if len(values) > 1 and (values == values[0]).all():
            log.warning(
                'head "%s": all %d rows have the label %s, so that it learns to answer this '
                "whatever the text; check the column, or leave the head out.",
                self.name, len(values), " ".join(f"{v:g}" for v in values[0]),
            )  # fmt: skip
        if kind == "regression":
            return values, None
        if not self.is_open:
            return values, list(self.options.classes or ["0", "1"])
        known = np.unique(values[~np.isnan(values)])
        if len(known) < 2:
            raise ValueError(
                f'head "{self.name}": its column holds {len(known)} different labels; it needs two '
                "or more, or the names of its classes in the option classes."
            )
        if kind == "multiclass":
            names = sorted(self._ids)
            new = {self._ids[name]: float(place) for place, name in enumerate(names)}
            return np.array([[new.get(v, v) for v in row] for row in values.tolist()]), names
        low, high = int(known[0]), int(known[-1])
        if high - low >= MOST_LEVELS:
            raise ValueError(
                f'head "{self.name}": levels from {low} to {high} are more than {MOST_LEVELS}; '
                "make it a regression, or name its classes."
            )
        return values - low, [str(level) for level in range(low, high + 1)]

    def _class(self, cell: str) -> float:
        key = cell
        if cell not in self._ids and self._are_numbers:  # 1.0 is 1, and True is true
            value = _number(cell)
            key = cell.lower() if value is None or value % 1 else str(int(value))
        if self.is_open:
            return self._ids.setdefault(key, float(len(self._ids)))
        if key not in self._ids:
            raise self._fault(cell, f"must be one of {', '.join(self._ids)}; or leave it empty.")
        return self._ids[key]

    def _fault(self, cell: str, rule: str) -> RowFault:
        return RowFault("label", cell, f'head "{self.name}": {rule}')


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def trained_heads(
    trained: dict[str, dict[str, Any]], given: dict[str, LabelOptions] | None
) -> dict[str, LabelOptions]:
    """Return the heads of a model; columns may be named anew, its kinds and classes stay.

    Raises:
        ValueError: the data declares a head of another kind.
    """
    heads = {}
    for name, facts in trained.items():
        names = ("kind", "column", "classes", "separator")
        own = (given or {}).get(name) or LabelOptions(*(facts[key] for key in names))
        if own.kind != facts["kind"]:
            raise ValueError(
                f"data.heads.{name} is {own.kind}, the model was trained with {facts['kind']}; "
                "take the model's."
            )
        is_free = own.classes is None and own.kind in ("ordinal", "multiclass")
        heads[name] = replace(own, classes=facts["classes"]) if is_free else own
    return heads


def label_text(facts: dict[str, Any], labels: np.ndarray) -> str:
    """Return the labels [W] of one text and head as its file has them, "" where there is none.

    Args:
        facts: `kind` and `classes` of the head.
        labels: NaN = missing; empty in prediction.
    """
    if facts["kind"] == "multilabel":
        numbers = np.flatnonzero(labels > 0).tolist()
    else:
        numbers = labels[~np.isnan(labels)].tolist()
    if facts["kind"] in ("ordinal", "multiclass", "multilabel"):
        return " ".join(str(facts["classes"][int(number)]) for number in numbers)
    return " ".join(f"{number:g}" for number in numbers)


def scores_of(name: str, facts: dict[str, Any], values: np.ndarray) -> dict[str, list[Any]]:
    """Return the columns of one head: number, level or class, and the probability it has.

    Args:
        facts: from the recipe.
        values: [n, P] of `predict_step`.
    """
    kind, classes = facts["kind"], facts["classes"]
    rounded = np.round(values.astype(np.float64), DIGITS)
    if kind == "regression":
        return {f"predicted_{name}": rounded[:, 0].tolist()}
    if kind == "binary":
        return {f"probability_{name}": rounded[:, 0].tolist()}
    if kind == "multilabel":
        columns = zip(classes, rounded.T, strict=True)
        return {f"probability_{name}_{label}": column.tolist() for label, column in columns}
    if kind == "multiclass":
        return {
            f"predicted_{name}": [classes[i] for i in values.argmax(1)],
            f"probability_{name}": rounded.max(1).tolist(),
        }
    # Levels that are whole numbers in a row keep their scale; names count from 0.
    lowest = int(classes[0]) if classes[0].lstrip("-").isdigit() else 0
    if classes != [str(lowest + i) for i in range(len(classes))]:
        lowest = 0
    expected = (values.astype(np.float64) * np.arange(len(classes))).sum(1)
    return {
        f"predicted_{name}": [classes[i] for i in np.floor(expected + 0.5).astype(int)],
        f"expected_{name}": np.round(expected + lowest, DIGITS).tolist(),
    }
