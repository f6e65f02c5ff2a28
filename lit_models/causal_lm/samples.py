"""What the model writes while it learns, as text in TensorBoard."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from rich.text import Text

from datamodules.text.prompts import PromptDataset, completion_text, read_prompts, rows_in_memory
from datamodules.tokenizers.text import TextTokenizer
from lit_models.causal_lm.generation import GenerationOptions, check_lengths
from lit_models.causal_lm.pretrained import most_positions, recipe_of
from lit_models.training.ledger import ledger_of
from lit_models.training.metrics import evaluating

OPTIONS = GenerationOptions(max_new_tokens=200, temperature=0.8, context="recent")


class Samples(Callback):
    """Completes some prompts every few optimizer steps; the training goes on as if it had not.

    Args:
        prompts: texts to go on from; an empty one begins a document.
        every_n_steps: optimizer steps between samples.
        generation: how; `None` draws 200 tokens at temperature 0.8.
        prints_last: print what the model writes after the first prompt when training has ended.

    Raises:
        ValueError: no prompt, an interval below 1, options for scores; at the start of training,
            no TensorBoard logger, or a prompt that the model cannot read.
    """

    def __init__(
        self,
        prompts: list[str],
        every_n_steps: int = 500,
        generation: GenerationOptions | None = None,
        prints_last: bool = False,
    ) -> None:
        if isinstance(prompts, str) or not prompts:
            raise ValueError(f'prompts must be a list such as ["Once upon"], got {prompts!r}.')
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}.")
        self.every_n_steps, self._seen_step = every_n_steps, 0
        self.options = generation or OPTIONS
        if self.options.mode != "generate":
            raise ValueError('Samples writes texts; leave generation.mode at "generate".')
        self.prompts, self.prints_last = prompts, prints_last

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen_step = trainer.global_step
        if not (self.prints_last or trainer.fast_dev_run or boards(trainer)):
            raise ValueError(
                "Samples has nowhere to write: the trainer has no TensorBoardLogger. Give it one, "
                "or leave Samples out."
            )
        lengths = prompt_dataset(pl_module.tokenizer, self.prompts).lengths.tolist()
        limit = most_positions(recipe_of(pl_module.network), self.options.context)
        check_lengths(lengths, limit, self.options)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step, before = trainer.global_step, self._seen_step
        self._seen_step = step  # the same in the middle of an accumulation
        if step == before or step % self.every_n_steps or not boards(trainer):
            return
        texts = self.completions(trainer, pl_module, self.prompts)
        for board in boards(trainer) if trainer.is_global_zero else []:
            for number, (prompt, text) in enumerate(zip(self.prompts, texts, strict=True)):
                block = f"```\n{prompt}{text}\n```"  # of code: it keeps the lines
                board.experiment.add_text(f"samples/{number}", block, step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ledger = ledger_of(trainer)
        if not self.prints_last or (ledger is not None and ledger.is_stopping):
            return
        [text] = self.completions(trainer, pl_module, self.prompts[:1])
        if trainer.is_global_zero:
            shown = Text.assemble("a sample: ", (self.prompts[0], "bold"), text)
            Console(highlight=False).print(shown, soft_wrap=True)

    def completions(
        self, trainer: Trainer, pl_module: LightningModule, prompts: Sequence[str]
    ) -> list[str]:
        """Return the completions of prompts, on every rank; a collective."""
        tokenizer: TextTokenizer = pl_module.tokenizer
        ids = torch.arange(len(prompts))
        batch = prompt_dataset(tokenizer, prompts).batch(ids.numpy(), 0) | {"sample_id": ids}
        batch = pl_module.transfer_batch_to_device(batch, pl_module.device, 0)
        with evaluating(pl_module), torch.no_grad():
            found = trainer.strategy.predict_step(batch, 0, options=self.options)
        tokens = found["completion_ids"].cpu().numpy()
        pairs = zip(tokens, found["num_characters"].tolist(), strict=True)
        return [completion_text(tokenizer, *pair) for pair in pairs]


def prompt_dataset(tokenizer: TextTokenizer, prompts: Sequence[str]) -> PromptDataset:
    """Return texts to go on from."""
    rows = rows_in_memory({"prompt": prompt} for prompt in prompts)
    return PromptDataset(read_prompts(rows, tokenizer))


def boards(trainer: Trainer) -> list[TensorBoardLogger]:
    """Return the loggers that take text."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
