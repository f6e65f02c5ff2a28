"""Writes a store of activations: whole, under its name, or not at all.

Shapes: P pieces, K most positions of one, N activations of a part, D features.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datamodules.activations.attributes import DocumentFacts
from datamodules.activations.pieces import Pieces
from datamodules.activations.positions import PositionRule
from datamodules.activations.statistics import Chunk, statistics_of
from datamodules.activations.store import SCHEMA, STATISTICS, STORE_VERSION, SubjectFacts
from datamodules.cache import digest_of
from datamodules.splitting import PART_NAMES, TRAIN
from datamodules.token_store import TokenStore

CHUNK = 4096  # activations that are summed at once; another value moves the last bits


class DumpedPart(NamedTuple):
    """One part as it comes back from the subject.

    pieces: the documents. piece [N], position [N]: of each activation. found [P, K, D]: the
    activations. facts: of the documents.
    """

    pieces: Pieces
    piece: np.ndarray
    position: np.ndarray
    found: np.ndarray
    facts: DocumentFacts

    @property
    def place(self) -> np.ndarray:
        """[N] int64, which of its piece's positions an activation is at."""
        starts = np.searchsorted(self.piece, self.piece, side="left")
        return np.arange(len(self.piece)) - starts

    def chunks(self) -> Iterator[Chunk]:
        """Yield the activations [n, D] in order, with current tokens [n] and positions [n]."""
        place = self.place
        stream = self.pieces.stream
        for start in range(0, len(self.piece), CHUNK):
            here = slice(start, start + CHUNK)
            piece, position = self.piece[here], self.position[here]
            tokens = stream.tokens[self.pieces.starts[piece] + position].astype(np.int64)
            yield self.found[piece, place[here]], tokens, position


def write_store(
    folder: Path,
    tokens: TokenStore,
    parts: list[DumpedPart],
    subject: SubjectFacts,
    rule: PositionRule,
    keeps_activations: bool,
) -> None:
    """Write a store.

    Args:
        folder: new.
        tokens: the documents.
        parts: train, validation, test.
        subject: where the activations come from.
        rule: how the positions were drawn.
        keeps_activations: false writes all but the activations.

    Raises:
        FileExistsError: the folder exists.
        ValueError: the training part has no activation.
    """
    if folder.exists():
        raise FileExistsError(
            f"{folder} exists and is not overwritten; move it away, or name another folder with "
            "--data.predict_output."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    shutil.copytree(tokens.folder, unfinished)
    try:
        for part, name in zip(parts, PART_NAMES, strict=True):
            _write_part(unfinished, name, part, keeps_activations)
        statistics_of(parts[TRAIN].chunks()).save(unfinished / STATISTICS)
        facts = {
            "version": STORE_VERSION,
            "subject": asdict(subject),
            "dtype": str(parts[TRAIN].found.dtype),
            "tokenizer": tokens.tokenizer.digest,
            "tokens": tokens.fingerprint,
            "positions": asdict(rule),
            "context_length": parts[TRAIN].pieces.context_length,
            "num_activations": {n: len(p.piece) for n, p in zip(PART_NAMES, parts, strict=True)},
            "attributes": parts[TRAIN].facts.names,
            "groups": {n: p.facts.group_names for n, p in zip(PART_NAMES, parts, strict=True)},
            "keeps_activations": keeps_activations,
        }
        sizes = {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())}
        identity = {k: facts[k] for k in ("subject", "tokens", "positions", "context_length")}
        schema = {**facts, "fingerprint": digest_of(identity), "files": sizes}
        text = json.dumps(schema, indent=1, sort_keys=True)
        (unfinished / SCHEMA).write_text(text + "\n", encoding="utf-8")
        os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_part(folder: Path, name: str, part: DumpedPart, keeps_activations: bool) -> None:
    for kind, values in (
        ("piece", part.piece),
        ("position", part.position),
        ("attributes", part.facts.attributes),
        ("group", part.facts.group),
    ):
        np.save(folder / f"{name}.{kind}.npy", values)
    if not keeps_activations:
        return
    shape = (len(part.piece), part.found.shape[-1])
    path = folder / f"{name}.activations.npy"
    written = np.lib.format.open_memmap(path, "w+", part.found.dtype, shape)
    end = 0
    for activations, _, _ in part.chunks():
        start, end = end, end + len(activations)
        written[start:end] = activations
    written.flush()
