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
        if self.kind == "multilabel" and self.classes is None:
            raise ValueError("a multilabel head needs the names of its classes.")
        if self.classes is None:
            return
        if self.kind == "regression":
            raise ValueError(f"classes {self.classes} have no effect on a regression head.")
        if len(set(self.classes)) != len(self.classes) or len(self.classes) < 2:
            raise ValueError(f"classes must be two or more different names, got {self.classes}.")
        if self.kind == "binary" and len(self.classes) != 2:
            raise ValueError(f"a binary head has two classes, got {self.classes}.")


class LabelReader:
    """Reads the cells of one head."""

    def __init__(self, name: str, options: LabelOptions) -> None:
        self.name, self.options = name, options
        self.column = options.column or name
        self.width = len(options.classes or ()) if options.kind == "multilabel" else 1
        self.is_open = options.classes is None and options.kind in ("ordinal", "multiclass")
        self._ids = {c: float(i) for i, c in enumerate(options.classes or [])}
        # A trained head names 0 and 1 itself.
        self.is_switch = options.kind == "binary" and options.classes in (None, ["0", "1"])
        are_whole = all(name.lstrip("-").isdecimal() for name in self._ids)
        self.has_numbers = options.kind == "ordinal" and are_whole
        if self.is_switch:
            self._ids = {**dict.fromkeys(NO, 0.0), **dict.fromkeys(YES, 1.0)}

    def parse(self, cell: str) -> list[float]:
        """Return the numbers of one cell, NaN where the label is missing.

        Raises:
            LabelError: the cell breaks a rule.
        """
        kind, cell = self.options.kind, cell.strip()
        if cell.lower() in MISSING and cell not in self._ids:
            return [math.nan] * self.width
        if kind == "multilabel":
            parts = [part.strip() for part in cell.split(self.options.separator) if part.strip()]
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
        if kind == "binary":
            return values, list(self.options.classes or ["0", "1"])
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
    numbers = labels[~np.isnan(labels)].tolist()
    if facts["kind"] == "multilabel":
        numbers = [number for number, value in enumerate(labels) if value > 0]
    if facts["kind"] in ("ordinal", "multiclass", "multilabel"):
        return " ".join(str(facts["classes"][int(number)]) for number in numbers)
    return " ".join(f"{number:g}" for number in numbers)


def scores_of(name: str, facts: dict[str, Any], values: np.ndarray) -> dict[str, list[Any]]:
    """Return the columns of one head: the number, level, class or probability, and what is sure.

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
