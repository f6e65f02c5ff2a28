"""Language models on token data of any size: the rows of shards, and their datamodule."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.core.batches import TERM
from datamodules.core.plan import Plan, PlanRequest, check_range, rng_for
from datamodules.core.planned import Stage
from datamodules.files.audit import Audit, AuditPart
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION, TextSplit
from datamodules.files.tables import Files
from datamodules.shards.index import IndexOptions
from datamodules.shards.order import ShardedRequest, planned_epoch
from datamodules.shards.store import (
    DOCUMENTS,
    ROWS,
    PartOfShards,
    RowLengths,
    ShardStore,
    find_shards,
    tokenizer_of,
)
from datamodules.text.packing import Piece, TokenDataset
from datamodules.text.texts import LanguageModelDataModule


class ShardDataset(TokenDataset):
    """Rows of shards. A sample is a list of pieces of documents, or of a stream where the layout is
    `blocks`: each shard is then a ring that every epoch cuts at other places.

    Args:
        stores: of one part.
        part: of them.
        seed: key of the places of blocks; `None` always cuts from the beginning (evaluation).
    """

    def __init__(self, stores: Sequence[ShardStore], part: int, seed: int | None) -> None:
        self.rows, self.seed, self.store = PartOfShards(stores, part), seed, stores[0]
        options = self.store.options
        self.layout, self.context_length = options.layout, options.context_length
        self.is_padded = options.layout != "documents"
        lengths: Any = RowLengths(self.rows)
        self.lengths, self.target_counts = lengths, {TERM: lengths}
        names = "-".join(store.fingerprint for store in stores)
        self.fingerprint = f"{names}-{PART_NAMES[part]}"

    def example(self, sample_id: int, epoch: int) -> list[Piece]:
        """Return the pieces of one row; a ValueError for a token that the tokenizer lacks."""
        shard, row = self.rows.located(sample_id % len(self.lengths))
        tokens = self.rows.tokens(shard)
        if self.layout == "blocks":
            stretches = self._block(row, len(tokens) - 1, shard, epoch)
        elif self.layout == "documents":
            size = int(self.rows.array(shard, "lengths")[row])
            stretches = [(int(self.rows.array(shard, "starts")[row]), size)]
        else:
            stops = self.rows.array(shard, "stops")
            some = slice(int(stops[row - 1]) if row else 0, int(stops[row]))
            starts, sizes = (self.rows.array(shard, name)[some] for name in ("starts", "sizes"))
            stretches = list(zip(starts.tolist(), sizes.tolist(), strict=True))
        pieces = []
        for start, size in stretches:
            some = tokens[start : start + size + 1].astype(np.int64)
            if some.max() >= self.store.tokenizer.vocab_size:
                raise ValueError(
                    f"{self.rows.shards[shard].tokens} holds token {some.max()}, and the tokenizer "
                    f"has {self.store.tokenizer.vocab_size}: name its own with data.tokenizer."
                )
            pieces.append(Piece(some[:-1], some[1:]))
        return pieces

    def _block(self, row: int, num_positions: int, shard: int, epoch: int) -> list[tuple[int, int]]:
        """Return start and size of the stretches of one block: two where it passes the end."""
        size = min(self.context_length, num_positions - row * self.context_length)
        phase = 0
        if self.seed is not None:
            phase = int(rng_for(self.seed, epoch, shard).integers(num_positions))
        start = (row * self.context_length + phase) % num_positions
        before_end = min(size, num_positions - start)
        return [(start, before_end), (0, size - before_end)][: 1 + (before_end < size)]

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the shard, and the text of each document of the row."""
        shard, _ = self.rows.located(sample_id % len(self.lengths))
        name = str(self.rows.shards[shard].tokens)
        return {"shard": name, **super().describe(sample_id, epoch)}


