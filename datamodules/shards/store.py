"""Stores of token shards with their indices: row counts, row lengths and tokens."""

import json
import logging
import multiprocessing
import platform
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from datamodules.core.planned import usable_cpus
from datamodules.core.store import digest_of, file_digest, made_once, mapped_array, text_hash
from datamodules.files.documents import files_in
from datamodules.files.splitting import PART_NAMES
from datamodules.shards.index import COUNTS, IndexOptions, Shard, open_tokens
from datamodules.shards.remote import RemoteShards, is_url, local_copy
from datamodules.tokenizers.text import TextTokenizer, TokenizerOptions, make_tokenizer

log = logging.getLogger("lightning.pytorch.datamodules")  # Lightning shows its loggers' infos
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
ROWS, POSITIONS, TOKEN_BYTES = range(len(COUNTS))
SERIAL_DOCUMENTS = 1 << 18  # indexing fewer takes less time than starting processes
KEPT_OPEN = 1 << 13  # index files mapped at a time; Linux allows 65,530 maps
KEPT_SHARDS = 64  # token files mapped at a time; a map keeps the disk space of a deleted file
opened = lru_cache(KEPT_OPEN)(mapped_array)
opened_tokens = lru_cache(KEPT_SHARDS)(open_tokens)


def find_shards(named: str, option: str, cache_gib: float) -> list[Shard]:
    """Return the shards in a folder and below, or at a URL, sorted by name. Digests come from the
    manifest; without one the files are read and hashed.

    Raises:
        FileNotFoundError: there are no shards.
        ValueError: the size of a file differs from the manifest.
    """
    folder: Any = Path(named)
    if is_url(named):
        folder = RemoteShards(named, cache_gib)
        entries = [*folder.entries.values()]
    elif (folder / MANIFEST).is_file():
        entries = json.loads((folder / MANIFEST).read_text("utf-8"))["shards"]
    else:
        paths = files_in(folder, (".ds",), option)
        entries = [{"name": path.relative_to(folder).as_posix()} for path in paths]

    def shard_of(entry: dict[str, Any]) -> Shard:
        name, size = entry["name"], entry.get("bytes")
        own: Any = size if is_url(named) else (folder / name).stat().st_size
        if size not in (None, own):
            raise ValueError(
                f"{folder / name} has {own:,} bytes, and {folder / MANIFEST} says {size:,}: copy "
                "it again, or prepare the folder again."
            )
        shard = Shard(name, folder, "", own)
        digest = entry.get("digest") or file_digest(shard.file())
        of_index = entry.get("index_digest") or file_digest(shard.file(".index"))
        return replace(shard, digest=digest_of([digest, of_index]))

    if not entries:
        raise FileNotFoundError(f"{option}: {named}/{MANIFEST} lists no shard; prepare it again.")
    entries.sort(key=lambda entry: PurePosixPath(entry["name"]))
    with ThreadPoolExecutor(usable_cpus()) as pool:  # hashing releases the GIL
        return list(pool.map(shard_of, entries))


def tokenizer_of(folders: Sequence[str], given: TokenizerOptions | None) -> TextTokenizer:
    """Return the tokenizer of shards, from tokenizer.json in their folders or from `given`.

    Raises:
        FileNotFoundError: a folder does not exist, or a URL has no tokenizer.json.
        ValueError: there is no tokenizer, or two differ.
    """
    if gone := [name for name in folders if not is_url(name) and not Path(name).is_dir()]:
        raise FileNotFoundError(
            f"there is no folder {gone[0]}; name one of shards, as `unisono prepare` writes them."
        )
    named = {} if given is None else {"data.tokenizer": make_tokenizer(given, iter(()))}
    for folder in folders:
        name = f"{folder}/{TOKENIZER}"
        if is_url(folder) or Path(name).is_file():
            with local_copy(name) as path:
                values = json.loads(path.read_text("utf-8"))
            if "backend" in values:  # else a file of Hugging Face
                named[name] = TextTokenizer.from_dict(values)
    if not named:
        raise ValueError(
            f"{folders[0]} holds no {TOKENIZER} of `unisono prepare`; name the tokenizer of the "
            "shards with data.tokenizer, such as --data.tokenizer.kind=folder "
            "--data.tokenizer.path=FOLDER."
        )
    (first, tokenizer), *others = named.items()
    for name, other in others:
        if (tokenizer.backend.to_str(), tokenizer.end_id) != (other.backend.to_str(), other.end_id):
            raise ValueError(
                f"{first} and {name} are different tokenizers; name shards of one tokenizer, and "
                "where they bring it, leave data.tokenizer out: --data.tokenizer=null."
            )
    return tokenizer


