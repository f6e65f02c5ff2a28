"""The dataset that gives `SnippetBatch`: pages whose titles or descriptions are known."""

from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from datamodules.core.batches import IGNORED
from datamodules.text.batches import Piece
from datamodules.text.instruction_batches import InstructionDataset
from datamodules.text.instruction_store import InstructionStore
from datamodules.text.page_store import PagePrompts, PageText, PageTexts
from datamodules.text.prompts import PromptDataset, padded_prompts


class PagePromptDataset(PromptDataset):
    """Pages to write for: one sample per row, with its query.

    Args:
        request: which files, how they become tokens.

    Raises:
        ValueError: there is no row, or one is no page; file and line are named.
    """

    def __init__(self, request: PagePrompts) -> None:
        super().__init__(request)
        self.queries = list(request.queries())

    def example(self, sample_id: int, epoch: int) -> Any:
        """Return the texts of one row, and its query."""
        return super().example(sample_id, epoch), self.queries[sample_id]

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Return input_ids [B, S], padded at the right, lengths [B], and the queries [B]."""
        prompts, queries = zip(*examples, strict=True)
        return {**super().collate(list(prompts)), "queries": list(queries)}


class PageDataset(InstructionDataset):
    """Pages with their targets, for training."""

    long_way_out: ClassVar[str] = (
        "Raise data.max_target_tokens, with data.context_length, or set data.too_long to leave_out."
    )


class SnippetExample(NamedTuple):
    """The tokens of a page with its target, and its texts."""

    piece: Piece
    texts: PageText


class SnippetDataset(PageDataset):
    """One part for evaluation: a sample is one page, to be rated and to be written for.

    Args:
        store: of the pages.
        texts: of the part.
        part: 1 validation, 2 test.
        context_length: most positions of a row.
        too_long: `leave_out` or `error`.

    Raises:
        ValueError: see `InstructionDataset`.
    """

    def __init__(
        self,
        store: InstructionStore,
        texts: PageTexts,
        part: int,
        context_length: int,
        too_long: Any,
    ) -> None:
        super().__init__(store, part, context_length, "documents", too_long)
        self.texts = texts

    def example(self, sample_id: int, epoch: int) -> Any:
        """Return the tokens and the texts of one page."""
        texts = self.texts[int(self.fitted.samples[sample_id])]
        return SnippetExample(self._piece(sample_id), texts)

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Return the pages with their targets as one row, their prompts, and their texts."""
        prompts = [torch.from_numpy(prompt_of(example.piece)) for example in examples]
        prompt_ids, prompt_lengths = padded_prompts(prompts)
        rows = super().collate([[example.piece] for example in examples])
        columns = zip(*(example.texts for example in examples), strict=True)
        texts = dict(zip(("texts", "targets", "queries"), map(list, columns), strict=True))
        return {**rows, "prompt_ids": prompt_ids, "prompt_lengths": prompt_lengths, **texts}


def prompt_of(piece: Piece) -> np.ndarray:
    """Return the tokens before the first one that is trained on, [n] int64."""
    return piece.input_ids[: int(np.argmax(piece.labels != IGNORED)) + 1]
