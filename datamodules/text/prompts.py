"""The datasets of prediction: prompts to go on from, and choices to rate.

Shapes: N rows, P texts of all rows, B samples, S positions, R rows of tokens, C choices.
"""

import hashlib
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datamodules.core.batches import IGNORED, PromptBatch
from datamodules.core.planned import PlannedDataset
from datamodules.text.batches import Piece, padded_rows
from datamodules.text.packing import best_fit
from datamodules.text.prompt_rows import Prompt, PromptRequest, prompt_tokens
from datamodules.tokenizers.text_tokenizer import TextTokenizer


class PromptDataset(PlannedDataset):
    """One sample per row of the files, rows that are equal too; gives `PromptBatch`.

    Args:
        request: which files, how they become tokens.

    Attributes:
        num_cut: [N] int64, tokens at the beginning of a text that the model does not see; of the
            choice that lost most.

    Raises:
        ValueError: there is no row, or one breaks a rule; file and line are named.
    """

    def __init__(self, request: PromptRequest) -> None:
        per_row, lengths, rated, cut, tokens = [], [], [], [], []
        for prompts in request.prompts():
            per_row.append(len(prompts))
            for prompt in prompts:
                tokens.append(np.array(prompt.ids, np.int32))
                lengths.append(len(prompt.ids))
                rated.append(prompt.num_rated)
                cut.append(prompt.num_cut)
        if not per_row:
            names = ", ".join(map(str, request.files))
            raise ValueError(f"{names}: there is no row; write at least one prompt.")
        self.tokens = np.concatenate(tokens)
        self.text_offsets = np.concatenate([[0], np.cumsum(lengths)])  # [P + 1]
        self.offsets = np.concatenate([[0], np.cumsum(per_row)])  # [N + 1]
        self.num_rated = np.array(rated)  # [P]
        self.num_cut = np.maximum.reduceat(np.array(cut), self.offsets[:-1])
        self.lengths = np.add.reduceat(np.array(lengths), self.offsets[:-1])
        self.fingerprint = self._digest(request.mode)
        self.target_counts = {}

    def example(self, sample_id: int, epoch: int) -> list[Prompt]:
        """Return the texts of one row."""
        return [self._text(i) for i in range(self.offsets[sample_id], self.offsets[sample_id + 1])]

    def collate(self, examples: list[list[Prompt]]) -> dict[str, Tensor]:
        """Return input_ids [B, S], padded at the right, and lengths [B]."""
        input_ids, lengths = padded_prompts([torch.tensor(prompts[0].ids) for prompts in examples])
        return {"input_ids": input_ids, "lengths": lengths}

    def _text(self, number: int) -> Prompt:
        start, end = self.text_offsets[number : number + 2]
        return Prompt(self.tokens[start:end].tolist(), int(self.num_rated[number]), 0)

    def _digest(self, mode: str) -> str:
        content = hashlib.sha256(json.dumps(mode).encode())
        for values in (self.tokens, self.text_offsets, self.offsets, self.num_rated):
            content.update(values.tobytes())
        return content.hexdigest()[:32]


class ChoiceDataset(PromptDataset):
    """As `PromptDataset`, but each row has one or more texts whose ends are rated; gives
    `ChoiceBatch`.

    Args:
        request: with mode `score`.

    Raises:
        ValueError: see `PromptDataset`.
    """

    def __init__(self, request: PromptRequest) -> None:
        super().__init__(request)
        self.most_choices = int(np.diff(self.offsets).max())

    def collate(self, examples: list[list[Prompt]]) -> dict[str, Tensor]:
        """Return the texts as documents, several in a row, and which document each choice is."""
        texts = [_piece(prompt) for prompts in examples for prompt in prompts]
        sizes = np.array([len(piece.labels) for piece in texts])
        order, offsets = best_fit(sizes, int(sizes.max()))
        rows = [[texts[i] for i in order[a:b]] for a, b in pairwise(offsets)]
        batch: dict[str, Any] = padded_rows(rows)
        document_of = np.empty(len(texts), np.int64)
        document_of[order] = np.arange(len(texts))
        choices = np.full((len(examples), self.most_choices), -1)
        choices[np.arange(self.most_choices) < _sizes(examples)[:, None]] = document_of
        sample_of_text = np.repeat(np.arange(len(examples)), _sizes(examples))
        samples = torch.from_numpy(sample_of_text[order])  # of each document
        batch["sample_index"] = samples[batch["document_ids"].clamp(min=0)]
        return {**batch, "choice_documents": torch.from_numpy(choices)}


def prompt_batch(tokenizer: TextTokenizer, prompts: Sequence[str]) -> PromptBatch:
    """Return prompts that no chat template wrote as one batch; sample ids count from 0."""
    rows = [torch.tensor(ids) for ids in prompt_tokens(tokenizer, prompts)]
    input_ids, lengths = padded_prompts(rows)
    return PromptBatch(
        input_ids=input_ids,
        lengths=lengths,
        sample_id=torch.arange(len(rows)),
        weight=torch.ones(len(rows)),
        step_index=0,
        num_targets={},
        step_denominators={},
    )


def padded_prompts(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return input_ids [B, S], padded at the right, and lengths [B]."""
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return input_ids, torch.tensor([len(row) for row in rows])


def _piece(prompt: Prompt) -> Piece:
    ids = np.array(prompt.ids)
    labels = ids[1:].copy()
    labels[: len(labels) - prompt.num_rated] = IGNORED
    return Piece(ids[:-1], labels)


def _sizes(examples: list[list[Prompt]]) -> np.ndarray:
    return np.array([len(prompts) for prompts in examples])
