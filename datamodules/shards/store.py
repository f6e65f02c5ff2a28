"""Folders of shards, opened with their indices: numbers of rows, their lengths and their tokens."""

import json
import logging
import multiprocessing
import platform
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from datamodules.core.planned import usable_cpus
from datamodules.core.store import (
    cache_root,
    digest_of,
    file_digest,
    made_once,
    mapped_array,
    text_hash,
)
from datamodules.files.documents import files_in
from datamodules.files.splitting import PART_NAMES
from datamodules.shards.index import COUNTS, FOLDERS, IndexOptions, Shard, open_tokens
from datamodules.tokenizers.text import TextTokenizer, TokenizerOptions, make_tokenizer

log = logging.getLogger("lightning.pytorch.datamodules")  # Lightning shows its own at this level
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
ROWS, POSITIONS, LONGEST, DOCUMENTS, TOKEN_BYTES = range(len(COUNTS))
KEPT_OPEN = 1 << 13  # files that are mapped at a time; systems allow 65,530
SERIAL_DOCUMENTS = 1 << 18  # fewer are indexed sooner than a process is started
opened = lru_cache(KEPT_OPEN)(mapped_array)
opened_tokens = lru_cache(KEPT_OPEN)(open_tokens)


def find_shards(folder: Path, option: str) -> list[Shard]:
    """Return the shards of a folder and below it, by name.

    Their digests are those of manifest.json, or of the files, which are read once.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file has not the size of which the manifest speaks.
    """
    listed: dict[Path, str] = {}
    if (folder / MANIFEST).is_file():
        for entry in json.loads((folder / MANIFEST).read_text("utf-8"))["shards"]:
            path = folder / PurePosixPath(entry["name"])
            if path.stat().st_size != entry["bytes"]:
                raise ValueError(
                    f"{path} has {path.stat().st_size:,} bytes, and {folder / MANIFEST} says "
                    f"{entry['bytes']:,}: copy it again, or prepare the folder again."
                )
            listed[path] = entry["digest"]
    paths = sorted(listed) or files_in(folder, (".ds",), option)

    def found(path: Path) -> Shard:
        index = file_digest(path.with_name(f"{path.name}.index"))
        return Shard(path, digest_of([listed.get(path) or file_digest(path), index]))

    with ThreadPoolExecutor(usable_cpus()) as pool:  # digests are made beside the interpreter
        return list(pool.map(found, paths))


def tokenizer_of(folders: Sequence[Path], given: TokenizerOptions | None) -> TextTokenizer:
    """Return the tokenizer of shards: of tokenizer.json in their folder, else the given one.

    Raises:
        ValueError: there is none, or folder and options name different ones.
    """
    wanted = None if given is None else make_tokenizer(given, iter(()))
    for folder in folders:
        path = folder / TOKENIZER
        if not path.is_file():
            continue
        values = json.loads(path.read_text("utf-8"))
        if "backend" in values:
            found = TextTokenizer.from_dict(values)
        else:
            found = make_tokenizer(TokenizerOptions("folder", path=str(folder)), iter(()))
        if wanted is None:
            wanted = found
        if (wanted.backend.to_str(), wanted.end_id) != (found.backend.to_str(), found.end_id):
            raise ValueError(
                f"the shards in {folder} were made with another tokenizer than the one that is "
                "named before: leave data.tokenizer out, or name shards of one tokenizer."
            )
    if wanted is None:
        raise ValueError(
            f"{folders[0]} holds no {TOKENIZER}; name the tokenizer of the shards with "
            "data.tokenizer, such as --data.tokenizer.kind=folder --data.tokenizer.path=FOLDER."
        )
    return wanted


