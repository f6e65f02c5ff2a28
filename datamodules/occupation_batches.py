"""The datasets that give `OccupationBatch`: labelled job descriptions, and distinct ones to code.

Shapes: B samples in the micro-batch, S characters, K codes of the richest record.
"""

from typing import Any, NamedTuple

import numpy as np
import torch

from datamodules.augmentation import Augmentation, augment
from datamodules.occupation_store import OccupationStore
from datamodules.plan import rng_for
from datamodules.planned import PlannedDataset
from datamodules.predict_rows import PredictIndex
from datamodules.tokenizers.characters import PADDING_ID, decode, encode

NO_CODE = -100
TERMS = ("seq2seq", "flat")  # both losses are means over records


class OccupationExample(NamedTuple):
    """One record: code points [S], language index, code indices [1 …], seen in training."""

    code_points: np.ndarray
    language_id: int
    code_ids: np.ndarray
    is_seen_text: bool
    is_seen_code: bool


class OccupationDataset(PlannedDataset):
    """The labelled records of one part.

    Args:
        store: the tokenised tables.
        part: 0 train, 1 validation, 2 test.
        augmentation: noise for training; none elsewhere.
        seed: key of the noise, together with epoch and sample id.
    """

    def __init__(
        self,
        store: OccupationStore,
        part: int,
        augmentation: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        self.store = store
        self.row_ids = store.rows(part)
        self.is_evaluated = augmentation is None
        self.augmentation = augmentation if augmentation and augmentation.is_on else None
        self.seed = seed
        self.languages: list[str] = store.recipe["languages"]
        self.lengths = store.lengths(self.row_ids)
        self.fingerprint = f"{store.fingerprint}-{part}"
        self.target_counts = dict.fromkeys(TERMS)

    def example(self, sample_id: int, epoch: int) -> OccupationExample:
        """One record; the same noise for the same (seed, epoch, sample id)."""
        row, arrays = int(self.row_ids[sample_id]), self.store.arrays
        points = self.store.code_points(row)
        language_id = int(arrays["language_id"][row])
        if self.augmentation is not None:
            rng = rng_for(self.seed, epoch, sample_id)
            language = self.languages[language_id]
            text, language = augment(decode(points), language, rng, self.augmentation)
            points = encode(text, self.store.recipe["max_length"]).code_points
            language_id = self.languages.index(language)
        return OccupationExample(
            points,
            language_id,
            self.store.code_ids(row),
            bool(arrays["is_seen_text"][row]),
            bool(arrays["is_seen_code"][row]),
        )

    def collate(self, examples: list[OccupationExample]) -> dict[str, Any]:
        """The padded batch; seen flags in evaluation only."""
        num_with_codes = np.bincount([len(e.code_ids) for e in examples])
        code_ids = np.full((len(examples), len(num_with_codes) - 1), NO_CODE)
        for codes, example in zip(code_ids, examples, strict=True):
            codes[: len(example.code_ids)] = example.code_ids
        batch = padded_texts([e.code_points for e in examples])
        batch["language_id"] = torch.tensor([e.language_id for e in examples])
        batch["code_ids"] = torch.from_numpy(code_ids)  # [B, K]
        batch["num_with_codes"] = num_with_codes.tolist()
        if self.is_evaluated:
            batch["is_seen_text"] = torch.tensor([e.is_seen_text for e in examples])
            batch["is_seen_code"] = torch.tensor([e.is_seen_code for e in examples])
        return batch

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """The text with its noise of this epoch, its language, and its codes."""
        example, book = self.example(sample_id, epoch), self.store.recipe["code_book"]["codes"]
        return {
            "text": decode(example.code_points),
            "language": self.languages[example.language_id],
            "codes": " ".join(book[i] for i in example.code_ids.tolist()),
        }


class DistinctInputs(PlannedDataset):
    """The distinct (text, language) pairs of the tables to code, each once.

    Args:
        index: which row holds which input.
    """

    def __init__(self, index: PredictIndex) -> None:
        self.index = index
        self.lengths = np.diff(index.text_offsets)
        self.fingerprint = index.fingerprint
        self.target_counts = {}

    def example(self, sample_id: int, epoch: int) -> tuple[np.ndarray, int]:
        """Code points [S] and language index of one input."""
        start, end = self.index.text_offsets[sample_id : sample_id + 2]
        return self.index.code_points[start:end], int(self.index.language_ids[sample_id])

    def collate(self, examples: list[tuple[np.ndarray, int]]) -> dict[str, torch.Tensor]:
        """The padded batch, without codes."""
        batch = padded_texts([points for points, _ in examples])
        batch["language_id"] = torch.tensor([language_id for _, language_id in examples])
        return batch


def padded_texts(texts: list[np.ndarray]) -> dict[str, Any]:
    """input_ids [B, S] int64 and attention_mask [B, S] bool of these code points."""
    lengths = np.fromiter((len(text) for text in texts), np.int64, len(texts))
    mask = np.arange(lengths.max()) < lengths[:, None]
    input_ids = np.full(mask.shape, PADDING_ID, dtype=np.int64)
    input_ids[mask] = np.concatenate(texts)
    return {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(mask)}
