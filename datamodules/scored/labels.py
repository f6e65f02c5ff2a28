"""Labels of heads: cells of a table become numbers, and predictions columns of a table.

A cell that is empty (or NA, null, none) is a missing label: NaN, never 0.
"""

import logging
import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

log = logging.getLogger(__name__)
Kind = Literal["regression", "ordinal", "binary", "multiclass", "multilabel"]
MISSING = ("", "na", "n/a", "nan", "null", "none")
NO, YES = ("0", "false", "no"), ("1", "true", "yes")
MOST_LEVELS = 100
DIGITS = 6  # of a prediction


class LabelError(ValueError):
    """A cell that breaks a rule: its value, and the rule with the way out."""

    def __init__(self, value: str, rule: str) -> None:
        super().__init__(rule)
        self.value = value


@dataclass(frozen=True)
class LabelOptions:
    """Which column holds a head's labels, and what they are.

    Args:
        kind: `regression` of a number; `ordinal` for levels with an order; `binary` for 0/1,
            true/false, yes/no; `multiclass` for one of several names; `multilabel` for several at
            once: a column of 0/1 each, or one column of names that `separator` cuts.
        columns: of the table; `None` is the name of the head.
        classes: names of the classes; those of `ordinal` in their order, the two of `binary` with
            the positive one last. `None` takes those of the data: for `ordinal` the whole numbers
            from the smallest to the largest.
        separator: between the names in one cell of a `multilabel` head. The separator alone is
            the empty set, an empty cell a missing label.

    Raises:
        ValueError: options that contradict each other.
    """

    kind: Kind
    columns: str | list[str] | None = None
    classes: list[str] | None = None
    separator: str | None = None

    def __post_init__(self) -> None:
        several = isinstance(self.columns, list) and len(self.columns) > 1
        if several and self.kind != "multilabel":
            raise ValueError(
                f"a {self.kind} head has one column, got {self.columns}; declare a head for each."
            )
        if self.separator is not None and (self.kind != "multilabel" or several):
            raise ValueError(
                f'separator "{self.separator}" has no effect on this {self.kind} head; leave it '
                "out: only one column of a multilabel head is cut."
            )
        if self.kind == "multilabel" and not several and not (self.separator and self.classes):
            raise ValueError(
                "a multilabel head needs several columns of 0/1, or one column with a separator "
                "and the names of its classes."
            )
        if self.classes is None:
            return
        if self.kind == "regression" or several:
            raise ValueError(f"classes {self.classes} have no effect on this {self.kind} head.")
        if len(set(self.classes)) != len(self.classes) or len(self.classes) < 2:
            raise ValueError(f"classes must be two or more different names, got {self.classes}.")
        if self.kind == "binary" and len(self.classes) != 2:
            raise ValueError(f"a binary head has two classes, got {self.classes}.")

    def columns_of(self, name: str) -> list[str]:
        """Return the columns of the head of this name."""
        if self.columns is None:
            return [name]
        return [self.columns] if isinstance(self.columns, str) else list(self.columns)

    def facts(self, name: str) -> dict[str, Any]:
        """Return plain values, from which `trained_heads` makes the same options."""
        columns = self.columns_of(name)
        kept = {"classes": self.classes, "separator": self.separator}
        return {"kind": self.kind, "columns": columns, **kept}


