"""ActivationDumpDataModule: documents in, a store of activations out."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datamodules.activations.documents import DocumentsDataModule, without_activation
from datamodules.activations.pieces import Pieces
from datamodules.activations.writer import DumpedPart, write_store
from datamodules.core.planned import PlannedDataset, Stage
from datamodules.files.audit import Audit, MakeModel
from datamodules.files.splitting import PART_NAMES, TRAIN
from datamodules.text.store import TokenStore
from datamodules.tokenizers.wanted import options_of_model

NO_POSITION = -1
PARTS = range(len(PART_NAMES))


class DumpDataset(PlannedDataset):
    """The pieces of all parts that have an activation, one part after the other.

    A sample is a piece up to its last position: what comes behind changes no activation.

    Args:
        parts: the pieces of each part.
        positions: per part the piece [n] and the position [n] of each activation.
    """

    def __init__(self, parts: list[Pieces], positions: list[list[np.ndarray]]) -> None:
        self.parts, self.positions = parts, positions
        tables = [_table(*drawn) for drawn in positions]
        self.per_document = max(table.shape[1] for _, table in tables)
        self.piece = [pieces for pieces, _ in tables]
        self.first = np.cumsum([0, *(len(pieces) for pieces in self.piece)])
        self.drawn = np.full((int(self.first[-1]), self.per_document), NO_POSITION)  # [P, K]
        for start, (pieces, table) in zip(self.first, tables, strict=False):
            self.drawn[start : start + len(pieces), : table.shape[1]] = table
        self.lengths = self.drawn.max(1, initial=NO_POSITION) + 1
        self.target_counts = {}
        content = hashlib.sha256(parts[0].store.fingerprint.encode())
        for values in (self.first, *self.piece, self.drawn):
            content.update(values.tobytes())
        self.fingerprint = content.hexdigest()[:32]

    def example(self, sample_id: int, epoch: int) -> int:
        """Return the sample's number; `collate` reads all of a batch at once."""
        return sample_id

    def collate(self, examples: list[int]) -> dict[str, Any]:
        """Return input_ids [R, T] and positions [R, K], int64."""
        numbers = np.array(examples)
        lengths = self.lengths[numbers]
        ids = np.zeros((len(numbers), int(lengths.max())), np.int64)
        part = np.searchsorted(self.first, numbers, side="right") - 1
        for one in np.unique(part).tolist():
            rows = np.flatnonzero(part == one)
            pieces = self.piece[one][numbers[rows] - self.first[one]]
            found = self.parts[one].rows(pieces, lengths[rows])
            ids[rows, : found.shape[1]] = found
        return {
            "input_ids": torch.from_numpy(ids),
            "positions": torch.from_numpy(self.drawn[numbers]),
        }


def _table(piece: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the pieces [p] that have an activation, and their positions [p, K], -1 = none."""
    pieces, starts, counts = np.unique(piece, return_index=True, return_counts=True)
    table = np.full((len(pieces), int(counts.max(initial=0))), NO_POSITION)
    row = np.repeat(np.arange(len(pieces)), counts)
    table[row, np.arange(len(piece)) - starts[row]] = position
    return pieces, table


class ActivationDumpDataModule(DocumentsDataModule):
    """Gives `predict` every document of every part, and writes what comes back into a store.

    The activations are on the disk three times until the store is complete: as the parts that each
    device has written, put in order, and in the store. Memory holds few of them at a time.

    Args:
        predict_output: folder of the store; none makes `activations` in the run folder.
        keep_activations: false keeps everything but the activations, which training then computes
            again from the documents: small on disk, slower.
        documents: files, tokenizer, positions and split, see `DocumentsDataModule`.
    """

    def __init__(
        self,
        predict_output: str | None = None,
        keep_activations: bool = True,
        **documents: Any,
    ) -> None:
        super().__init__(**documents)
        self.predict_output, self.keep_activations = predict_output, keep_activations
        self.store: TokenStore | None = None

    def prepare_data(self) -> None:
        """Tokenise into the cache."""
        self.open_tokens()

    def setup(self, stage: str) -> None:
        if stage != "predict":
            raise ValueError("a dump only predicts; run unisono predict.")
        self.store = self.open_tokens()
        super().setup(stage)

    def build(self, stage: Stage) -> DumpDataset:
        """Return the pieces of all parts.

        Raises:
            ValueError: the training part has no activation.
        """
        assert self.store is not None
        places = [self.places_of(self.store, part) for part in PARTS]
        if not len(places[TRAIN][1]):
            raise ValueError(without_activation(PART_NAMES[TRAIN]))
        return DumpDataset([pieces for pieces, *_ in places], [drawn for _, *drawn in places])

    def audit(self, make_model: MakeModel | None = None) -> Audit:
        """Return what a dump would hold.

        Args:
            make_model: builds the module of the run, which brings its tokenizer.
        """
        if make_model is not None:
            self.tokenizer_options = options_of_model(make_model(), self.tokenizer_options)
        store = self.open_tokens()
        facts_of = partial(self.facts_of, store)
        return self.audit_of(store, partial(self.places_of, store), facts_of, self.positions)

    @property
    def predict_output_path(self) -> Path:
        """Folder of the store."""
        if self.predict_output is not None:
            return Path(self.predict_output).expanduser()
        return Path(self.trainer.default_root_dir) / "activations"

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the store; `results` as `LitSubject.predict_step` returns them."""
        dataset = self.datasets["predict"]
        assert isinstance(dataset, DumpDataset)
        assert self.store is not None
        parts = []
        for part in PARTS:
            found = results["activations"][dataset.first[part] : dataset.first[part + 1]]
            (piece, position), facts = dataset.positions[part], self.facts_of(self.store, part)
            parts.append(DumpedPart(dataset.parts[part], piece, position, found, facts))
        write_store(
            path,
            self.store,
            parts,
            self.trainer.lightning_module.subject_facts(),
            self.positions,
            self.keep_activations,
        )
