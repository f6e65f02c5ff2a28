"""Index of one shard for one layout and context length: the rows that its documents fill.

It is made once, in windows of fixed size, so that memory does not grow with the shard. It needs
only the ends of documents unless some are held out. Every run and rank maps its files.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.plan import hash_ids
from datamodules.core.store import ArrayFile, cache_root, digest_of, made_once
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION, TextSplit
from datamodules.text.packing import best_fit, cut_into_pieces

INDEX_VERSION = 2
DOCUMENTS_AT_ONCE, PIECES_AT_ONCE, TOKENS_AT_ONCE = 1 << 18, 1 << 20, 1 << 20
COUNTS = ("rows", "positions", "bytes of a token")  # columns of counts.npy, per part


@dataclass(frozen=True)
class IndexOptions:
    """Options of an index.

    Args:
        layout: how rows are filled, see `ShardDataModule`.
        context_length: maximum number of positions per row.
        split: shares of documents to hold out, if any.
    """

    layout: str
    context_length: int
    split: TextSplit | None = None

    def folder(self, digest: str) -> Path:
        """Return the cache folder for content with this digest and these options, below one of 256
        folders."""
        name = digest_of([INDEX_VERSION, digest, asdict(self)])
        return cache_root() / "shards" / name[:2] / name

    @property
    def dtype(self) -> np.dtype:
        """Dtype that holds the number of positions of a row."""
        return np.dtype(np.uint16 if self.context_length < 1 << 16 else np.uint32)


@dataclass(frozen=True)
class Shard:
    """The files of one shard in the format of datatrove's tokeniser: X.ds, tokens of 2 or 4 bytes,
    little-endian, and X.ds.index, the end of each document."""

    name: str  # path of X.ds in its folder
    folder: Any  # a Path, or `RemoteShards`
    digest: str  # of the content of both files
    num_bytes: int  # size of X.ds

    def __str__(self) -> str:
        return f"{getattr(self.folder, 'url', self.folder)}/{self.name}"

    def file(self, suffix: str = "") -> Path:
        """Return the local path of a file; open it at once, see `RemoteShards.local_file`."""
        name = self.name + suffix
        return self.folder.local_file(name) if self.is_remote else self.folder / name

    @property
    def is_remote(self) -> bool:
        """Whether the shard is in object storage."""
        return not isinstance(self.folder, Path)

    def ends(self) -> np.ndarray:
        """Return where each document ends, [D] uint64, memory-mapped."""
        path = self.file(".index")
        number = path.stat().st_size // 8  # `token_bytes` detects a truncated file
        return np.memmap(path, "<u8", "r", shape=number) if number else np.empty(0, "<u8")

    def token_bytes(self) -> int:
        """Return the bytes of a token, 2 or 4; ValueError if the two files disagree."""
        ends = self.ends()
        num_tokens = int(ends[-1]) if len(ends) else 0
        if self.num_bytes not in (2 * num_tokens, 4 * num_tokens):
            raise ValueError(
                f"{self} has {self.num_bytes:,} bytes, and its index ends at token "
                f"{num_tokens:,}: tokens have 2 or 4 bytes. Write both files again."
            )
        return self.num_bytes // num_tokens if num_tokens else 2

    def index(self, options: IndexOptions) -> Path:
        """Return the folder of the index, made at first use; ValueError for damaged files."""
        return made_once(options.folder(self.digest), lambda folder: _write(folder, self, options))


def open_tokens(shard: Shard, token_bytes: int) -> np.ndarray:
    """Return the tokens of a shard, memory-mapped: [n] uint16 or uint32."""
    if not shard.num_bytes:
        return np.empty(0, np.uint16)
    return np.memmap(shard.file(), f"<u{token_bytes}", "r").view(np.ndarray)


def content_hashes(tokens: np.ndarray, ends: np.ndarray, before: int) -> np.ndarray:
    """Return a hash of the tokens of each document, [D] uint64, for successive documents with these
    ends [D] int64; `before` is the end of the document before them."""
    starts, hashes, first = np.append(before, ends[:-1]), np.zeros(len(ends), np.uint64), 0
    while first < len(ends):
        within = int(np.searchsorted(ends, starts[first] + TOKENS_AT_ONCE, side="right"))
        some = slice(first, max(first + 1, within))
        own_starts, own_ends = starts[some] - starts[first], ends[some] - starts[first]
        own = tokens[starts[first] : starts[first] + own_ends[-1]].astype(np.uint64)
        places = np.arange(len(own)) - np.repeat(own_starts, own_ends - own_starts)
        words = hash_ids(own | places.astype(np.uint64) << np.uint64(32))
        sums = np.append(np.uint64(0), np.cumsum(words, dtype=np.uint64))  # modulo 2^64
        hashes[some], first = sums[own_ends] - sums[own_starts], some.stop
    return hashes


def documents_of(
    shard: Shard, split: TextSplit | None, are_hashed: bool = False
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield first token, positions, part and hash (or 0) of successive documents, some at a
    time; ValueError for damaged files."""
    ends, before, token_bytes = shard.ends(), 0, shard.token_bytes()
    for first in range(0, len(ends), DOCUMENTS_AT_ONCE):
        stops = ends[first : first + DOCUMENTS_AT_ONCE].astype(np.int64)
        starts = np.append(before, stops[:-1])
        if (stops < starts).any():
            raise ValueError(f"{shard}.index is damaged: its ends do not ascend.")
        parts, hashes = np.full(len(stops), TRAIN), np.zeros(len(stops), np.uint64)
        if split is not None or are_hashed:
            hashes = content_hashes(open_tokens(shard, token_bytes), stops, before)
        if split is not None:
            lots = hash_ids(hashes, split.seed) / 2.0**64
            parts[lots < split.test_share + split.validation_share] = VALIDATION
            parts[lots < split.test_share] = TEST
        yield starts, np.maximum(stops - starts - 1, 0), parts, hashes
        before = int(stops[-1])


