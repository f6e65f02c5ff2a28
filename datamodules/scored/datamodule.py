"""Datamodule of the text scorer: texts with labels as planned batches.

Shapes: B texts in the micro-batch, C chunks, W numbers per row (labels of all heads).
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from datamodules.core.plan import check_range
from datamodules.core.planned import PlannedDataset, Stage, own_files_hint
from datamodules.core.store import array_digest, text_hash
from datamodules.demo import demo_scored_texts
from datamodules.files.audit import Audit, AuditPart
from datamodules.files.rows import OnBadRows, hand_over_rejected, read_rejected
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION, SplitOptions, stem_key
from datamodules.files.tables import ROW_SUFFIXES, Files, TableOptions, expand_files
from datamodules.scored.store import (
    LabelOptions,
    ScoredRequest,
    ScoredStore,
    TextColumns,
    divided,
    open_store,
    trained_heads,
    write_scored,
)
from datamodules.text.encoding import EncodedTextDataModule, TextEncoding, kept_tokens

SHOWN = 300  # characters of a text in `describe`
# The demo predicts facts from docstrings; those of one module are similar, so they are a group.
DEMO_COLUMNS = TextColumns(group="module")
DEMO_HEADS = {
    "kind": LabelOptions("multiclass"),
    "num_parameters": LabelOptions("regression"),
    "has_default": LabelOptions("binary"),
}


@dataclass(frozen=True)
class ChunkOptions:
    """How a text longer than `text.max_length` is cut into chunks.

    Args:
        most: maximum number of chunks per text; the rest of the text is cut off.
        stride: tokens from the start of one chunk to the start of the next; `None` means adjacent
            chunks without overlap.
    """

    most: int = 1
    stride: int | None = None

    def __post_init__(self) -> None:
        check_range("chunks", 1, most=self.most)


class ScoredTextDataset(PlannedDataset):
    """Texts of a store; a sample is a row, or in prediction a distinct text.

    Args:
        chunks: how long texts are cut.
        rows: [n] rows of the store; `None`: each distinct text once, without labels.

    Raises:
        ValueError: the stride is longer than a chunk.
    """

    noun = "different texts"

    def __init__(
        self,
        store: ScoredStore,
        encoding: TextEncoding,
        chunks: ChunkOptions,
        rows: np.ndarray | None = None,
    ) -> None:
        self.store, self.encoding, self.chunks, self.rows = store, encoding, chunks, rows
        room = encoding.room
        self.stride = chunks.stride or room
        if self.stride > room:
            raise ValueError(
                f"chunks.stride is {self.stride}, and a chunk holds {room} tokens (text.max_length "
                "less the marks): those between chunks would be read by none. Lower chunks.stride, "
                "or raise text.max_length."
            )
        self.texts = np.arange(len(store.num_bytes)) if rows is None else store.text_of_row[rows]
        distinct, self.row_of = np.unique(self.texts, return_inverse=True)
        source = ["scored", store.fingerprint, array_digest(distinct)]
        longest = room + (chunks.most - 1) * self.stride
        self.tokens = kept_tokens(source, encoding, map(store.text, distinct.tolist()), longest)
        # Byte counts approximate token counts well enough to group texts of similar length.
        self.lengths = np.minimum(
            store.num_bytes[self.texts] + 2, encoding.limits.max_length * chunks.most
        )
        content = array_digest(self.texts)[:16]
        facts = f"{chunks.most}-{chunks.stride}"
        self.fingerprint = f"{store.fingerprint}-{content}-{encoding.digest}-{facts}"
        is_labelled = ~np.isnan(store.labels if rows is None else store.labels[rows])
        self.target_counts = {
            name: is_labelled[:, columns].sum(1) for name, columns in store.columns.items()
        }

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, Any]:
        """Return the padded batch of texts [B], the same in every epoch."""
        ids = [self.tokens[place] for place in self.row_of[sample_ids].tolist()]
        batch: dict[str, Any] = self.encoding.chunk_rows(ids, self.stride, self.chunks.most)
        if self.rows is None:
            return batch
        numbers = torch.from_numpy(self.store.labels[self.rows[sample_ids]])  # [B, W]
        is_there = ~numbers.isnan()
        values = numbers.nan_to_num(nan=0.0)  # `is_labelled` masks the zeros
        targets, known = {}, {}
        for name, columns in self.store.columns.items():
            # A head with one number per text takes a column, [B] instead of [B, 1].
            is_matrix = self.store.heads[name]["kind"] == "multilabel"
            own = columns if is_matrix else columns.start
            # Contiguous, as copies from pinned memory to a GPU need it.
            targets[name], known[name] = values[:, own].contiguous(), is_there[:, own].contiguous()
        batch["text_index"] = torch.from_numpy(self.texts[sample_ids])
        return {**batch, "targets": targets, "is_labelled": known}

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the beginning of the text and its labels as numbers."""
        labels: dict[str, str] = {}
        if self.rows is not None:
            numbers = self.store.labels[self.rows[sample_id]]
            for name, own in self.store.columns.items():
                labels[name] = " ".join(f"{n:.9g}" for n in numbers[own])
        return {"text": self.store.text(int(self.texts[sample_id]))[:SHOWN], **labels}


