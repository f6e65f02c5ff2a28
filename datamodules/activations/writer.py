"""Writes a store of activations: whole, under its name, or not at all.

Shapes: P pieces that were read, K most positions of one, N activations of a part, D features.
"""

import json
import os
import re
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
from datamodules.core.store import content_digest, digest_of, sync
from datamodules.files.splitting import PART_NAMES, TRAIN
from datamodules.files.tables import naming
from datamodules.text.store import TokenStore

CHUNK = 4096  # activations that are summed at once; another value moves the last bits


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
        stream, is_new = self.pieces.stream, np.diff(self.piece, prepend=-1) != 0
        row = np.cumsum(is_new) - 1
        slot = np.arange(len(self.piece)) - np.flatnonzero(is_new)[row]
        for start in range(0, len(self.piece), CHUNK):
            here = slice(start, start + CHUNK)
            piece, position = self.piece[here], self.position[here]
            tokens = stream.tokens[self.pieces.starts[piece] + position].astype(np.int64)
            yield self.found[row[here], slot[here]], tokens, position


def write_store(
    folder: Path,
    tokens: TokenStore,
    parts: list[DumpedPart],
    subject: SubjectFacts,
    rule: PositionRule,
    keeps_activations: bool,
) -> None:
    """Write a store. Memory holds one chunk of activations and the sums of each token.

    Args:
        folder: new.
        tokens: the documents.
        parts: train, validation, test.
        subject: where the activations come from.
        rule: how the positions were drawn.
        keeps_activations: false writes all but the activations.

    Raises:
        FileExistsError: the folder exists.
        ValueError: the training part has no activation, or one is no finite number.
        OSError: the disk is full; the folder does not exist then.
    """
    if folder.exists():
        raise FileExistsError(
            f"{folder} exists and is not overwritten; move it away, or name another folder with "
            "--data.predict_output."
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.unfinished")
    unfinished.mkdir()  # with the modes of the user's umask: the cache's own are narrower
    try:
        with naming(folder):
            facts = _write_files(unfinished, tokens, parts, keeps_activations)
            _write_schema(
                unfinished, {**facts, "subject": asdict(subject), "positions": asdict(rule)}
            )
            os.rename(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_files(
    folder: Path, tokens: TokenStore, parts: list[DumpedPart], keeps_activations: bool
) -> dict[str, object]:
    """Write all but the schema; return what it says of the files."""
    for path in sorted(tokens.folder.iterdir()):
        shutil.copyfile(path, folder / path.name)
    names = list(dict.fromkeys(name for part in parts for name in part.facts.names))
    for part, name in zip(parts, PART_NAMES, strict=True):
        _write_part(folder, name, part, names, keeps_activations)
    statistics = statistics_of(parts[TRAIN].chunks())
    statistics.save(folder / STATISTICS)
    return {
        **_facts_of_parts(parts, names),
        "version": STORE_VERSION,
        "norms": dict(zip(("mean", "deviation", "largest"), statistics.norms, strict=True)),
        "tokenizer": tokens.tokenizer.digest,
        "tokens": tokens.fingerprint,
        "keeps_activations": keeps_activations,
    }


def _facts_of_parts(parts: list[DumpedPart], attributes: list[str]) -> dict[str, object]:
    named = list(zip(PART_NAMES, parts, strict=True))
    return {
        "dtype": str(parts[TRAIN].found.dtype),
        "context_length": parts[TRAIN].pieces.context_length,
        "num_documents": {name: len(part.facts.group) for name, part in named},
        "num_activations": {name: len(part.piece) for name, part in named},
        "attributes": attributes,
        "groups": {name: part.facts.group_names for name, part in named},
    }


def _write_part(
    folder: Path, name: str, part: DumpedPart, names: list[str], keeps_activations: bool
) -> None:
    facts = part.facts.named(names)
    for kind, values in (
        ("piece", part.piece),
        ("position", part.position),
        ("attributes", facts.attributes),
        ("group", facts.group),
    ):
        np.save(folder / f"{name}.{kind}.npy", values)
    if not keeps_activations:
        return
    # Written one after the other, and not through a map: a full disk is an error there, and no
    # signal that ends the process.
    shape = (len(part.piece), part.found.shape[-1])
    with open(folder / f"{name}.activations.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(
            file,
            {
                "descr": np.lib.format.dtype_to_descr(part.found.dtype),
                "fortran_order": False,
                "shape": shape,
            },
        )
        for activations, _, _ in part.chunks():
            file.write(np.ascontiguousarray(activations).data)


def _write_schema(folder: Path, facts: dict[str, object]) -> None:
    """Write the schema last, when all else is on the disk."""
    files = {}
    for path in sorted(folder.iterdir()):
        sync(path)
        files[path.name] = {"bytes": path.stat().st_size, "digest": content_digest(path)}
    identity = {k: facts[k] for k in ("subject", "tokens", "positions", "context_length")}
    schema = {**facts, "fingerprint": digest_of(identity), "files": files}
    text = json.dumps(schema, indent=1, sort_keys=True)
    (folder / SCHEMA).write_text(text + "\n", encoding="utf-8")
    sync(folder / SCHEMA)


def _remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed here have left behind."""
    pattern = re.compile(rf"\.{re.escape(folder.name)}\.(\d+)\.unfinished")
    for path in folder.parent.iterdir():
        found = pattern.fullmatch(path.name)
        if found and not _is_running(int(found[1])):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        return True
    return process != os.getpid()