class LabelReader:
    """Reads the cells of one head.

    Args:
        name: of the head.
        options: of its labels.
    """

    def __init__(self, name: str, options: LabelOptions) -> None:
        self.name, self.options = name, options
        self.columns = options.columns_of(name)
        self.width = len(options.classes or self.columns) if options.kind == "multilabel" else 1
        self.is_open = options.classes is None and options.kind in ("ordinal", "multiclass")
        self._ids = {c: float(i) for i, c in enumerate(options.classes or [])}
        # A trained head names 0 and 1 itself.
        self.is_switch = options.kind == "binary" and options.classes in (None, ["0", "1"])
        are_whole = all(name.lstrip("-").isdecimal() for name in self._ids)
        self.has_numbers = options.kind == "ordinal" and are_whole
        if self.is_switch:
            self._ids = {**dict.fromkeys(NO, 0.0), **dict.fromkeys(YES, 1.0)}

    def parse(self, cells: list[str]) -> list[float]:
        """Return the numbers of one row, NaN where the label is missing.

        Raises:
            LabelError: a cell breaks a rule.
        """
        kind, separator = self.options.kind, self.options.separator
        if kind == "multilabel" and separator is None:
            return [self._switch(cell.strip()) for cell in cells]
        cell = cells[0].strip()
        if cell.lower() in MISSING and cell not in self._ids:
            return [math.nan] * self.width
        if kind == "multilabel":
            parts = [part.strip() for part in cell.split(separator) if part.strip()]
            ids = {int(self._class(part)) for part in parts}
            return [float(i in ids) for i in range(self.width)]
        if kind == "regression" or (kind == "ordinal" and self.is_open):
            return [self._number(cell)]
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
        if kind in ("multilabel", "binary"):
            own = self.columns if kind == "multilabel" else ["0", "1"]
            return values, list(self.options.classes or own)
        if not self.is_open:
            return values, list(self._ids)
        known = values[~np.isnan(values)]
        if (count := np.unique(known).size) < 2:
            raise ValueError(
                f'head "{self.name}": its column holds {count} different labels; it needs two or '
                "more, or the names of its classes in the option classes."
            )
        if kind == "multiclass":
            names = sorted(self._ids)
            new = {self._ids[name]: float(names.index(name)) for name in names}
            return np.array([[new.get(v, v) for v in row] for row in values.tolist()]), names
        low, high = int(known.min()), int(known.max())
        if high - low >= MOST_LEVELS:
            raise ValueError(
                f'head "{self.name}": levels from {low} to {high} are more than {MOST_LEVELS}; '
                "make it a regression, or name its classes."
            )
        return values - low, [str(level) for level in range(low, high + 1)]

    def _number(self, cell: str) -> float:
        try:
            value = float(cell)
        except ValueError:
            value = math.inf
        if not math.isfinite(value):
            raise LabelError(cell, f'head "{self.name}": must be a finite number, such as 3.5.')
        if self.options.kind == "ordinal" and value != int(value):
            raise LabelError(
                cell, f'head "{self.name}": must be a whole number, or one of the option classes.'
            )
        return value

    def _class(self, cell: str) -> float:
        key = cell
        if cell not in self._ids and (self.is_switch or self.has_numbers):
            key = _plain(cell.lower())
        if self.is_open:
            return self._ids.setdefault(key, float(len(self._ids)))
        if key in self._ids:
            return self._ids[key]
        known = ", ".join(self._ids)
        raise LabelError(cell, f'head "{self.name}": must be one of {known}; or leave it empty.')

    def _switch(self, cell: str) -> float:
        if cell.lower() in MISSING:
            return math.nan
        key = _plain(cell.lower())
        if key in NO or key in YES:
            return float(key in YES)
        raise LabelError(cell, f'head "{self.name}": must be 0 or 1; or leave it empty.')


def _plain(cell: str) -> str:
    """Return a whole number as it is written shortest, 1.0 as 1; anything else as it is."""
    try:
        value = float(cell)
    except ValueError:
        return cell
    return str(int(value)) if value.is_integer() else cell


def trained_heads(
    trained: dict[str, dict[str, Any]], given: dict[str, LabelOptions] | None
) -> dict[str, LabelOptions]:
    """Return the heads of a model; columns may be named anew, its kinds and classes stay.

    Raises:
        ValueError: the data declares a head of another kind.
    """
    heads = {}
    for name, facts in trained.items():
        own, columns = (given or {}).get(name), list(facts["columns"])
        if own is None:
            classes = None if len(columns) > 1 else facts["classes"]
            heads[name] = LabelOptions(facts["kind"], columns, classes, facts["separator"])
            continue
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
    numbers = labels[~np.isnan(labels)].tolist()
    if facts["kind"] == "multilabel":
        pairs = zip(facts["classes"], labels.tolist(), strict=False)  # none in prediction
        return " ".join(name for name, value in pairs if value > 0)
    if facts["kind"] in ("ordinal", "multiclass"):
        return " ".join(str(facts["classes"][int(number)]) for number in numbers)
    return " ".join(f"{number:g}" for number in numbers)


def scores_of(name: str, facts: dict[str, Any], values: np.ndarray) -> dict[str, list[Any]]:
    """Return the columns of one head: the number, level, class or probability, and what is sure.

    Args:
        name: of the head.
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
