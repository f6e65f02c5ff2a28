"""Table of the wrong or worst samples of an evaluation.

Shapes: B samples, A numbers of all answers, K samples that are kept.
"""

import csv
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_models.training.callbacks.board_samples import boards
from lit_models.training.exact import ExactModule
from lit_models.training.ledger import is_distributed
from lit_models.training.metrics import SampleResult

MOST_BATCHES = 64  # kept before they are looked at: a step does no more than keep what it said
MOST_ON_BOARD = 12  # rows in TensorBoard, and of a validation's table
# Losses are rounded to 1 part in so many: batches of other sizes compute them with other last
# digits. Two that lie on both sides of an edge of this grid still differ, by a whole step of it.
PARTS = 4096.0
MOST_CHARACTERS = 2000  # of a text
MOST_ON_BOARD_CHARACTERS = 200
# What families call the three things that a reader looks for.
COLUMNS = {
    **dict.fromkeys(("text", "query"), "input"),
    **dict.fromkeys(("codes", "candidates", "trained on", "goes on"), "truth"),
    **dict.fromkeys(("given", "first relevant", "written", "explanation"), "answer"),
}
LAST = ("confidence", "seen in training", "sample", "loss")
HEADS = 4  # columns before the answers: loss, sample id, confidence, seen
NOBODY = -torch.inf


class ErrorTable(Callback):
    """Writes `errors-test.csv` after a test, `errors-val.csv` after each validation.

    A row is a sample: what data and model say of it (input, truth, answer), the model's confidence
    and whether the text was in the training data where a family knows them, its number in the split
    and its loss; the largest loss first. Where a family says which answers are wrong, these alone
    are listed. The first rows stand in TensorBoard too. Tables are nearly always the same on any
    number of devices, see `PARTS`. A module whose evaluation steps return no `SampleResult` has no
    such file.

    Args:
        most: rows of a test's table; 0 writes nothing. A validation's has at most 12.

    Raises:
        ValueError: a negative number.
    """

    def __init__(self, most: int = 1000) -> None:
        if most < 0:
            raise ValueError(f"most must be 0 or more, got {most}; 0 writes no table of errors.")
        self.most = most
        self._number = 0  # of rows of this evaluation
        self._batches: list[tuple[SampleResult, Tensor, Tensor]] = []
        self._worst: Tensor | None = None  # [K, 4 + A] of `worst_of`
        self._sizes: dict[str, int] = {}  # of each answer

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches, self._worst, self._number = [], None, min(self.most, MOST_ON_BOARD)

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches, self._worst, self._number = [], None, self.most

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._number and isinstance(outputs, SampleResult) and not trainer.sanity_checking:
            self._batches.append((outputs, batch["sample_id"], batch["weight"]))
            if len(self._batches) == MOST_BATCHES:
                self._sift()

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module, "val", "validation")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer, pl_module, "test", "test")

    def _sift(self) -> None:
        """Leave the worst of what was kept, on the device where it is."""
        answers = self._batches[0][0].answers
        self._sizes = {name: values[0].numel() for name, values in answers.items()}
        found = [rows_of(*kept) for kept in self._batches]
        found += [] if self._worst is None else [self._worst]
        self._worst, self._batches = worst_of(torch.cat(found), self._number), []

    def _finish(self, trainer: Trainer, module: LightningModule, split: str, stage: str) -> None:
        if self._batches:
            self._sift()
        if self._worst is None:
            return  # on all ranks: each has as many batches
        rows, self._worst = self._worst, None
        if is_distributed():
            gathered = module.all_gather(rows).flatten(0, 1)  # type: ignore[union-attr]
            rows = worst_of(gathered, self._number * trainer.world_size)
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        assert isinstance(module, ExactModule)
        dataset = trainer.datamodule.datasets[stage]  # type: ignore[attr-defined]
        samples = []
        for loss, number, confidence, seen, *values in distinct(rows, self._number):
            said = {n: [values.pop(0) for _ in range(size)] for n, size in self._sizes.items()}
            texts = {**dataset.describe(int(number), 0), **module.in_words(said)}
            sure = "" if math.isnan(confidence) else f"{confidence:.3g}"
            known = (sure, {1.0: "yes", 0.0: "no"}.get(seen, ""))
            samples.append((texts, (*known, str(int(number)), f"{loss:.3g}")))
        table = as_table(samples)
        path = Path(trainer.default_root_dir) / f"errors-{split}.csv"
        write_table(path, table)
        text = as_markdown(table[: MOST_ON_BOARD + 1])
        for board in boards(trainer):
            board.experiment.add_text(f"{split}/errors", text, trainer.global_step)
        if split == "test":
            print(f"errors: {path} ({len(table) - 1} samples, the largest loss first)")