class ShardStore:
    """Shards of one or more folders in order, with their indices, which are made if missing;
    `tokenizer` made the tokens."""

    def __init__(
        self, shards: Sequence[Shard], options: IndexOptions, tokenizer: TextTokenizer
    ) -> None:
        self.shards, self.options, self.tokenizer = list(shards), options, tokenizer
        self.folder = options.folder(digest_of([shard.digest for shard in shards]))
        # Hex digest of the shards' content and the options.
        self.fingerprint = self.folder.name
        self.folders = [options.folder(shard.digest) for shard in shards]  # of each shard's index
        lacking = [s for s, path in zip(shards, self.folders, strict=True) if not path.is_dir()]
        if lacking:
            self._make_indices(lacking)
        made_once(self.folder, self._gather_counts)
        self.counts = np.load(self.folder / "counts.npy")  # [shards, parts, COUNTS] int64

    def _make_indices(self, shards: list[Shard]) -> None:
        """Make indices on all CPUs; machines that share the cache begin at different shards."""
        start = text_hash(platform.node()) % len(shards)
        shards, make = shards[start:] + shards[:start], partial(Shard.index, options=self.options)
        workers, num_documents = usable_cpus(), sum(len(shard.ends()) for shard in shards)
        if min(workers, len(shards)) == 1 or num_documents < SERIAL_DOCUMENTS:
            list(map(make, shards))
            return
        log.info(f"Indexing {num_documents:,} documents in {len(shards):,} shards, once.")
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        with ProcessPoolExecutor(workers, mp_context=context) as pool:
            list(pool.map(make, shards))

    def _gather_counts(self, folder: Path) -> None:
        counts = [np.load(path / "counts.npy") for path in self.folders]
        np.save(folder / "counts.npy", np.stack(counts))


class ShardRows:
    """Lengths of the rows of one part (0 train, 1 validation, 2 test) of stores with equal options,
    numbered over all their shards. Indexing by sample ids or a slice reads the lengths on demand,
    as int64; ids wrap around at the number of rows.

    Attributes:
        counts: [shards, COUNTS] int64.
        begins, ends: [shards] int64, first row of each shard, and the end (exclusive).
    """

    def __init__(self, stores: Sequence[ShardStore], part: int) -> None:
        self.options, self.name = stores[0].options, PART_NAMES[part]
        self.shards = [shard for store in stores for shard in store.shards]
        self.folders = [folder for store in stores for folder in store.folders]
        self.counts = np.concatenate([store.counts[:, part] for store in stores])
        self.ends, self.dtype = np.cumsum(self.counts[:, ROWS]), self.options.dtype
        self.is_remote = any(shard.is_remote for shard in self.shards)
        self.begins = self.ends - self.counts[:, ROWS]

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, ids: Any) -> Any:
        if isinstance(ids, slice):
            start, stop, _ = ids.indices(len(self))
            first, last = np.searchsorted(self.ends, [start, stop - 1], side="right").tolist()
            own = np.empty(0, np.int64)
            for shard in range(first, last + 1 if start < stop else first):
                some = self.array(shard, "lengths")[max(0, start - self.begins[shard]) :]
                own = np.append(own, some[: stop - start - len(own)])
            return own
        numbers = np.asarray(ids)
        shards, rows = self.located(numbers.reshape(-1))
        by_shard, lengths = np.argsort(shards, kind="stable"), np.empty(len(rows), np.int64)
        seams = np.flatnonzero(np.diff(shards[by_shard])) + 1
        for own in np.split(by_shard, seams) if len(rows) else ():
            lengths[own] = self.array(int(shards[own[0]]), "lengths")[rows[own]]
        return lengths.reshape(numbers.shape)[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(dtype or np.int64)

    def sum(self) -> int:
        """Return the number of positions of all rows."""
        return int(self.counts[:, POSITIONS].sum())

    def located(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the shard of each sample [n], and its row within the shard."""
        rows = ids % max(1, len(self))
        shards = np.searchsorted(self.ends, rows, side="right")
        return shards, rows - self.begins[shards]

    def array(self, shard: int, name: str) -> np.ndarray:
        """Return an array of a shard's index, memory-mapped."""
        return opened(self.folders[shard] / f"{self.name}.{name}.npy")

    def tokens(self, shard: int) -> np.ndarray:
        """Return the tokens of a shard, memory-mapped: [n] uint16 or uint32."""
        return opened_tokens(self.shards[shard], int(self.counts[shard, TOKEN_BYTES]))

    def prefetch(self, ids: np.ndarray) -> None:
        """Start fetching the remote shards of these samples [n]."""
        for number in np.unique(self.located(ids)[0]).tolist():
            if (shard := self.shards[number]).is_remote:
                shard.folder.prefetch([shard.name])
