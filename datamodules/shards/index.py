"""Index of one shard for one layout and context length: the rows that its documents fill.

It is made once, from the ends of the documents alone unless some are held out, in windows of fixed
seams, so that its memory is that of a window; every run and rank maps its files.
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
from datamodules.text.store import TokenStream

INDEX_VERSION = 1
DOCUMENTS_AT_ONCE, PIECES_AT_ONCE, TOKENS_AT_ONCE = 1 << 18, 1 << 20, 1 << 22
COUNTS = ("rows", "positions", "longest row", "documents", "bytes of a token")  # of each part
FOLDERS = 2  # digits of a digest that name the folder above: no folder holds them all


@dataclass(frozen=True)
class IndexOptions:
    """What an index depends on besides its shard.

    Args:
        layout: how rows are filled, see `ShardDataModule`.
        context_length: most positions of a row.
        split: the shares of documents that are held out, if any.
    """

    layout: str
    context_length: int
    split: TextSplit | None = None

    def facts(self) -> dict[str, Any]:
        """Return plain values."""
        return {"version": INDEX_VERSION, **asdict(self)}


@dataclass(frozen=True)
class Shard:
    """The files of one shard, as datatrove's tokeniser writes them.

    Args:
        tokens: path of X.ds, successive tokens of 2 or 4 bytes, little-endian.
        digest: of their content.
    """

    tokens: Path
    digest: str

    @property
    def ends(self) -> np.ndarray:
        """Where each document ends, [D] uint64, memory-mapped; a ValueError if files disagree."""
        path = self.tokens.with_name(f"{self.tokens.name}.index")
        size = path.stat().st_size
        ends = np.memmap(path, "<u8", "r") if size else np.empty(0, "<u8")
        num_tokens, num_bytes = int(ends[-1]) if size else 0, self.tokens.stat().st_size
        if num_bytes not in (2 * num_tokens, 4 * num_tokens):
            raise ValueError(
                f"{self.tokens} has {num_bytes:,} bytes, and its index ends at token "
                f"{num_tokens:,}: tokens have 2 or 4 bytes. Write both files again."
            )
        return ends

    @property
    def token_bytes(self) -> int:
        """Bytes of a token: 2 or 4."""
        ends = self.ends
        return self.tokens.stat().st_size // int(ends[-1]) if len(ends) and ends[-1] else 2

    def index_folder(self, options: IndexOptions) -> Path:
        """Return the place of its index in the cache."""
        name = digest_of([self.digest, options.facts()])
        return cache_root() / "shards" / name[:FOLDERS] / name

    def index(self, options: IndexOptions) -> Path:
        """Return the folder of its index, made at first use; a ValueError where the shard is
        damaged."""
        return made_once(self.index_folder(options), lambda folder: _write(folder, self, options))


def open_tokens(path: Path, token_bytes: int) -> np.ndarray:
    """Return the tokens of a shard, memory-mapped: [n] uint16 or uint32."""
    if not path.stat().st_size:
        return np.empty(0, np.uint16)
    return np.memmap(path, f"<u{token_bytes}", "r").view(np.ndarray)


def content_hashes(tokens: np.ndarray, ends: np.ndarray, before: int) -> np.ndarray:
    """Return [D] uint64, equal for documents of the same tokens alone.

    Args:
        tokens: of the shard.
        ends: [D] int64 of successive documents.
        before: end of the document before them.
    """
    starts, hashes = np.append(before, ends[:-1]), np.zeros(len(ends), np.uint64)
    first = 0
    while first < len(ends):
        within = np.searchsorted(ends, starts[first] + TOKENS_AT_ONCE, side="right")
        stop = max(first + 1, int(within))
        begin, sizes = starts[first], ends[first:stop] - starts[first:stop]
        own = tokens[begin : ends[stop - 1]].astype(np.uint64)
        places = np.arange(len(own)) - np.repeat(starts[first:stop] - begin, sizes)
        words = hash_ids(own | places.astype(np.uint64) << np.uint64(32))
        sums = np.append(np.uint64(0), np.cumsum(words, dtype=np.uint64))  # modulo 2^64
        hashes[first:stop] = sums[ends[first:stop] - begin] - sums[starts[first:stop] - begin]
        first = stop
    return hash_ids(hashes)


def _drawn(hashes: np.ndarray, split: TextSplit) -> np.ndarray:
    """Return the part [D] of each document, which depends on its hash and the split's seed."""
    lots = hash_ids(hashes, split.seed) / 2.0**64
    held = np.where(lots < split.test_share + split.validation_share, VALIDATION, TRAIN)
    return np.where(lots < split.test_share, TEST, held)


