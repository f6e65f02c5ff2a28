"""What a lens says while it learns, and how it stands beside its controls, in TensorBoard."""

from functools import partial
from html import escape
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from datamodules.activations.attributes import ALL
from datamodules.activations.dataset import ActivationDataset
from lit_models.consistency_lens.controls import Case, fidelities, known_rows, row_names
from lit_models.consistency_lens.examples import AT_ONCE, evenly, examples
from lit_models.consistency_lens.metrics import FidelityTable
from lit_models.training.callbacks.board_samples import BoardSamples, boards, evaluating

CURVES = ("fve", "kl_recovered")


class ExplanationSamples(BoardSamples):
    """Explains some activations of the validation part every few optimizer steps, and evaluates
    the lens and all controls on more of them; the training goes on as if it had not.

    Args:
        num_examples: explanations that are written out, always of the same activations.
        num_evaluated: activations from which the curves come, always the same ones.
        every_n_steps: optimizer steps in between.

    Raises:
        ValueError: a number below 1; at the start of training, no logger that takes text.
    """

    def __init__(
        self, num_examples: int = 8, num_evaluated: int = 256, every_n_steps: int = 200
    ) -> None:
        super().__init__(every_n_steps)
        for name, number in (("num_examples", num_examples), ("num_evaluated", num_evaluated)):
            if number < 1:
                raise ValueError(f"{name} of ExplanationSamples must be at least 1, got {number}.")
        self.num_examples, self.num_evaluated = num_examples, num_evaluated

    def sample(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Write explanations of the same activations, and a point of each curve."""
        dataset = trainer.datamodule.datasets["validation"]
        with evaluating(pl_module), torch.no_grad():
            chosen = evenly(range(len(dataset.lengths)), self.num_examples)
            lines = examples(trainer, pl_module, dataset, chosen)
            curves = self._curves(trainer, pl_module, dataset)
        for board in boards(trainer) if trainer.is_global_zero else []:
            for number, line in enumerate(lines):
                board.experiment.add_text(f"examples/{number}", markdown(line), step)
            for name, value in curves.items():
                board.experiment.add_scalar(name, value, step)

    def _curves(
        self, trainer: Trainer, module: LightningModule, dataset: ActivationDataset
    ) -> dict[str, float]:
        """Name -> value; every rank computes all, so that none waits for another."""
        table = FidelityTable(row_names(module.evaluation), [], sync_on_compute=False)
        table.to(module.device)
        numbers = evenly(range(len(dataset.lengths)), self.num_evaluated)
        for start in range(0, len(numbers), AT_ONCE):
            batch = dataset.chosen(numbers[start : start + AT_ONCE])
            batch = module.transfer_batch_to_device(batch, module.device, 0)
            trainer.strategy.predict_step(batch, 0, evaluate=partial(_added, table))
        rows = known_rows(table.computed()[ALL], module.lens)
        return {f"{kind}/{row}": rows[row][kind] for kind in CURVES for row in rows}


def _added(table: FidelityTable, case: Case) -> dict[str, Any]:
    table.update(fidelities(case), case.batch)
    return {}


def markdown(line: dict[str, Any]) -> str:
    """Return what is told of one activation, as TensorBoard shows it.

    Words are followed by their salience: by how much the error grows without them.
    """
    words = "".join(f"{escape(text)}<sub>{salience:+.2f}</sub>" for text, salience in line["words"])
    nearest = ", ".join(f"{name} {e:.3f}" for name, e in line["nearest_controls"].items())
    token = f"<b>{escape(line['token'])}</b>"
    context = f"{escape(line['before'])}{token}{escape(line['after'])}"
    return f"{context}\n\n{words}\n\nerror {line['error']:.3f}; {nearest}"