class _Part:
    """Index files of one part while they are written: starts [N] and sizes [N], first token and
    positions of each piece; lengths [R], positions of each row; stops [R], end of its pieces."""

    def __init__(self, folder: Path, name: str, options: IndexOptions, stack: ExitStack) -> None:
        dtypes: dict[str, Any] = {"lengths": options.dtype, "stops": np.int64}
        dtypes |= {"starts": np.int64, "sizes": options.dtype}
        self.files = {
            key: stack.enter_context(ArrayFile(folder / f"{name}.{key}.npy", dtype))
            for key, dtype in dtypes.items()
        }
        self.options, self.pending = options, np.empty((2, 0), np.int64)
        self.num_positions = 0

    def add(self, starts: np.ndarray, num_positions: np.ndarray) -> None:
        """Add documents [D]."""
        pieces = cut_into_pieces(starts, num_positions, self.options.context_length)
        self.pending = np.concatenate([self.pending, pieces[:2]], axis=1)
        self.num_positions += int(num_positions.sum())
        while self.pending.shape[1] >= PIECES_AT_ONCE:
            self.fill()

    def fill(self) -> None:
        """Fill rows with the next `PIECES_AT_ONCE` pending pieces, or all of them."""
        (starts, sizes), self.pending = np.split(self.pending, [PIECES_AT_ONCE], axis=1)
        order, offsets = np.arange(len(sizes)), np.arange(len(sizes) + 1)
        if self.options.layout == "packed":
            order, offsets = best_fit(sizes, self.options.context_length)
        self.files["lengths"].add(np.diff(np.append(0, np.cumsum(sizes[order]))[offsets]))
        self.files["stops"].add(self.files["starts"].length + offsets[1:])
        self.files["starts"].add(starts[order])
        self.files["sizes"].add(sizes[order])


def _write(folder: Path, shard: Shard, options: IndexOptions) -> None:
    """Fill the folder of an index."""
    counts = np.zeros((len(PART_NAMES), len(COUNTS)), np.int64)
    with ExitStack() as stack:
        names = PART_NAMES if options.split else PART_NAMES[:1]
        files = [_Part(folder, name, options, stack) for name in names]
        for starts, num_positions, parts, _ in documents_of(shard, options.split):
            for part, own in enumerate(files):
                own.add(starts[parts == part], num_positions[parts == part])
        for part, own in enumerate(files):
            own.fill()
            counts[part] = own.files["lengths"].length, own.num_positions, shard.token_bytes()
    np.save(folder / "counts.npy", counts)
