"""LitSubject: activations of a frozen language model for `unisono predict`. Batch: DumpBatch."""

from typing import Any

import torch
from torch import Tensor, nn

from datamodules.activations.store import SubjectFacts, threads_pinned
from datamodules.core.batches import DumpBatch
from lit_models.consistency_lens.subject import (
    Subject,
    SubjectOptions,
    keep_layers,
    load_subject,
    subject_facts,
    subject_recipe,
    tokenizer_folder,
)
from lit_models.training.exact import ExactModule

NOTHING_TO_FIT = "a subject stands still and learns nothing; run unisono predict."


class LitSubject(ExactModule):
    """Reads documents and returns activations at the positions that the batch names.

    Blocks above the layer are left out of the network: they would change nothing.

    Args:
        subject: the model and the layer.
        num_threads: of each process on a CPU. Another number changes the last bits of activations;
            more devices make a dump faster and do not.

    Raises:
        ValueError: fewer than one thread.
    """

    def __init__(self, subject: SubjectOptions, num_threads: int = 1) -> None:
        super().__init__()
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}.")
        self.save_hyperparameters()
        self.options, self.num_threads = subject, num_threads
        self.subject: Any = None
        self.recipe: Any = None
        self.facts: Any = None  # SubjectFacts, after `setup`

    def blocks(self) -> list[nn.Module]:
        return self.subject.network.blocks()

    def wanted_tokenizer(self) -> str | None:
        """Return the folder of the tokenizer that the data must be read with, if there is one."""
        return tokenizer_folder(self.options)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        size = self.trainer.datamodule.store.tokenizer.vocab_size
        self.recipe = subject_recipe(self.options, size)
        self.facts = subject_facts(self.options, self.recipe)

    def configure_model(self) -> None:
        if self.subject is None:
            data = self.trainer.datamodule
            size = data.store.tokenizer.vocab_size
            network = load_subject(self.options, self.recipe, data.context_length, size)
            self.subject = Subject(network, self.options.layer)
            keep_layers(network, self.options.layer + 1)

    def subject_facts(self) -> SubjectFacts:
        """Return what the store keeps of the subject."""
        return self.facts

    def predict_step(self, batch: DumpBatch, batch_idx: int) -> dict[str, Tensor]:
        with threads_pinned(self.num_threads):
            found = self.subject.activations(batch["input_ids"])  # [R, T, D]
        rows = torch.arange(len(found), device=found.device)[:, None]
        return {"activations": found[rows, batch["positions"].clamp(min=0)]}

    def configure_optimizers(self) -> Any:
        """Refuse: Lightning asks for one before it knows that there is nothing to fit.

        Raises:
            ValueError: always.
        """
        raise ValueError(NOTHING_TO_FIT)