class ScoredTextDataModule(EncodedTextDataModule):
    """Reads csv, tsv, xlsx, jsonl or parquet files with texts and labels; without any, demo data.

    Args:
        files: part (train, validation, test, predict) -> a path, a pattern, or a list of them. A
            validation or test part without files is drawn from the training rows. Files to predict
            need no labels. Scripts may pass training files alone, without a part.
        predict_output: the scored file; `None`: mine.csv becomes mine.scored.csv in the run folder.
        columns: names of the columns with text and group.
        heads: name of each head -> kind and column of its labels.
        split: shares of the training rows for parts without a file.
        chunks: how long texts are cut; a trained model keeps its own.
        on_bad_rows: `error` fails and names the first, `reject` skips all (see rejected.csv).
        table: separator, encoding and sheet of tables, if they cannot be detected.
        encoded: tokenizer, lengths, batch sizes, plan and loader, see `EncodedTextDataModule`.

    Raises:
        ValueError: options contradict each other.
    """

    predict_option, output_mark = "data.files.predict", "scored"
    predict_suffixes = output_suffixes = ROW_SUFFIXES
    predict_hint = own_files_hint

    def __init__(
        self,
        files: dict[Literal["train", "validation", "test", "predict"], Files] | None = None,
        predict_output: str | None = None,
        columns: TextColumns = TextColumns(),  # noqa: B008 - frozen
        heads: dict[str, LabelOptions] | None = None,
        split: SplitOptions | None = None,
        chunks: ChunkOptions = ChunkOptions(),
        on_bad_rows: OnBadRows = "error",
        table: TableOptions = TableOptions(),  # noqa: B008 - frozen
        **encoded: Any,
    ) -> None:
        super().__init__(**encoded)
        named: dict[Any, Any] = {**files} if isinstance(files, dict) else {"train": files}
        self.files = {part: named.get(name) for part, name in enumerate(PART_NAMES)}
        self.predict_files, self.predict_output = named.get("predict"), predict_output
        self.columns, self.heads = columns, heads
        self.split, self.chunks = split or SplitOptions(), chunks
        self.on_bad_rows, self.table = on_bad_rows, table
        if unknown := named.keys() - {*PART_NAMES, "predict"}:
            raise ValueError(
                f"data.files names {', '.join(sorted(unknown))}; its parts are train, validation, "
                "test and predict."
            )
        if self.files[VALIDATION] and not self.files[TRAIN]:
            raise ValueError("data.files names validation without train; name both.")

    def prepare_data(self) -> None:
        """Cache store and tokenizer; copy rejected.csv to the run folder."""
        stage = self._trainer_stage()
        store = self._open(stage, self.trained_recipe(stage))
        hand_over_rejected(store.folder, self.run_folder)
        super().prepare_data()

    def make_dataset(
        self, stage: Stage, encoding: TextEncoding, recipe: dict[str, Any]
    ) -> ScoredTextDataset:
        """Return the dataset of one stage.

        Raises:
            ValueError: the stage has no row, or it may evaluate rows that the model was trained
                on, because files or split differ from those of training.
        """
        store, chunks = self._open(stage, recipe), ChunkOptions(**recipe["chunks"])
        if stage == "predict":
            return ScoredTextDataset(store, encoding, chunks)
        rows = np.flatnonzero(divided(store, self.split) == PART_NAMES.index(stage))
        then, now = recipe["split"], {"rows": store.fingerprint, **asdict(self.split)}
        changed = [
            f"{name}: {then[name]} -> {now[name]}" for name in now if now[name] != then[name]
        ]
        if changed and (store.file_part[rows] == TRAIN).any():
            raise ValueError(
                f"the model was trained with another split of rows ({', '.join(changed)}), maybe "
                "on some of these; restore the old files and split, or evaluate a file of new "
                "texts only, such as --data.files.test=new.csv."
            )
        if not len(rows):
            raise ValueError(
                f"no row is for {stage}; name data.files.{stage}, or raise "
                f"data.split.{stage}_share above {getattr(self.split, stage + '_share', 0)}."
            )
        return ScoredTextDataset(store, encoding, chunks, rows)

    def training_texts(self) -> Iterator[str]:
        """Yield the texts of the training part."""
        store = self._open()
        rows = np.flatnonzero(divided(store, self.split) == TRAIN)
        for number in np.unique(store.text_of_row[rows]).tolist():
            yield store.text(number)

    def texts_digest(self) -> str:
        store = self._open()
        parts = divided(store, self.split)
        return array_digest(store.fingerprint, parts)[:32]

    def recipe_facts(self) -> dict[str, Any]:
        """Return the heads with statistics of their training labels (`mean` and `std` for
        regression, else `shares` of the classes), the chunk options and the split.

        Raises:
            ValueError: a head has no label in the training part.
        """
        store = self._open()
        heads: dict[str, dict[str, Any]] = {}
        labels = store.labels[divided(store, self.split) == TRAIN]
        for name, facts in store.heads.items():
            values = labels[:, store.columns[name]]
            known = ~np.isnan(values)
            if not known.any(0).all():
                raise ValueError(
                    f'head "{name}" has no label in the training rows; add some, or leave it out.'
                )
            if facts["kind"] == "regression":
                mean, std = float(values[known].mean()), float(values[known].std())
                heads[name] = {**facts, "mean": mean, "std": std if std > 0 else 1.0}
                continue
            if facts["kind"] == "multilabel":
                shares = np.nansum(values, 0) / known.sum(0)
            else:
                classes = values[known].astype(np.int64)
                shares = np.bincount(classes, minlength=len(facts["classes"])) / len(classes)
            heads[name] = {**facts, "shares": shares.tolist()}
        return {
            "heads": heads,
            "chunks": asdict(self.chunks),
            "split": {"rows": store.fingerprint, **asdict(self.split)},
        }

    def audit(self) -> Audit:
        """Return contents and faults of all files, also those to predict; needs no model."""
        request, audit = self.store_request(), Audit("texts", "bytes")
        store = open_store(request, "reject")
        is_sound, read = store.text_of_row >= 0, [(store, dict(enumerate(PART_NAMES)))]
        if self.predict_files is not None:
            read.append((open_store(self.store_request("predict"), "reject"), {TEST: "predict"}))
        for one, names in read:
            texts = map(one.text, range(len(one.num_bytes)))
            keys = np.array([text_hash(stem_key(text)) for text in texts], np.uint64)
            for part, name in names.items():
                own = one.text_of_row[(one.text_of_row >= 0) & (one.file_part == part)]
                if own.size:
                    audit.parts.append(AuditPart(name, one.num_bytes[own], keys[own]))
            audit.files = {**one.files, **audit.files}
            audit.bad_rows += read_rejected(one.folder)
        if request.columns.group:
            audit.notes.append(("groups", f"{np.unique(store.keys[is_sound]).size:,}"))
        for name, facts in store.heads.items():
            numbers, classes = store.labels[is_sound][:, store.columns[name]], facts["classes"]
            known = numbers[~np.isnan(numbers)]
            count = (~np.isnan(numbers)).any(1).sum()
            sentence = f"{facts['kind']}, {count:,} of {len(numbers):,} rows labelled"
            if classes is not None:
                totals = np.bincount(known.astype(np.int64), minlength=len(classes))
                if facts["kind"] == "multilabel":
                    totals = np.nansum(numbers, 0).astype(np.int64)
                audit.labels[name] = dict(zip(classes, totals.tolist(), strict=True))
            elif known.size:
                sentence += f"; {known.min():.9g} to {known.max():.9g}, mean {known.mean():g}"
            audit.notes.append(("head", f"{name}: {sentence}"))
        return audit

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the scored file from the `results` that `write_scored` describes."""
        assert self.recipe is not None
        store = self._open("predict", self.recipe)
        write_scored(store, self.recipe["heads"], results, path, self.table)

    def store_request(
        self, stage: str = "fit", recipe: dict[str, Any] | None = None
    ) -> ScoredRequest:
        """Return the request for a stage's store. Prediction reads only texts; a trained model's
        recipe decides heads and classes.

        Raises:
            FileNotFoundError: a named file does not exist.
            ValueError: there are files but no heads, or a head's name has a dot.
        """
        if stage == "predict":
            return ScoredRequest({TEST: self.predict_paths}, self.columns, {}, self.table)
        files = {
            part: expand_files(named, f"data.files.{PART_NAMES[part]}", ROW_SUFFIXES)
            for part, named in self.files.items()
        }
        columns, heads = self.columns, self.heads
        if not any(files.values()):
            files = {TRAIN: [demo_scored_texts()]}
            columns, heads = DEMO_COLUMNS, heads or DEMO_HEADS
        if recipe is not None:
            heads = trained_heads(recipe["heads"], heads)
        if not heads or "." in "".join(heads):
            raise ValueError(
                f"data.heads is {', '.join(heads or ()) or 'empty'}: name what is learnt, without "
                "a dot, which divides the names of weights, and in which column."
            )
        return ScoredRequest(files, columns, heads, self.table)

    def _open(self, stage: str = "fit", recipe: dict[str, Any] | None = None) -> ScoredStore:
        return open_store(self.store_request(stage, recipe), self.on_bad_rows)