def rows_of(result: SampleResult, sample_id: Tensor, weight: Tensor) -> Tensor:
    """Return [B, 4 + A] float64: loss, rounded to 1 part in PARTS, sample id, confidence, seen,
    answers; NaN where a family does not know. A filler, of weight 0, and an answer that is right
    have minus infinity as loss and as id."""
    is_nobody = weight == 0
    if result.is_wrong is not None:
        is_nobody = is_nobody | ~result.is_wrong
    mantissa, exponent = torch.frexp(result.loss.detach().double())
    loss = torch.ldexp((mantissa * PARTS).round() / PARTS, exponent)
    unknown = torch.full_like(loss, torch.nan)
    heads = [values.masked_fill(is_nobody, NOBODY) for values in (loss, sample_id.double())]
    for values in (result.confidence, result.is_seen):
        heads.append(unknown if values is None else values.detach().double())
    answers = [v.detach().double().reshape(len(v), -1) for v in result.answers.values()]
    return torch.cat([torch.stack(heads, dim=1), *answers], dim=1)


def worst_of(rows: Tensor, number: int) -> Tensor:
    """Return [K, 4 + A]: the rows with the largest losses, those that are no number first, of equal
    ones those with the smaller sample ids; filled up with minus infinity.

    Args:
        rows: [B, 4 + A] of `rows_of`.
        number: K.
    """
    rows = rows[rows[:, 1].argsort(stable=True)]
    rows = rows[rows[:, 0].argsort(descending=True, stable=True)][:number]
    return F.pad(rows, (0, 0, 0, number - len(rows)), value=NOBODY)


def distinct(rows: Tensor, number: int) -> list[list[float]]:
    """Return the first rows of so many samples, without fillers: ranks that share a replica have
    each seen the same."""
    found: dict[float, list[float]] = {}
    for row in rows.tolist():
        if row[1] >= 0:
            found.setdefault(row[1], row)
    return list(found.values())[:number]


def as_table(samples: Sequence[tuple[dict[str, str], tuple[str, ...]]]) -> list[list[str]]:
    """Return the head and the rows of a table: texts, then `LAST` without what nobody knows; what
    not all samples have is in one column, each text after its name.

    Args:
        samples: texts of a sample, name -> text, and its values of `LAST`.
    """
    first = samples[0][0] if samples else {}
    names = [name for name in first if all(name in texts for texts, _ in samples)]
    rows = []
    for texts, last in samples:
        more = "; ".join(f"{n}: {text}" for n, text in texts.items() if n not in names)
        words = [*(texts[name] for name in names), more]
        rows.append([*(_shortened(word, MOST_CHARACTERS) for word in words), *last])
    heads = [*(COLUMNS.get(name, name) for name in names), "more", *LAST]
    always = {*range(len(names)), heads.index("sample"), heads.index("loss")}
    kept = [i for i in range(len(heads)) if i in always or any(row[i] for row in rows)]
    return [[row[i] for i in kept] for row in (heads, *rows)]


def as_markdown(table: list[list[str]]) -> str:
    """Return a table as Markdown; cells are shortened."""

    def cell(text: str) -> str:
        return _shortened(" ".join(text.replace("|", "/").split()), MOST_ON_BOARD_CHARACTERS)

    cells = [[cell(text) for text in row] for row in table]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([lines[0], "|---" * len(table[0]) + "|", *lines[1:]])


def write_table(path: Path, table: list[list[str]]) -> None:
    """Write a csv, replacing the file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(table)
    os.replace(temporary, path)


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
