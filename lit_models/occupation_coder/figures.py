"""Figures of a validation or test: reliability, coverage, and the most confused codes."""

from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from datamodules.tokenizers.codes import CodeBook
from lit_models.occupation_coder.metrics import CalibrationBins, ConfusedPairs

NUM_PAIRS = 20
_DESCRIPTION_LENGTH = 40
_SIDE, _MARGIN = 400, 40  # pixels


class OccupationFigures(Callback):
    """Draws to TensorBoard after each validation and test of a LitOccupationCoder.

    Without a TensorBoard logger nothing is drawn.

    Args:
        num_pairs: rows of the table of confused codes.
    """

    def __init__(self, num_pairs: int = NUM_PAIRS) -> None:
        if num_pairs < 1:
            raise ValueError(f"num_pairs must be 1 or more, got {num_pairs}: raise it.")
        self.num_pairs = num_pairs

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(trainer, pl_module, "test")

    def _draw(self, trainer: Trainer, coder: Any, split: str) -> None:
        confused: ConfusedPairs = getattr(coder, f"{split}_confused")
        pairs = confused.compute()  # on every rank, since it gathers
        bins: CalibrationBins = getattr(coder, f"{split}_metrics")["calibration_error"]
        with bins.sync_context(should_sync=trainer.world_size > 1):
            reliability, coverage = bins.reliability(), bins.coverage()
        boards = [x for x in trainer.loggers if isinstance(x, TensorBoardLogger)]
        if trainer.sanity_checking or not trainer.is_global_zero or not boards:
            return
        book = CodeBook.from_dict(coder.recipe["code_book"])
        figures = {
            "reliability": reliability_figure(*reliability),
            "coverage": coverage_figure(*coverage),
        }
        for board in boards:
            for name, figure in figures.items():
                board.experiment.add_image(
                    f"{split}/{name}", figure, trainer.global_step, dataformats="HWC"
                )
            text = confused_table(pairs[: self.num_pairs], book)
            board.experiment.add_text(f"{split}/confused_codes", text, trainer.global_step)


def reliability_figure(
    confidence: torch.Tensor, accuracy: torch.Tensor, count: torch.Tensor
) -> np.ndarray:
    """Accuracy of the sets over their confidence; bars show the share of the records.

    Args:
        confidence: mean of each bin [G], 0 to 1.
        accuracy: exactly right sets of each bin [G], 0 to 1.
        count: records of each bin [G].
    """
    chart = Chart("confidence of the set", "exactly right (bars: share of records)")
    share = count / count.sum().clamp(min=1)
    for index, height in enumerate(share.tolist()):
        chart.bar(index / len(share), (index + 1) / len(share), height)
    chart.line([(0.0, 0.0), (1.0, 1.0)], "grey")
    points = zip(confidence.tolist(), accuracy.tolist(), count.tolist(), strict=True)
    chart.line([(x, y) for x, y, number in points if number > 0], "navy", marks=True)
    return chart.pixels()


def coverage_figure(coverage: torch.Tensor, accuracy: torch.Tensor) -> np.ndarray:
    """Accuracy of the most confident records over their share of all, both [G]."""
    chart = Chart("share of records coded, the surest first", "exactly right")
    points = zip(coverage.tolist(), accuracy.tolist(), strict=True)
    chart.line([(x, y) for x, y in points if x > 0], "navy")
    return chart.pixels()


class Chart:
    """A plot of two shares, 0 to 1 each, drawn with Pillow, which TensorBoard brings along."""

    def __init__(self, x_label: str, y_label: str) -> None:
        from PIL import Image, ImageDraw

        self.image = Image.new("RGB", (_SIDE + 2 * _MARGIN, _SIDE + 2 * _MARGIN), "white")
        self.draw = ImageDraw.Draw(self.image)
        for tick in range(11):
            place = tick / 10
            self.line([(place, 0.0), (place, 1.0)], "gainsboro", width=1)
            self.line([(0.0, place), (1.0, place)], "gainsboro", width=1)
            x, y = self._at(place, place)
            self.draw.text((x - 8, _MARGIN + _SIDE + 6), f"{place:.1f}", fill="black")
            self.draw.text((_MARGIN - 26, y - 6), f"{place:.1f}", fill="black")
        self.draw.text((_MARGIN, _MARGIN + _SIDE + 20), x_label, fill="black")
        self.draw.text((_MARGIN, _MARGIN - 20), y_label, fill="black")

    def line(
        self, points: list[tuple[float, float]], colour: str, width: int = 2, marks: bool = False
    ) -> None:
        """Connects points of shares."""
        places = [self._at(x, y) for x, y in points]
        if len(places) > 1:
            self.draw.line(places, fill=colour, width=width)
        for x, y in places if marks else []:
            self.draw.ellipse((x - 3, y - 3, x + 3, y + 3), fill=colour)

    def bar(self, left: float, right: float, height: float) -> None:
        """A bar from the axis."""
        (x_left, y_top), (x_right, y_bottom) = self._at(left, height), self._at(right, 0.0)
        self.draw.rectangle((x_left + 2, y_top, x_right - 2, y_bottom), fill="lightsteelblue")

    def pixels(self) -> np.ndarray:
        """The picture [height, width, 3] uint8."""
        return np.asarray(self.image)

    @staticmethod
    def _at(x: float, y: float) -> tuple[float, float]:
        return _MARGIN + x * _SIDE, _MARGIN + (1 - y) * _SIDE


def confused_table(pairs: torch.Tensor, book: CodeBook) -> str:
    """Markdown table of true code, given code and how often. Args: pairs [N, 3]."""
    rows = ["| count | true | given |", "|---|---|---|"]
    for true, given, count in pairs.tolist():
        rows.append(f"| {count} | {_named(book, true)} | {_named(book, given)} |")
    return "\n".join(rows)


def _named(book: CodeBook, code_id: int) -> str:
    description = book.descriptions[code_id].replace("|", "/")[:_DESCRIPTION_LENGTH]
    return f"{book.codes[code_id]} {description}".strip()
