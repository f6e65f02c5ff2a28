"""Texts with what people said of them become planned batches for the scorer."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import cache_root
from datamodules.files.audit import Audit, AuditPart, MakeModel, text_key
from datamodules.files.rows import BadRows, hand_over_rejected
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION, SplitOptions, stem_key
from datamodules.files.tables import expand_files, output_like, own_files_hint
from datamodules.scored.batches import (
    ChunkOptions,
    ScoredTextDataset,
    chunk_facts,
    kept_texts,
)
from datamodules.scored.labels import LabelOptions, LabelReader, trained_heads
from datamodules.scored.output import check_output, write_scored
from datamodules.scored.rows import SUFFIXES, RowReader, TextColumns
from datamodules.scored.splits import (
    FoldOptions,
    check_files,
    parts_of,
    rows_of,
    statistics,
    trained_facts,
)
from datamodules.scored.store import ScoredStore, StoreRequest, open_store
from datamodules.text.encoding import EncodedTextDataModule, TextEncoding

Files = str | list[str] | None


class ScoredTextDataModule(EncodedTextDataModule):
    """Reads csv, tsv, jsonl or parquet with texts and labels; without any file, the demo.

    Args:
        files: part (train, validation, test, predict) -> a path, a pattern, or several. Without
            validation or test files that part is drawn from the training rows. Files to predict
            need no labels.
        predict_output: the scored file; none makes mine.csv mine.scored.csv in the run folder.
        columns: which column holds the text, and the group.
        heads: name -> what is learnt, and in which column.
        fold: fold that is the test, of a cross-validation; none divides by shares.
        num_folds: of the cross-validation.
        stratify_by: head whose labels are spread evenly; none takes the first.
        split: shares of training rows, and the seed of folds and shares.
        chunks: how long texts are cut; a checkpoint's own win over these.
        on_bad_rows: `error` names the first 20, `reject` writes all to rejected.csv.
        encoded: tokenizer, lengths, batch sizes, plan and loader, see `EncodedTextDataModule`.

    Raises:
        ValueError: options are in conflict.
    """

    def __init__(
        self,
        files: dict[Literal["train", "validation", "test", "predict"], Files] | None = None,
        predict_output: str | None = None,
        columns: TextColumns = TextColumns(),  # noqa: B008 - frozen
        heads: dict[str, LabelOptions] | None = None,
        fold: int | None = None,
        num_folds: int | None = None,
        stratify_by: str | None = None,
        split: SplitOptions | None = None,
        chunks: ChunkOptions = ChunkOptions(),  # noqa: B008 - frozen
        on_bad_rows: Literal["error", "reject"] = "error",
        **encoded: Any,
    ) -> None:
        super().__init__(**encoded)
        self.files: dict[str, Files] = dict((files or {}).items())
        self.predict_output, self.columns, self.heads = predict_output, columns, heads
        self.folds = FoldOptions(fold, num_folds, stratify_by)
        self.split, self.chunks = split or SplitOptions(), chunks
        self.on_bad_rows = on_bad_rows
        self._stores: dict[Path, ScoredStore] = {}
        check_files(self.files, self.folds)

    def prepare_data(self) -> None:
        """Read the files and make the tokenizer, in the cache; copies the rejected rows."""
        stage = self._trainer_stage()
        store = self._open(stage, self._trained_recipe(stage))
        folder = self.trainer.default_root_dir if self.trainer is not None else "."
        hand_over_rejected(store.folder, Path(folder))
        super().prepare_data()

    def prepare_tokens(self, stage: Stage, encoding: TextEncoding, recipe: dict[str, Any]) -> None:
        """Make the tokens of the stage's texts in the cache."""
        if stage != "predict":
            store, chunks = self._open(stage, recipe), ChunkOptions(**recipe["chunks"])
            rows = self._rows(stage, store, recipe)
            kept_texts(store, encoding, chunks, store.text_of_row[rows])

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage.

        Raises:
            ValueError: no row belongs to it.
        """
        assert self.encoding is not None
        assert self.recipe is not None
        store, chunks = self._open(stage, self.recipe), ChunkOptions(**self.recipe["chunks"])
        rows = None if stage == "predict" else self._rows(stage, store, self.recipe)
        return ScoredTextDataset(store, self.encoding, chunks, rows)

    def training_texts(self) -> Iterator[str]:
        """Yield the texts of the training part."""
        store = self._open("fit", None)
        rows = np.flatnonzero(self._parts(store) == TRAIN)
        for number in np.unique(store.text_of_row[rows]).tolist():
            yield store.text(number)

    def texts_digest(self) -> str:
        store = self._open("fit", None)
        parts = self._parts(store)
        return hashlib.sha256(store.fingerprint.encode() + parts.tobytes()).hexdigest()[:32]

    def recipe_facts(self) -> dict[str, Any]:
        """Return the heads with the statistics of the training part, and how texts are cut."""
        store = self._open("fit", None)
        parts = self._parts(store)
        facts = {"heads": statistics(store, parts), "chunks": chunk_facts(self.chunks)}
        return {**facts, "split": trained_facts(store, parts, self.folds, self.split)}

    def audit(self, make_model: MakeModel | None = None) -> Audit:
        """Return what is in the files, and what is wrong with them, whatever the model."""
        request, bad_rows = self.store_request("fit", None), BadRows("collect")
        heads = [LabelReader(name, options) for name, options in request.heads.items()]
        reader = RowReader(request.columns, heads, bad_rows)
        audit = Audit("texts", "characters")
        lengths: list[list[int]] = [[] for _ in PART_NAMES]
        keys: list[list[int]] = [[] for _ in PART_NAMES]
        values: list[list[list[float]]] = [[] for _ in heads]
        groups: set[str] = set()
        for number, path in request.files:
            audit.files[str(path)] = 0
            for row in reader.rows(path):
                if row is None:
                    continue
                audit.files[str(path)] += 1
                lengths[number].append(len(row.text))
                keys[number].append(text_key(stem_key(row.text)))
                groups.add(row.group)
                for column, labels in zip(values, row.labels, strict=True):
                    column.append(labels)
        parts = zip(PART_NAMES, lengths, keys, strict=True)
        audit.parts = [AuditPart(*part) for part in parts if part[1]]
        audit.bad_rows = bad_rows.rows
        if request.columns.group:
            audit.notes.append(("groups", f"{len(groups):,}"))
        for head, column in zip(heads, values, strict=True):
            try:
                numbers, classes = head.finish(np.array(column).reshape(len(column), head.width))
            except ValueError as error:
                audit.errors.append(str(error))
                continue
            known = ~np.isnan(numbers)
            sentence = f"{known.any(1).sum():,} of {len(column):,} rows labelled"
            if classes is None and known.any():
                least, mean, most = (f(numbers[known]) for f in (np.min, np.mean, np.max))
                sentence += f"; {least:g} to {most:g}, mean {mean:g}"
            elif classes is not None:
                if head.options.kind == "multilabel":
                    totals = np.nansum(numbers, 0).astype(np.int64)
                else:
                    ids = numbers[known].astype(np.int64)
                    totals = np.bincount(ids, minlength=len(classes))
                audit.labels[head.name] = dict(zip(classes, totals.tolist(), strict=True))
            audit.notes.append(("head", f"{head.name}: {head.options.kind}, {sentence}"))
        return audit

    @property
    def predict_output_path(self) -> Path:
        """Where the scored file goes."""
        files, named = self._predict_paths(), self.predict_output
        folder = Path(self.trainer.default_root_dir if self.trainer is not None else ".")
        path = output_like(files, "scored", folder) if named is None else Path(named).expanduser()
        check_output(files, path)  # not after hours of scoring
        return path

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the scored file; `results` as `write_scored` takes them."""
        assert self.recipe is not None
        write_scored(self._open("predict", self.recipe), self.recipe["heads"], results, path)

    def predict_hint(self, command: str) -> str:
        """Return the command for the texts of this run."""
        files = self.store_request("fit", self.recipe).files
        named = {part: [path] for part, path in files}
        return own_files_hint(command, named, "data.files.predict")

    def store_request(self, stage: str, recipe: dict[str, Any] | None) -> StoreRequest:
        """Return what is read and how.

        Args:
            stage: predict reads texts alone.
            recipe: of a trained model, whose heads and classes win; none in training.

        Raises:
            FileNotFoundError: a named file does not exist.
            ValueError: files are given and no heads.
        """
        if stage == "predict":
            paths = [(TEST, path) for path in self._predict_paths()]
            return StoreRequest(tuple(paths), self.columns, {}, self.on_bad_rows)
        files = [(part, path) for part in (TRAIN, VALIDATION, TEST) for path in self._paths(part)]
        columns, heads = self.columns, self.heads
        if not files:
            from datamodules.scored import demo  # made only where it is asked for

            files = [(TRAIN, demo.demo_file(cache_root()))]
            columns, heads = demo.COLUMNS, heads or demo.HEADS
        if recipe is not None:
            heads = trained_heads(recipe["heads"], heads)
        if not heads:
            raise ValueError("data.heads is empty: name what is learnt, and in which column.")
        return StoreRequest(tuple(files), columns, heads, self.on_bad_rows)

    def _open(self, stage: str, recipe: dict[str, Any] | None) -> ScoredStore:
        request = self.store_request(stage, recipe)
        if (folder := request.folder()) not in self._stores:
            self._stores[folder] = open_store(request)
        return self._stores[folder]

    def _parts(self, store: ScoredStore) -> np.ndarray:
        return parts_of(store, self.folds, self.split)

    def _rows(self, stage: Stage, store: ScoredStore, recipe: dict[str, Any]) -> np.ndarray:
        return rows_of(stage, store, self.folds, self.split, recipe["split"])

    def _paths(self, part: int) -> list[Path]:
        name = PART_NAMES[part]
        return expand_files(self.files.get(name), f"data.files.{name}", SUFFIXES)

    def _predict_paths(self) -> list[Path]:
        files = expand_files(self.files.get("predict"), "data.files.predict", SUFFIXES)
        if not files:
            raise ValueError("predict needs texts: name them with --data.files.predict=mine.csv.")
        return files
