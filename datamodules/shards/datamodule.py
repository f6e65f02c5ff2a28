"""Datamodule of language models for token data of any size: the rows of token shards."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.core.batches import TERM
from datamodules.core.plan import MicroBatch, PlanRequest, check_range
from datamodules.core.planned import Stage
from datamodules.files.audit import Audit, AuditPart
from datamodules.files.splitting import PART_NAMES, TRAIN, VALIDATION, TextSplit
from datamodules.files.tables import Files, paths
from datamodules.shards.index import IndexOptions, documents_of
from datamodules.shards.order import ShardedRequest
from datamodules.shards.remote import is_url
from datamodules.shards.store import (
    POSITIONS,
    ROWS,
    ShardRows,
    ShardStore,
    find_shards,
    tokenizer_of,
)
from datamodules.text.packing import Piece, TokenDataset
from datamodules.text.texts import LanguageModelDataModule

FETCHED_AHEAD = 64  # micro-batches whose shards are prefetched


class ShardDataset(TokenDataset):
    """Rows of shards: a sample is a list of pieces of documents.

    Args:
        stores: the stores of one part; the first provides the tokenizer.
    """

    lengths: Any  # `ShardRows`
    target_counts: Any

    def __init__(self, stores: Sequence[ShardStore], part: int) -> None:
        store: Any = stores[0]
        self.store, self.lengths = store, ShardRows(stores, part)
        self.target_counts, options = {TERM: self.lengths}, store.options
        self.layout, self.context_length = options.layout, options.context_length
        self.is_padded, self.vocab_size = options.layout != "documents", store.tokenizer.vocab_size
        self.fingerprint = "-".join([*(s.fingerprint for s in stores), PART_NAMES[part]])

    def stretches(self, sample_id: int) -> tuple[int, list[tuple[int, int]]]:
        """Return the shard of a row, and start and size of each of its pieces in the shard."""
        ((shard,), (row,)) = self.lengths.located(np.array([sample_id]))
        stops = self.lengths.array(shard, "stops")
        own = slice(stops[row - 1] if row else 0, stops[row])
        each = [self.lengths.array(shard, name)[own].tolist() for name in ("starts", "sizes")]
        return shard, list(zip(*each, strict=True))

    def document_lengths(self, ids: np.ndarray) -> np.ndarray:
        return np.array([size for i in ids.tolist() for _, size in self.stretches(i)[1]])

    def example(self, sample_id: int, epoch: int) -> list[Piece]:
        """Return the pieces of one row."""
        shard, pieces = self.stretches(sample_id)
        tokens = self.lengths.tokens(shard)
        texts = [tokens[s : s + size + 1].astype(np.int64) for s, size in pieces if size > 0]
        return [Piece(text[:-1], text[1:]) for text in texts]

    def collate(self, examples: list[list[Piece]]) -> dict[str, Any]:
        """Return the rows; ValueError for a token id that the tokenizer lacks."""
        batch = super().collate(examples)
        largest = int(max(batch["input_ids"].max(), batch["labels"].max()))
        if largest >= self.vocab_size:
            raise ValueError(
                f"the shards hold token {largest}, and their tokenizer has {self.vocab_size}: name "
                "the one that made them with data.tokenizer."
            )
        return batch


@dataclass(frozen=True)
class SourceOptions:
    """A source of a mixture.

    Args:
        files: a folder of shards, or a list of them.
        weight: passes over the source per epoch: 1 takes each row once, 2 twice, 0.5 half of the
            rows, and the other half in the next epoch.
        tokens: positions per epoch, counted in rows of mean length; replaces `weight`.
    """

    files: str | list[str]
    weight: float = 1.0
    tokens: int | None = None

    def __post_init__(self) -> None:
        check_range("data.sources", 0, weight=self.weight, tokens=self.tokens)

    def num_samples(self, rows: int, positions: int) -> int:
        """Return the samples per epoch of a source with these numbers of rows and positions;
        ValueError if there are none."""
        share = self.weight if self.tokens is None else self.tokens / max(1, positions)
        if not round(share * rows):
            raise ValueError(
                f"{self.files} has {rows:,} rows of {positions:,} positions, of which {self} takes "
                "none; raise its weight or its tokens, or leave the source out."
            )
        return round(share * rows)


class ShardDataModule(LanguageModelDataModule):
    """Serves rows of token shards, as written by datatrove's tokeniser or `unisono prepare`.

    A start reads only sizes and digests, whatever the number of documents: rows are packed once per
    shard and context length, and the order of an epoch is computed on demand. Documents keep their
    tokens; those longer than `context_length` are cut into pieces.

    Args:
        train_files: a folder of shards, or a list of them.
        sources: name -> source of a mixture, instead of `train_files`. Each gives every epoch an
            exact number of samples, and continues in the next epoch where it stopped.
        validation_files, test_files: as `train_files`. Without validation files, training documents
            are held out by the shares of `split` and a hash of their tokens, equal ones together.
        layout: `packed` or `documents`, see `TextDataModule`.
        shuffle_shards: how many shards are shuffled together: each pass shuffles the shards, then
            the rows within each such group. `None` shuffles the rows of all shards. A small number
            limits the shards that a node needs at a time.
        split: shares of documents to hold out. This reads all tokens once, so for object storage
            validation files or shares of 0 are better.
        cache_gib: disk space on each machine for files of object storage (s3://…, gs://…,
            https://…); two groups of `shuffle_shards` must fit.
        language_model: context, prediction, batches, and the tokenizer of shards without
            tokenizer.json, see `LanguageModelDataModule`.

    Raises:
        ValueError: a value out of range, no folder, or both `train_files` and `sources`.
    """

    def __init__(
        self,
        train_files: Files = None,
        sources: dict[str, SourceOptions] | None = None,
        layout: Literal["packed", "documents"] = "packed",
        shuffle_shards: int | None = None,
        split: TextSplit = TextSplit(0.01),  # noqa: B008 - frozen
        cache_gib: float = 100.0,
        **language_model: Any,
    ) -> None:
        super().__init__(train_files=train_files, layout=layout, split=split, **language_model)
        check_range("data", 1, shuffle_shards=shuffle_shards)
        if bool(train_files) == bool(sources):
            raise ValueError("name folders of shards in one of data.train_files, data.sources.")
        self.sources: Mapping[str, SourceOptions] = sources or {
            "": SourceOptions(train_files or [])
        }
        self.files[TRAIN] = [name for one in self.sources.values() for name in folders(one.files)]
        self.shuffle_shards, self.cache_gib = shuffle_shards, cache_gib
        self._stores: dict[int, list[ShardStore]] = {}  # of parts with folders

    def open_store(self, stage: str) -> Any:
        """Open the stores that a stage reads, make missing indices, and return the first store; all
        have the same `tokenizer`."""
        sources = [folders(one.files) for one in self.sources.values()]
        named = {part: [folders(some)] for part, some in self.files.items() if some}
        named |= {TRAIN: sources} if TRAIN in named else {}
        if stage != "fit" and VALIDATION in named:  # nothing is then held out of training
            del named[TRAIN]
        files: Any = {part: some[0] for part, some in named.items()}
        split = self.split.beside(files)
        is_given = self.tokenizer_options is not None or self.model.tokenizer is not None
        all_folders = [folder for some in named.values() for one in some for folder in one]
        tokenizer = tokenizer_of(all_folders, self._options() if is_given else None)
        self._stores = {}
        for part, some in named.items():
            index = IndexOptions(self.layout, self.context_length, split if part == TRAIN else None)
            option = f"data.{PART_NAMES[part]}_files"
            self._stores[part] = [
                ShardStore(
                    [s for f in one for s in find_shards(f, option, self.cache_gib)],
                    *(index, tokenizer),
                )
                for one in some
            ]
        for store in self._stores.get(TRAIN, ()):
            sizes = sorted(one.num_bytes for one in store.shards if one.is_remote)
            needed = sum(sizes[-2 * (self.shuffle_shards or len(sizes)) :]) / 2**30
            if needed > self.cache_gib:
                raise ValueError(
                    f"shards that are shuffled together and the next ones take {needed:.3g} GiB, "
                    f"and data.cache_gib is {self.cache_gib:g}; raise it, or lower "
                    "data.shuffle_shards."
                )
        return self._stores[min(self._stores)][0]

    def part_dataset(self, part: int) -> ShardDataset:
        """Return the rows of a part, from its own folders or held out of another part."""
        if part in self._stores:
            return ShardDataset(self._stores[part], TRAIN)
        return ShardDataset(self._stores[min(self._stores)], part)

    def request(self, stage: Stage) -> PlanRequest:
        """Return all facts that determine the plan of a stage."""
        request, together = super().request(stage), 0
        if stage == "predict":
            return request
        sources: Any = [("", request.num_samples, (request.num_samples,))]
        if stage == "train":
            together, sources = self.shuffle_shards or 0, []
            pairs = zip(self.sources.items(), self._stores[TRAIN], strict=True)
            for (name, source), store in pairs:
                rows, positions = store.counts[:, TRAIN, [ROWS, POSITIONS]].T
                samples = source.num_samples(int(rows.sum()), int(positions.sum()))
                of_shards = rows.tolist() if together else [int(rows.sum())]
                sources.append((name, samples, tuple(of_shards)))
        values = vars(request) | {"num_samples": sum(samples for _, samples, _ in sources)}
        return ShardedRequest(**values, sources=tuple(sources), shuffle_shards=together)

    def micro_batches(self, stage: Stage) -> Iterator[MicroBatch]:
        """Yield this replica's micro-batches, and prefetch later ones from object storage."""
        ahead = deque[MicroBatch]()
        rows: Any = self.datasets[stage].lengths
        is_remote = isinstance(rows, ShardRows) and rows.is_remote
        for batch in super().micro_batches(stage):
            ahead.append(batch)
            if is_remote:
                rows.prefetch(batch.ids)
            if not is_remote or len(ahead) > FETCHED_AHEAD:
                yield ahead.popleft()
        yield from ahead

    def audit(self) -> Audit:
        """Return contents of the shards; documents are compared by hashes of their tokens."""
        self.store = self.open_store("fit")
        audit = Audit("documents", "tokens", limit=self.context_length + 1)
        audit.notes.append(("tokenizer", f"{self.store.tokenizer.vocab_size:,} tokens"))
        sizes, keys = ([[np.empty(0, np.uint64)] for _ in PART_NAMES] for _ in range(2))
        for part, stores in self._stores.items():
            split = stores[0].options.split
            for shard in (shard for store in stores for shard in store.shards):
                for _, positions, parts, hashes in documents_of(shard, split, are_hashed=True):
                    for own in np.unique(parts).tolist():
                        sizes[part or own].append(positions[parts == own].astype(np.uint64) + 1)
                        keys[part or own].append(hashes[parts == own])
        for part, name in enumerate(PART_NAMES):
            rows = self.part_dataset(part).lengths
            columns: Any = {"trained on": rows.sum(), "rows": len(rows)}
            if len(rows):
                columns["used"] = f"{100 * rows.sum() / len(rows) / self.context_length:.1f} %"
                lengths, hashed = np.concatenate(sizes[part]), np.concatenate(keys[part])
                audit.parts.append(AuditPart(name, lengths, hashed, columns))
        return audit


def folders(files: Files) -> list[str]:
    """Return the folders that an option names."""
    return [name if is_url(name) else str(Path(name).expanduser()) for name in paths(files)]
