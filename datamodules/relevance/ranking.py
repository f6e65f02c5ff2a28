"""RankingDataModule: queries with candidates become planned batches for the ranker.

Shapes: B queries in the micro-batch, K most candidates of one, P pairs, J most judgements of one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from datamodules.encoded_texts import TextEncoding
from datamodules.framing import Framed, padded
from datamodules.plan import rng_for
from datamodules.planned import PlannedDataset, Stage
from datamodules.relevance.collection import Collection
from datamodules.relevance.datamodule import RelevanceDataModule
from datamodules.splitting import PART_NAMES

TERM = "queries"
NO_DOCUMENT = -1


class RankingExample(NamedTuple):
    """One query: rows of its K pairs, candidates [K], grades [K], priors [K], all grades [J]."""

    pairs: list[Framed]
    document: np.ndarray
    relevance: np.ndarray
    prior: np.ndarray
    all_relevance: np.ndarray


class RankingDataset(PlannedDataset):
    """The judged queries of one part, each with its candidates.

    Args:
        collection: of texts and judgements.
        encoding: of the texts.
        part: 0 train, 1 validation, 2 test.
        group_size: candidates of a query in training, drawn anew in every epoch; none takes all.
        seed: key of the draw, together with epoch and sample id.
    """

    def __init__(
        self,
        collection: Collection,
        encoding: TextEncoding,
        part: int,
        group_size: int | None = None,
        seed: int = 0,
    ) -> None:
        self.collection, self.encoding = collection, encoding
        self.group_size, self.seed = group_size, seed
        judged = collection.judgements(part)
        self.queries, starts = np.unique(judged.query, return_index=True)
        self.offsets = np.append(starts, len(judged.query))
        self.documents, self.grades = judged.document, judged.grade
        sizes = np.diff(self.offsets)
        self.lengths = sizes if group_size is None else np.minimum(sizes, group_size)
        self.fingerprint = f"{collection.fingerprint}-{encoding.digest}-{part}-{group_size}"
        self.target_counts = {TERM: None}

    def example(self, sample_id: int, epoch: int) -> RankingExample:
        """Return one query with its candidates of this epoch."""
        start, end = self.offsets[sample_id : sample_id + 2]
        documents, grades = self.documents[start:end], self.grades[start:end]
        chosen = self._chosen(grades, epoch, sample_id)
        query = self.encoding.ids(self.collection.query(int(self.queries[sample_id])))
        pairs = [self._pair(query, int(index)) for index in documents[chosen]]
        return RankingExample(
            pairs, documents[chosen], grades[chosen], np.zeros(len(chosen), np.float32), grades
        )

    def collate(self, examples: list[RankingExample]) -> dict[str, torch.Tensor]:
        """Return the padded batch."""
        sizes = [len(example.pairs) for example in examples]
        index = np.full((len(examples), max(sizes)), NO_DOCUMENT)
        index[np.arange(max(sizes)) < np.array(sizes)[:, None]] = np.arange(sum(sizes))
        return {
            **padded([pair for example in examples for pair in example.pairs]),
            "pair_index": torch.from_numpy(index),
            "document": _rows([e.document for e in examples], NO_DOCUMENT),
            "relevance": _rows([e.relevance for e in examples], np.nan),
            "prior": _rows([e.prior for e in examples], 0.0),
            "all_relevance": _rows([e.all_relevance for e in examples], np.nan),
        }

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the query, and the grades of its candidates of this epoch."""
        example = self.example(sample_id, epoch)
        names = [self.collection.document_id(int(i)) for i in example.document]
        graded = zip(names, example.relevance.tolist(), strict=True)
        return {
            "query": self.collection.query(int(self.queries[sample_id])),
            "candidates": " ".join(f"{name}:{grade:g}" for name, grade in graded),
        }

    def _chosen(self, grades: np.ndarray, epoch: int, sample_id: int) -> np.ndarray:
        if self.group_size is None or len(grades) <= self.group_size:
            return np.arange(len(grades))
        rng = rng_for(self.seed, epoch, sample_id)
        return np.sort(rng.permutation(len(grades))[: self.group_size])

    def _pair(self, query: np.ndarray, document: int) -> Framed:
        text = self.collection.document(document)
        whole = f"{text.title}\n{text.text}" if text.title else text.text
        return self.encoding.framing.pair(query, self.encoding.ids(whole))


class RankingDataModule(RelevanceDataModule):
    """Deals queries with their judged candidates.

    Args:
        group_size: candidates of a query in a training step.
        relevance: collection, output, tokenizer and more, see `RelevanceDataModule`.
    """

    def __init__(self, group_size: int = 8, **relevance: Any) -> None:
        super().__init__(**relevance)
        self.group_size = group_size

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage.

        Raises:
            ValueError: no query is judged in it.
        """
        assert self.encoding is not None
        size = self.group_size if stage == "train" else None
        part = PART_NAMES.index("test" if stage == "predict" else stage)
        dataset = RankingDataset(self.collection, self.encoding, part, size, self.seed)
        if not len(dataset.queries):
            raise ValueError(
                f"no query is judged for {stage}; name its judgements in data.collection."
            )
        return dataset


def _rows(values: Sequence[np.ndarray], filler: float) -> torch.Tensor:
    """Return arrays of several lengths as the rows of one [B, longest]."""
    width = max(map(len, values))
    rows = np.full((len(values), width), filler, values[0].dtype)
    for row, value in zip(rows, values, strict=True):
        row[: len(value)] = value
    return torch.from_numpy(rows)
