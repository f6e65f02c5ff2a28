"""ActivationDumpDataModule: documents in, a store of activations out."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from datamodules.activations.documents import DocumentsDataModule
from datamodules.activations.pieces import Pieces
from datamodules.activations.positions import drawn_positions
from datamodules.activations.writer import DumpedPart, write_store
from datamodules.planned import PlannedDataset, Stage
from datamodules.splitting import PART_NAMES
from datamodules.text_batches import Piece, padded_rows
from datamodules.token_store import TokenStore

NO_POSITION = -1
PARTS = range(len(PART_NAMES))


class _Read(NamedTuple):
    piece: Piece
    positions: np.ndarray


class DumpDataset(PlannedDataset):
    """The pieces of all parts, one part after the other; a sample is a piece with its positions.

    Args:
        parts: the pieces of each part.
        positions: per part the piece [n] and the position [n] of each activation.
        per_document: most positions of a piece.
    """

    def __init__(
        self,
        parts: list[Pieces],
        positions: list[tuple[np.ndarray, np.ndarray]],
        per_document: int,
    ) -> None:
        self.parts, self.positions, self.per_document = parts, positions, per_document
        self.first = np.cumsum([0, *(len(pieces) for pieces in parts)])
        self.lengths = np.concatenate([pieces.sizes for pieces in parts])
        self.target_counts = {}
        rule = [pieces.context_length for pieces in parts]
        drawn = [int(position.sum()) for _, position in positions]
        self.fingerprint = f"{parts[0].store.fingerprint}-dump-{per_document}-{rule}-{drawn}"

    def example(self, sample_id: int, epoch: int) -> _Read:
        """Return one piece, and its positions [per_document], -1 = none."""
        part = int(np.searchsorted(self.first, sample_id, side="right")) - 1
        number = sample_id - int(self.first[part])
        tokens = self.parts[part].tokens(number)
        pieces, drawn = self.positions[part]
        start, end = np.searchsorted(pieces, [number, number + 1])
        positions = np.full(self.per_document, NO_POSITION)
        positions[: end - start] = drawn[start:end]
        return _Read(Piece(tokens[:-1], tokens[1:]), positions)

    def collate(self, examples: list[_Read]) -> dict[str, Any]:
        """Return padded rows, and positions [R, per_document] int64."""
        rows = padded_rows([[read.piece] for read in examples])
        return {**rows, "positions": torch.from_numpy(np.stack([r.positions for r in examples]))}


class ActivationDumpDataModule(DocumentsDataModule):
    """Gives `predict` every document of every part, and writes what comes back into a store.

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
            raise ValueError(f"a dump has nothing to {stage}; run unisono predict.")
        self.store = self.open_tokens()
        super().setup(stage)

    def build(self, stage: Stage) -> DumpDataset:
        """Return the pieces of all parts."""
        assert self.store is not None
        parts = [self.pieces(self.store, part) for part in PARTS]
        drawn = [drawn_positions(p.sizes, p.hashes, self.positions) for p in parts]
        return DumpDataset(parts, drawn, self.positions.per_document)

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
            first, last = dataset.first[part], dataset.first[part + 1]
            facts = self.facts_of(self.store, part)
            found = results["activations"][first:last]
            parts.append(DumpedPart(dataset.parts[part], *dataset.positions[part], found, facts))
        write_store(
            path,
            self.store,
            parts,
            self.trainer.lightning_module.subject_facts(),
            self.positions,
            self.keep_activations,
        )
