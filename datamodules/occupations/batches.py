"""The datasets that give `OccupationBatch`: labelled job descriptions, and distinct ones to code.

Shapes: B samples in the micro-batch, S characters, K codes of the richest record.
"""

from typing import Any

import numpy as np
import torch

from datamodules.core.loader import PlannedDataset, Sample
from datamodules.core.plan import rng_for, uniforms_for
from datamodules.occupations.augmentation import UNKNOWN_LANGUAGE, Augmentation, augment
from datamodules.occupations.predict_rows import PredictIndex
from datamodules.occupations.store import OccupationStore
from datamodules.tokenizers.characters import PADDING_ID, decode, encode

NO_CODE = -100
TERMS = ("seq2seq", "flat")  # both losses are means over records


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

    def example(self, sample_id: int, epoch: int) -> Sample:
        """Which sample it is; `collate` reads all of a batch at once."""
        return Sample(sample_id, epoch)

    def collate(self, examples: list[Sample]) -> dict[str, Any]:
        """The padded batch, with the same noise for the same (seed, epoch, sample id); seen flags
        in evaluation only.

        Args:
            examples: of one epoch.
        """
        numbers, arrays = np.array([example.number for example in examples]), self.store.arrays
        rows = self.row_ids[numbers]
        code_sets = self.store.code_sets(rows)
        texts, language_id = self.store.texts(rows), arrays["language_id"][rows].astype(np.int64)
        if self.augmentation is not None:
            self._vary(texts, language_id, numbers, examples[0].epoch)
        batch, (code_ids, _) = padded_texts(texts), padded(code_sets, NO_CODE)
        batch["language_id"] = torch.from_numpy(language_id)
        batch["code_ids"] = torch.from_numpy(code_ids)  # [B, K]
        batch["num_with_codes"] = np.bincount([len(codes) for codes in code_sets]).tolist()
        if self.is_evaluated:
            batch["is_seen_text"] = torch.from_numpy(arrays["is_seen_text"][rows])
            batch["is_seen_code"] = torch.from_numpy(arrays["is_seen_code"][rows])
        return batch

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """The text with its noise of this epoch, its language, and its codes."""
        batch = self.collate([self.example(sample_id, epoch)])
        book = self.store.recipe["code_book"]["codes"]
        return {
            "text": decode(batch["input_ids"][0].numpy()),
            "language": self.languages[int(batch["language_id"])],
            "codes": " ".join(book[i] for i in batch["code_ids"][0].tolist()),
        }

    def _vary(
        self, texts: list[np.ndarray], language_id: np.ndarray, numbers: np.ndarray, epoch: int
    ) -> None:
        """Put noise into the texts and the language ids [B] of the samples with these numbers [B],
        in place. Only where noise falls on a text does the sample need its own generator."""
        options = self.augmentation
        assert options is not None
        probabilities = options.probabilities()
        shares = uniforms_for(self.seed, epoch, numbers, len(probabilities))
        fires = shares < probabilities
        for place in np.flatnonzero(fires[:, :-1].any(1)).tolist():
            rng = rng_for(self.seed, epoch, int(numbers[place]))
            language = self.languages[language_id[place]]
            text, _ = augment(decode(texts[place]), language, shares[place], rng, options)
            texts[place] = encode(text, self.store.recipe["max_length"]).code_points
        language_id[fires[:, -1]] = self.languages.index(UNKNOWN_LANGUAGE)


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
    input_ids, mask = padded(texts, PADDING_ID)
    return {"input_ids": torch.from_numpy(input_ids), "attention_mask": torch.from_numpy(mask)}


def padded(rows: list[np.ndarray], filler: int) -> tuple[np.ndarray, np.ndarray]:
    """[B, S] int64 of rows of integers, filled up on the right, and [B, S] bool: no filler."""
    lengths = np.fromiter((len(row) for row in rows), np.int64, len(rows))
    mask = np.arange(lengths.max()) < lengths[:, None]
    values = np.full(mask.shape, filler, dtype=np.int64)
    values[mask] = np.concatenate(rows)
    return values, mask