def _documents(shard: Shard, options: IndexOptions) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield first token, positions and part of some successive documents at a time."""
    ends, before = shard.ends, 0
    tokens = open_tokens(shard.tokens, shard.token_bytes)
    for first in range(0, len(ends), DOCUMENTS_AT_ONCE):
        stops = ends[first : first + DOCUMENTS_AT_ONCE].astype(np.int64)
        starts = np.append(before, stops[:-1])
        if (stops < starts).any():
            raise ValueError(f"{shard.tokens}.index is damaged: its ends do not ascend.")
        parts = np.zeros(len(stops), np.int64)
        if options.split is not None:
            parts = _drawn(content_hashes(tokens, stops, before), options.split)
        yield starts, np.maximum(stops - starts - 1, 0), parts
        before = int(stops[-1])


class _PartFiles:
    """The growing files of one part.

    lengths [R] are the positions of each row, stops [R] where its pieces end among starts [N] and
    sizes [N], the first token and the positions of each piece; `documents` needs no stops and
    sizes, `blocks` nothing but lengths.
    """

    def __init__(self, folder: Path, part: int, options: IndexOptions, stack: ExitStack) -> None:
        self.options, self.pending = options, np.empty((2, 0), np.int64)
        self.num_rows = self.num_positions = self.num_pieces = self.longest = 0
        short = np.uint16 if options.context_length < 1 << 16 else np.uint32
        dtypes: dict[str, Any] = {"lengths": short, "starts": np.int64}
        dtypes |= {"sizes": short, "stops": np.int64} if options.layout == "packed" else {}
        self.files = {
            name: stack.enter_context(ArrayFile(folder / f"{PART_NAMES[part]}.{name}.npy", dtype))
            for name, dtype in dtypes.items()
            if name == "lengths" or options.layout != "blocks"
        }

    def add(self, starts: np.ndarray, sizes: np.ndarray, is_last: bool = False) -> None:
        """Add pieces [n]; rows are filled from so many of them at a time, whatever n."""
        self.pending = np.concatenate([self.pending, [starts, sizes]], axis=1)
        while self.pending.shape[1] >= PIECES_AT_ONCE or (is_last and self.pending.size):
            some, self.pending = np.split(self.pending, [PIECES_AT_ONCE], axis=1)
            self._fill(*some)

    def _fill(self, starts: np.ndarray, sizes: np.ndarray) -> None:
        lengths = sizes
        if self.options.layout == "packed":
            order, offsets = best_fit(sizes, self.options.context_length)
            starts, sizes = starts[order], sizes[order]
            lengths = np.add.reduceat(sizes, offsets[:-1])
            self.files["sizes"].add(sizes)
            self.files["stops"].add(self.num_pieces + offsets[1:])
        self.num_pieces += len(sizes)
        self.files["starts"].add(starts)
        self.add_lengths(lengths)

    def add_lengths(self, lengths: np.ndarray) -> None:
        """Add the positions of rows."""
        self.files["lengths"].add(lengths)
        self.num_rows += len(lengths)
        self.num_positions += int(lengths.sum())
        self.longest = max(self.longest, int(lengths.max(initial=0)))


def _write(folder: Path, shard: Shard, options: IndexOptions) -> None:
    """Fill the folder of an index."""
    of_parts = range(len(PART_NAMES) if options.split else 1)
    num_documents = np.zeros(len(PART_NAMES), np.int64)
    with ExitStack() as stack:
        files = [_PartFiles(folder, part, options, stack) for part in of_parts]
        longest = options.context_length
        if options.layout == "blocks":
            ends = shard.ends
            num_documents[TRAIN] = len(ends)
            num_positions = max(0, int(ends[-1]) - 1) if len(ends) else 0
            for first in range(0, num_positions, PIECES_AT_ONCE * longest):
                stop = min(first + PIECES_AT_ONCE * longest, num_positions)
                starts = np.arange(first, stop, longest)
                files[TRAIN].add_lengths(np.minimum(longest, num_positions - starts))
        else:
            for starts, sizes, parts in _documents(shard, options):
                num_documents += np.bincount(parts, minlength=len(PART_NAMES))
                for part in of_parts:
                    own = parts == part
                    documents = TokenStream(np.empty(0), starts[own], sizes[own], np.empty(0))
                    files[part].add(*cut_into_pieces(documents, longest))
            for part in of_parts:
                files[part].add(np.empty(0, np.int64), np.empty(0, np.int64), is_last=True)
    counts = np.zeros((len(PART_NAMES), len(COUNTS)), np.int64)
    for part, one in enumerate(files):
        counts[part, :3] = one.num_rows, one.num_positions, one.longest
    counts[:, 3], counts[:, 4] = num_documents, shard.token_bytes
    np.save(folder / "counts.npy", counts)