class ShardStore:
    """Shards in the order of their names with their indices, which are made where they lack.

    Args:
        shards: of one or several folders.
        options: of the index.
        tokenizer: that made the tokens.

    Attributes:
        fingerprint: hex digest of their content and of the options.
        folder: of the sums of all indices in the cache.
        counts: [shards, parts, COUNTS] int64.
    """

    def __init__(
        self, shards: Sequence[Shard], options: IndexOptions, tokenizer: TextTokenizer
    ) -> None:
        self.shards, self.options, self.tokenizer = list(shards), options, tokenizer
        self.fingerprint = digest_of([[shard.digest for shard in shards], options.facts()])
        self.folder = cache_root() / "shards" / self.fingerprint[:FOLDERS] / self.fingerprint
        if not all(shard.index_folder(options).is_dir() for shard in shards):
            self._make_indices()
        made_once(self.folder, self._write_counts)
        self.counts = np.load(self.folder / "counts.npy")

    def _make_indices(self) -> None:
        """Make what lacks, by all CPUs; other machines with the same cache begin elsewhere."""
        lacking = [s for s in self.shards if not s.index_folder(self.options).is_dir()]
        start = text_hash(platform.node()) % len(lacking)
        lacking = [*lacking[start:], *lacking[:start]]
        make = partial(Shard.index, options=self.options)
        workers, num_documents = usable_cpus(), sum(len(shard.ends) for shard in lacking)
        if min(workers, len(lacking)) == 1 or num_documents < SERIAL_DOCUMENTS:
            list(map(make, lacking))
            return
        log.info(f"Indexing {num_documents:,} documents in {len(lacking):,} shards, once.")
        way = "fork" if sys.platform == "linux" else "spawn"
        context = multiprocessing.get_context(way)
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            list(pool.map(make, lacking))

    def _write_counts(self, folder: Path) -> None:
        paths = [shard.index_folder(self.options) / "counts.npy" for shard in self.shards]
        np.save(folder / "counts.npy", np.stack([np.load(path) for path in paths]))


class PartOfShards:
    """Rows of one part of several stores, counted over all their shards.

    Args:
        stores: of the same options.
        part: 0 train, 1 validation, 2 test.

    Attributes:
        counts: [shards, COUNTS] int64.
        ends: [shards] int64, rows up to the end of each shard.
    """

    def __init__(self, stores: Sequence[ShardStore], part: int) -> None:
        self.options, self.name = stores[0].options, PART_NAMES[part]
        self.shards = [shard for store in stores for shard in store.shards]
        self.counts = np.concatenate([store.counts[:, part] for store in stores])
        self.ends = np.cumsum(self.counts[:, ROWS])

    def array(self, shard: int, name: str) -> np.ndarray:
        """Return an array of a shard's index, memory-mapped."""
        folder = self.shards[shard].index_folder(self.options)
        return opened(folder / f"{self.name}.{name}.npy")

    def tokens(self, shard: int) -> np.ndarray:
        """Return the tokens of a shard, memory-mapped: [n] uint16 or uint32."""
        return opened_tokens(self.shards[shard].tokens, int(self.counts[shard, TOKEN_BYTES]))

    def located(self, row: int) -> tuple[int, int]:
        """Return the shard of a row, and its number there."""
        shard = int(np.searchsorted(self.ends, row, side="right"))
        return shard, int(row - self.ends[shard] + self.counts[shard, ROWS])


class RowLengths:
    """Positions of the rows of shards [N], read where arrays of sample ids ask for them; an id
    beyond the rows is one of them again."""

    def __init__(self, rows: PartOfShards) -> None:
        self.rows = rows
        self.dtype = np.dtype(np.uint16 if rows.options.context_length < 1 << 16 else np.uint32)

    def __len__(self) -> int:
        return int(self.rows.ends[-1])

    def __getitem__(self, ids: Any) -> Any:
        """Return those of ids of any shape, or of a slice, as int64."""
        if isinstance(ids, slice):
            ids = np.arange(*ids.indices(len(self)))
        numbers = np.asarray(ids)
        flat = numbers.reshape(-1) % max(1, len(self))
        shards = np.searchsorted(self.rows.ends, flat, side="right")
        by_shard, found = np.argsort(shards, kind="stable"), np.empty(len(flat), np.int64)
        bounds = np.flatnonzero(np.diff(shards[by_shard], prepend=-1, append=-1))
        for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            places = by_shard[start:stop]
            shard = int(shards[places[0]])
            before = self.rows.ends[shard] - self.rows.counts[shard, ROWS]
            found[places] = self.rows.array(shard, "lengths")[flat[places] - before]
        return found.reshape(numbers.shape)[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or np.int64)

    def sum(self) -> int:
        """Return the positions of all rows."""
        return int(self.rows.counts[:, POSITIONS].sum())

    def max(self) -> int:
        """Return the most positions of a row."""
        return int(self.rows.counts[:, LONGEST].max(initial=0))
