"""Some explanations beside their contexts: what they are, and a page of them after a test."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from datamodules.activations.dataset import ActivationDataset
from datamodules.activations.explanations import explanation_line
from datamodules.activations.token_texts import token_texts
from lit_models.consistency_lens.controls import CONTROLS, salient_predictions
from lit_models.consistency_lens.examples_html import page

AT_ONCE = 64  # examples in one forward call


class ExamplesPage(Callback):
    """Writes examples.html into the run folder after a test: activations evenly over the errors.

    Their number is `evaluation.num_examples` of the module.
    """

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        number = pl_module.evaluation.num_examples
        if not number:
            return
        by_error = pl_module.tested.errors.compute().tolist()  # a collective
        chosen = evenly(by_error, number)
        found = examples(trainer, pl_module, trainer.datamodule.datasets["test"], chosen)
        if trainer.is_global_zero:
            path = Path(trainer.default_root_dir) / "examples.html"
            path.write_text(page(found, len(by_error)), encoding="utf-8")


def evenly(values: Sequence[int], number: int) -> list[int]:
    """Return so many of the values at even distances, the first and the last among them."""
    if len(values) <= number:
        return list(values)
    places = np.linspace(0, len(values) - 1, number).round().astype(int)
    return [values[place] for place in places]


def examples(
    trainer: Trainer, module: LightningModule, dataset: ActivationDataset, numbers: Sequence[int]
) -> list[dict[str, Any]]:
    """Return what a line of `predict` tells of some activations, with `words`, pairs of the text
    of each word of the explanation and its salience.

    Every rank computes all of them, so that none waits for another.

    Args:
        trainer: of the module.
        module: a LitConsistencyLens in evaluation mode.
        dataset: of the activations.
        numbers: of the samples.
    """
    lines = []
    tokenizer = dataset.pieces.store.tokenizer
    for start in range(0, len(numbers), AT_ONCE):
        some = numbers[start : start + AT_ONCE]
        batch = module.transfer_batch_to_device(dataset.chosen(some), module.device, 0)
        with torch.no_grad():
            found = trainer.strategy.predict_step(batch, 0, evaluate=salient_predictions)
        results = {name: values.cpu().numpy() for name, values in found.items()}
        for row, number in enumerate(some):
            values = {name: result[row] for name, result in results.items()}
            line = explanation_line(dataset, number, values, CONTROLS)
            texts = token_texts(tokenizer, values["token_ids"])
            line["words"] = list(zip(texts, values["salience"].tolist(), strict=True))
            lines.append(line)
    return lines