class ShardDataModule(LanguageModelDataModule):
    """Deals rows of token shards, as datatrove's tokeniser and `unisono prepare` write them.

    A start reads sizes and digests, whatever the number of documents: which of them share a row is
    found once per shard and context length, and the order of an epoch is computed where it is
    asked for. Documents keep the tokens that they have in the shard; longer ones than
    `context_length` are cut into pieces.

    Args:
        train_files: a folder of shards, or several.
        validation_files, test_files: likewise; else documents of training are held out, by
            the shares of `split` and a hash of their tokens: equal documents are in the same part.
        layout: `packed`, `blocks` or `documents`, see `TextDataModule`; `blocks` holds nothing out.
        shuffle_shards: shards whose rows are shuffled together, successive ones of an order that
            each epoch draws; `None` shuffles the rows of all. Fewer bound what a node needs at a
            time.
        split: shares of documents to be held out.
        language_model: tokenizer of shards without tokenizer.json, context, prediction, batches;
            see `LanguageModelDataModule`.

    Raises:
        ValueError: a value out of range, or blocks with shares to be held out.
    """

    def __init__(
        self,
        train_files: Files = None,
        validation_files: Files = None,
        test_files: Files = None,
        layout: Literal["packed", "blocks", "documents"] = "packed",
        shuffle_shards: int | None = None,
        split: TextSplit = TextSplit(0.01),  # noqa: B008 - frozen
        **language_model: Any,
    ) -> None:
        super().__init__(
            train_files=train_files,
            validation_files=validation_files,
            test_files=test_files,
            layout=layout,
            split=split,
            **language_model,
        )
        check_range("data", 1, shuffle_shards=shuffle_shards)
        if not any(self.files.values()):
            raise ValueError("data.train_files names no folder of shards; name one.")
        self.shuffle_shards = shuffle_shards
        self._stores: dict[int, ShardStore] = {}  # of the parts that have folders

    def demo_files(self) -> dict[int, list[Path]]:
        raise NotImplementedError("shards have no embedded data")

    def _folders(self, part: int) -> list[Path]:
        """Return the folders of a part; a FileNotFoundError names one that does not exist."""
        named = self.files[part] or []
        folders = [
            Path(name).expanduser() for name in ([named] if isinstance(named, str) else named)
        ]
        for folder in folders:
            if not folder.is_dir():
                raise FileNotFoundError(
                    f"data.{PART_NAMES[part]}_files: there is no folder {folder}; name a folder "
                    "of shards (X.ds beside X.ds.index)."
                )
        return folders

    def open_store(self, stage: str) -> Any:
        """Return the first of the stores that a stage reads, with the `tokenizer` of them all;
        indices that lack are made."""
        has_own = stage != "fit" and self.files[VALIDATION]  # then nothing of training is held out
        parts = (VALIDATION, TEST) if has_own else (TRAIN, VALIDATION, TEST)
        folders = {part: self._folders(part) for part in parts if self.files[part]}
        split = self.split.beside({part: folders.get(part, []) for part in parts})
        if self.layout == "blocks" and split is not None:
            raise ValueError(
                "layout blocks joins documents, so that none can be held out: name "
                "data.validation_files, or set data.split.validation_share and test_share to 0."
            )
        is_named = self.tokenizer_options is not None or self.model.tokenizer is not None
        options = self._options() if is_named else None
        tokenizer = tokenizer_of([one for some in folders.values() for one in some], options)
        self._stores = {}
        for part, some in folders.items():
            option, own_split = f"data.{PART_NAMES[part]}_files", split if part == TRAIN else None
            shards = [shard for folder in some for shard in find_shards(folder, option)]
            index = IndexOptions(self.layout, self.context_length, own_split)
            self._stores[part] = ShardStore(shards, index, tokenizer)
        return self._stores[min(self._stores)]

    def prepare_data(self) -> None:
        """Make the indices that lack; prediction needs none."""
        stage = self._trainer_stage()
        if stage != "predict":
            self.open_store(stage)

    def part_dataset(self, part: int) -> ShardDataset:
        """Return the rows of a part: of its own folders, or held out of others."""
        seed = self.seed if part == TRAIN else None
        if part in self._stores:
            return ShardDataset([self._stores[part]], TRAIN, seed)
        return ShardDataset([self._stores[min(self._stores)]], part, seed)

    def request(self, stage: Stage) -> PlanRequest:
        """Return all that the plan of a stage depends on."""
        request = super().request(stage)
        if stage == "predict":
            return request
        rows = self.datasets[stage].rows  # type: ignore[attr-defined]
        together = self.shuffle_shards or 0
        counts = rows.counts[:, ROWS].tolist() if together else [request.num_samples]
        source = ("", request.num_samples, tuple(counts))
        return ShardedRequest(**vars(request), sources=(source,), shuffle_shards=together)

    def plan(self, stage: Stage, epoch: int) -> Plan:
        """Return the global steps of one epoch, which are made where they are asked for."""
        if stage == "predict":
            return super().plan(stage, epoch)
        key = (self.request(stage), epoch)
        lengths = self.datasets[stage].lengths
        plan = self._plans.pop(key, None) or planned_epoch(*key[:1], lengths, epoch)
        self._plans = {**dict(list(self._plans.items())[-3:]), key: plan}
        return plan

    def audit(self) -> Audit:
        """Return how much is in the shards, and what is wrong with them."""
        self.store = self.open_store("fit")
        audit = Audit("rows", "tokens", limit=self.context_length)
        audit.notes.append(("tokenizer", f"{self.store.tokenizer.vocab_size:,} tokens"))
        for part, name in enumerate(PART_NAMES):
            dataset = self.part_dataset(part)
            if not len(dataset.lengths):
                continue
            num_rows, positions = len(dataset.lengths), dataset.lengths.sum()
            columns: dict[str, int | str] = {
                "documents": int(dataset.rows.counts[:, DOCUMENTS].sum()),
                "trained on": positions,
            }
            if dataset.is_padded:
                columns["used"] = f"{100 * positions / (num_rows * self.context_length):.1f} %"
            audit.parts.append(AuditPart(name, np.asarray(dataset.lengths), (), columns))
        return audit
