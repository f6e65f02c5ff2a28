"""What an evaluation step says of each of its samples, and the worst of them.

Shapes: B samples, n numbers of an answer, A numbers of all answers, K samples that are kept.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# Losses are rounded to 1 part in so many: batches of other sizes compute them with other last
# digits. Two that lie on both sides of an edge of this grid still differ, by a whole step of it.
PARTS = 4096.0
MOST_CHARACTERS = 300  # of a text in a table


class Judged(NamedTuple):
    """What `validation_step` and `test_step` return, and callbacks are given.

    Attributes:
        loss: [B], of each sample by itself; the larger, the worse.
        answers: name -> what the model said, [B] or [B, n] numbers, of the same n in every batch;
            `ExactModule.in_words` makes text of them.
    """

    loss: Tensor
    answers: dict[str, Tensor]


class Told(NamedTuple):
    """One sample in words: name -> text, its number in the split, its loss as `rows_of` has it."""

    texts: dict[str, str]
    sample_id: int
    loss: float


def joined(judged: Sequence[Judged]) -> Judged:
    """Return what was said of the samples of several batches as of one."""
    answers = {n: torch.cat([one.answers[n] for one in judged]) for n in judged[0].answers}
    return Judged(torch.cat([one.loss for one in judged]), answers)


def rows_of(judged: Judged, sample_id: Tensor, weight: Tensor) -> Tensor:
    """Return [B, 2 + A] float64: loss, rounded to 1 part in PARTS, sample id, answers; a filler, of
    weight 0, has minus infinity in place of both."""
    is_filler = weight == 0
    mantissa, exponent = torch.frexp(judged.loss.detach().double())
    loss = torch.ldexp((mantissa * PARTS).round() / PARTS, exponent)
    heads = [loss, sample_id.double()]
    columns = [values.masked_fill(is_filler, -torch.inf)[:, None] for values in heads]
    answers = [v.detach().double().reshape(len(v), -1) for v in judged.answers.values()]
    return torch.cat([*columns, *answers], dim=1)


def worst_of(rows: Tensor, number: int) -> Tensor:
    """Return [K, 2 + A]: the rows with the largest losses, those that are no number first, of equal
    ones those with the smaller sample ids; filled up with minus infinity.

    Args:
        rows: [B, 2 + A] of `rows_of`.
        number: K.
    """
    rows = rows[rows[:, 1].argsort(stable=True)]
    rows = rows[rows[:, 0].argsort(descending=True, stable=True)][:number]
    return F.pad(rows, (0, 0, 0, number - len(rows)), value=-torch.inf)


def distinct(rows: Tensor, number: int) -> list[list[float]]:
    """Return the first rows of so many samples, without fillers: ranks that share a replica have
    each seen the same."""
    found: dict[float, list[float]] = {}
    for row in rows.tolist():
        if row[1] >= 0:
            found.setdefault(row[1], row)
    return list(found.values())[:number]


def as_table(samples: list[Told]) -> dict[str, Any]:
    """Return `columns` and `rows` of a table, texts first; what not all samples have is in one
    column, each text after its name."""
    names = [n for n in (samples[0].texts if samples else {}) if all(n in s.texts for s in samples)]
    rows = []
    for texts, sample_id, loss in samples:
        more = "; ".join(f"{n}: {text}" for n, text in texts.items() if n not in names)
        row = [*(texts[name] for name in names), more]
        # JSON has no number for a loss that is none
        shown = loss if abs(loss) < float("inf") else str(loss)
        rows.append([*map(_shortened, row), sample_id, shown])
    columns = [*names, "more", "sample", "loss"]
    if not any(row[len(names)] for row in rows):
        columns.remove("more")
        rows = [[*row[: len(names)], *row[len(names) + 1 :]] for row in rows]
    return {"columns": columns, "rows": rows}


def write_worst(folder: Path, split: str, content: dict[str, Any]) -> None:
    """Replace `worst-SPLIT.json` of a run folder as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"worst-{split}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"
