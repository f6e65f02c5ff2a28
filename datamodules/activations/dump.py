"""ActivationDumpDataModule: documents in, a store of activations out, whole or not at all.

Shapes: P or R pieces that are read, K most positions of one, N activations of a part, D features.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from datamodules.activations.documents import (
    DocumentFacts,
    DocumentsDataModule,
    Pieces,
    check_activations,
)
from datamodules.activations.store import SCHEMA, STATISTICS, STORE_VERSION, Chunk, statistics_of
from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import ArrayFile, content_digest, digest_of, naming, replacing
from datamodules.files.splitting import PART_NAMES, TRAIN

CHUNK = 4096  # activations that are summed at once; another value moves the last bits
NO_POSITION = -1
PARTS = range(len(PART_NAMES))


def rows_and_slots(piece: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return of each activation [N], whose pieces ascend, the row of its piece among those that
    have some, and which one of its piece it is."""
    is_new = np.diff(piece, prepend=-1) != 0
    row = np.cumsum(is_new) - 1
    return row, np.arange(len(piece)) - np.flatnonzero(is_new)[row]


class DumpedPart(NamedTuple):
    """One part as it comes back from the subject.

    pieces: the documents. piece [N], position [N]: of each activation. found [P, K, D]: the
    activations of the pieces that have some, in order. facts: of the documents.
    """

    pieces: Pieces
    piece: np.ndarray
    position: np.ndarray
    found: np.ndarray
    facts: DocumentFacts

    def chunks(self) -> Iterator[Chunk]:
        """Yield the activations [n, D] in order, with current tokens [n] and positions [n]."""
        stream, (row, slot) = self.pieces.stream, rows_and_slots(self.piece)
        for start in range(0, len(self.piece), CHUNK):
            here = slice(start, start + CHUNK)
            piece, position = self.piece[here], self.position[here]
            tokens = stream.tokens[self.pieces.starts[piece] + position].astype(np.int64)
            yield self.found[row[here], slot[here]], tokens, position

    def write(self, folder: Path, name: str) -> None:
        """Write the arrays of the part."""
        np.save(folder / f"{name}.piece.npy", self.piece)
        np.save(folder / f"{name}.position.npy", self.position)
        np.save(folder / f"{name}.attributes.npy", self.facts.attributes)
        np.save(folder / f"{name}.group.npy", self.facts.group)
        # Written one after the other, and not through a map: a full disk is an error there, and no
        # signal that ends the process.
        path, row = folder / f"{name}.activations.npy", self.found.shape[-1:]
        with ArrayFile(path, self.found.dtype, row) as file:
            for activations, _, _ in self.chunks():
                file.add(activations)


class DumpDataset(PlannedDataset):
    """The pieces of all parts that have an activation, one part after the other.

    A sample is a piece up to its last position: what comes behind changes no activation.

    Args:
        parts: the pieces of each part.
        positions: per part the piece [n] and the position [n] of each activation.
    """

    def __init__(self, parts: list[Pieces], positions: list[list[np.ndarray]]) -> None:
        self.parts, self.positions = parts, positions
        self.piece = [np.unique(piece) for piece, _ in positions]  # that have an activation
        self.first = np.cumsum([0, *map(len, self.piece)])
        places = [rows_and_slots(piece) for piece, _ in positions]
        most = 1 + max(int(slot.max(initial=-1)) for _, slot in places)
        self.drawn = np.full((int(self.first[-1]), most), NO_POSITION)  # [P, K]
        for first, (row, slot), (_, position) in zip(self.first, places, positions, strict=False):
            self.drawn[first + row, slot] = position
        self.lengths = self.drawn.max(1, initial=NO_POSITION) + 1
        self.target_counts = {}
        content = hashlib.sha256(parts[0].store.fingerprint.encode())
        for values in (self.first, *self.piece, self.drawn):
            content.update(values.tobytes())
        self.fingerprint = content.hexdigest()[:32]

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, Any]:
        """Return input_ids [R, T] and positions [R, K], int64, of samples [R]."""
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


class ActivationDumpDataModule(DocumentsDataModule):
    """Gives `predict` every document of every part, and writes what comes back into a store.

    The activations are on the disk three times until the store is complete: as the parts that each
    device has written, put in order, and in the store. Memory holds few of them at a time.

    Args:
        predict_output: folder of the store; `None` makes `activations` in the run folder.
        documents: files, tokenizer, positions and split, see `DocumentsDataModule`.
    """

    default_output = "activations"

    def __init__(self, predict_output: str | None = None, **documents: Any) -> None:
        super().__init__(**documents)
        self.predict_output = predict_output

    def setup(self, stage: str) -> None:
        if stage != "predict":
            raise ValueError("a dump only predicts; run unisono predict.")
        super().setup(stage)

    def build(self, stage: Stage) -> DumpDataset:
        places = [self.places(part) for part in PARTS]
        check_activations(len(places[TRAIN][1]), PART_NAMES[TRAIN])
        return DumpDataset([pieces for pieces, *_ in places], [drawn for _, *drawn in places])

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the store; `results` as `LitSubject.predict_step` returns them.

        Raises:
            FileExistsError: the folder exists.
            ValueError: the training part has no activation, or one is no finite number.
            OSError: the disk is full; the folder does not exist then.
        """
        dataset = self.datasets["predict"]
        assert isinstance(dataset, DumpDataset)
        parts: dict[str, DumpedPart] = {}
        for part, name in enumerate(PART_NAMES):
            found = results["activations"][dataset.first[part] : dataset.first[part + 1]]
            (piece, position), facts = dataset.positions[part], self.facts(part)
            parts[name] = DumpedPart(dataset.parts[part], piece, position, found, facts)
        training = parts[PART_NAMES[TRAIN]]
        with naming(path), replacing(path, is_new=True) as unfinished:
            unfinished.mkdir()  # with the modes of the user's umask
            for file in self.store.folder.iterdir():
                shutil.copyfile(file, unfinished / file.name)
            for name, of_part in parts.items():
                of_part.write(unfinished, name)
            statistics = statistics_of(training.chunks())
            statistics.save(unfinished / STATISTICS)
            facts_of_all = {
                "subject": asdict(self.model.options["subject"]),
                "tokens": self.store.fingerprint,
                "positions": asdict(self.positions),
                "context_length": training.pieces.context_length,
            }
            schema = {
                **facts_of_all,
                "fingerprint": digest_of(facts_of_all),
                "version": STORE_VERSION,
                "dtype": str(training.found.dtype),
                "tokenizer": self.store.tokenizer.digest,
                "norms": dict(zip(("mean", "deviation", "largest"), statistics.norms, strict=True)),
                "num_documents": {name: len(one.facts.group) for name, one in parts.items()},
                "num_activations": {name: len(one.piece) for name, one in parts.items()},
                "attributes": {name: one.facts.names for name, one in parts.items()},
                "groups": {name: one.facts.group_names for name, one in parts.items()},
                "files": {
                    file.name: {"bytes": file.stat().st_size, "digest": content_digest(file)}
                    for file in sorted(unfinished.iterdir())
                },
            }
            text = json.dumps(schema, indent=1, sort_keys=True)
            (unfinished / SCHEMA).write_text(text + "\n", encoding="utf-8")
