"""Datamodule of the occupation coder: tables of job descriptions as planned batches, coded tables.

Shapes: B samples in the micro-batch, N rows, D distinct inputs, K the most codes of a record, C
codes of the book.
"""

import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from lightning.pytorch.utilities import rank_zero_only

from datamodules.core.batches import padded, padded_texts
from datamodules.core.plan import check_range, rng_for, uniforms_for
from datamodules.core.planned import PlannedDataModule, PlannedDataset, Stage, own_files_hint
from datamodules.core.store import replacing, text_hash
from datamodules.files.audit import Audit, AuditPart
from datamodules.files.rows import BadRows, OnBadRows, hand_over_rejected, kind_of
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION, SplitOptions
from datamodules.files.tables import (
    EXCEL_SUFFIX,
    PARQUET_SUFFIXES,
    SUFFIXES,
    Files,
    Table,
    TableOptions,
    expand_files,
    write_beside,
)
from datamodules.occupations.store import (
    UNKNOWN,
    CodeBookOptions,
    Columns,
    Job,
    OccupationStore,
    PredictIndex,
    RowReader,
    StoreRequest,
    encoding_digest,
    open_index,
    open_store,
)
from datamodules.tokenizers.codes import (
    CodeBook,
    CodeSystem,
    TextOptions,
    code_warnings,
    decode,
    encode,
    named_code_system,
    refuse_decimals,
)

log = logging.getLogger(__name__)
NO_CODE = -100
ROWS_AT_ONCE = 65_536  # of embeddings written
TERMS = ("seq2seq", "flat")  # both losses are means over records
# Which of a sample's random numbers decides which kind of noise; 3 to 6 are unused.
DELETE, INSERT, SUBSTITUTE, LANGUAGE, NUM_DRAWS = 0, 1, 2, 7, 8
SCRIPTS = (  # first code point, end (exclusive), letters to insert
    (0x0, 0x250, "abcdefghijklmnopqrstuvwxyz"),
    (0x370, 0x400, "αβγδεζηθικλμνξοπρστυφχψω"),
    (0x400, 0x530, "абвгдежзийклмнопрстуфхцчшщъыьэюя"),
    (0x590, 0x600, "אבגדהוזחטיכלמנסעפצקרשת"),
    (0x600, 0x700, "ابتثجحخدذرزسشصضطظعغفقكلمنهوي"),
)


@dataclass
class Augmentation:
    """Noise in training texts; every field but num_edits is a probability per sample.

    Args:
        delete: some letters are deleted.
        insert: some letters of the text's script are inserted.
        substitute: some letters are replaced by others of the same script.
        drop_language: the language is replaced by "unknown".
        num_edits: maximum number of letters that one kind of noise changes in a text, from 1.
    """

    delete: float = 0.0
    insert: float = 0.0
    substitute: float = 0.0
    drop_language: float = 0.0
    num_edits: int = 1

    def __post_init__(self) -> None:
        shares = {name: value for name, value in vars(self).items() if name != "num_edits"}
        check_range("augmentation", 0, 1, **shares)
        check_range("augmentation", 1, num_edits=self.num_edits)


def letter_noise(text: str, fires: np.ndarray, rng: np.random.Generator, num_edits: int) -> str:
    """Return the text with letters deleted, inserted or substituted, never empty; `fires` [3] bool
    says which of the three are applied."""
    draws = iter(rng.random(int(fires.sum()) * (1 + 2 * num_edits)).tolist())
    letters = list(text)
    for kind in np.flatnonzero(fires).tolist():
        count = 1 + int(next(draws) * num_edits)  # 1 to num_edits; num_edits are always drawn
        edits = [(next(draws), next(draws)) for _ in range(num_edits)][:count]
        for where, which in edits:
            place = int(where * (len(letters) + (kind == INSERT)))
            if kind == DELETE:
                del letters[place : place + (len(letters) > 1)]
                continue
            point = ord(letters[min(place, len(letters) - 1)])
            # A script that is not listed takes the letters of the text itself.
            alphabet = next((a for start, end, a in SCRIPTS if start <= point < end), letters)
            letter = alphabet[int(which * len(alphabet))]
            letters[place : place + (kind == SUBSTITUTE)] = [letter]
    varied = "".join(letters)
    return varied if varied.strip() else text


class OccupationDataset(PlannedDataset):
    """Labelled records of one part of the store (0 train, 1 validation, 2 test). Training records
    get noise, drawn by seed, epoch and sample id."""

    def __init__(
        self,
        store: OccupationStore,
        part: int,
        augmentation: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        self.store, self.augmentation, self.seed = store, augmentation, seed
        self.row_ids = store.rows(part)
        self.languages: list[str] = store.recipe["languages"]
        self.lengths = store.lengths(self.row_ids)
        self.fingerprint = f"{store.fingerprint}-{part}"
        self.target_counts = dict.fromkeys(TERMS)

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, Any]:
        """Return the padded batch of samples [B]. The same (seed, epoch, sample id) gets the same
        noise; `is_seen_text` and `is_seen_code` are there in evaluation only."""
        rows, arrays = self.row_ids[sample_ids], self.store.arrays
        code_sets = self.store.code_sets(rows)
        texts, language_id = self.store.texts(rows), arrays["language_id"][rows].astype(np.int64)
        if (noise := self.augmentation) is not None:
            shares = uniforms_for(self.seed, epoch, sample_ids, NUM_DRAWS)
            fires = shares[:, :3] < (noise.delete, noise.insert, noise.substitute)
            # A sample needs a generator of its own only if noise changes its text.
            for place in np.flatnonzero(fires.any(1)).tolist():
                rng = rng_for(self.seed, epoch, int(sample_ids[place]))
                text = letter_noise(decode(texts[place]), fires[place], rng, noise.num_edits)
                texts[place] = encode(text, self.store.recipe["max_length"])
            language_id[shares[:, LANGUAGE] < noise.drop_language] = self.languages.index(UNKNOWN)
        batch, code_ids = padded_texts(texts), padded(code_sets, NO_CODE)
        batch["language_id"] = torch.from_numpy(language_id)
        batch["code_ids"] = torch.from_numpy(code_ids)  # [B, K]
        batch["num_with_codes"] = np.bincount([len(codes) for codes in code_sets]).tolist()
        if self.augmentation is None:
            batch["is_seen_text"] = torch.from_numpy(arrays["is_seen_text"][rows])
            batch["is_seen_code"] = torch.from_numpy(arrays["is_seen_code"][rows])
            if "source_id" in arrays:
                batch["source_id"] = torch.from_numpy(arrays["source_id"][rows])
        return batch

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the text with this epoch's noise, its language and its codes."""
        batch = self.batch(np.array([sample_id]), epoch)
        book = self.store.recipe["code_book"]["codes"]
        return {
            "text": decode(batch["input_ids"][0].numpy()),
            "language": self.languages[int(batch["language_id"])],
            "codes": " ".join(book[i] for i in batch["code_ids"][0].tolist()),
        }


class DistinctInputs(PlannedDataset):
    """The distinct (text, language) pairs of the tables to code."""

    noun = "different inputs"

    def __init__(self, index: PredictIndex) -> None:
        self.index = index
        self.lengths = np.diff(index.arrays["text_offsets"])
        self.fingerprint = index.fingerprint
        self.target_counts = {}

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, Any]:
        """Return the padded batch of inputs [B], without codes."""
        language_ids = self.index.arrays["language_ids"][sample_ids].astype(np.int64)
        batch = padded_texts(self.index.parts("code_points", "text_offsets", sample_ids))
        return {**batch, "language_id": torch.from_numpy(language_ids)}


@dataclass(frozen=True)
class CrosswalkOptions:
    """A table that maps codes to other systems, such as HISCLASS.

    Args:
        path: table with the column `code` and one column per system; the coded table gets columns
            named after it, such as hisclass_1, hisclass_2 … for `hisclass`.
        joined_by: text between several targets of one code; `None` makes these an error.
    """

    path: str
    joined_by: str | None = None


def read_crosswalk(options: CrosswalkOptions, book: CodeBook) -> dict[str, np.ndarray]:
    """Return for each other system its texts by code id, [C + 1], "" for missing targets and id -1.

    Raises:
        ValueError: the table has no code of the book, no second column, or a column name that the
            coded table uses itself; or a code has several targets without `joined_by`.
    """
    table = Table(Path(options.path).expanduser())
    table.check(["code"], "crosswalk")
    names = [name for name in table.names if name != "code"]
    if not names or {"description", "confidence", "set", "confidence_set"} & {*names}:
        raise ValueError(
            f"{options.path} has the columns {', '.join(table.names)}; it needs code and one "
            "for each system, and none that the coded table makes itself (description, "
            "confidence, set, confidence_set): rename or drop it."
        )
    target_lines: dict[str, dict[str, dict[str, int]]] = {name: {} for name in names}
    unknown: dict[str, int] = {}
    for line, row in table.rows():
        code = row["code"].strip()
        if code not in book:
            unknown.setdefault(code, line)
            continue
        for name in names:
            if target := row[name].strip():
                lines = target_lines[name].setdefault(code, {})
                lines.setdefault(target, line)
                if len(lines) > 1 and options.joined_by is None:
                    (first, at), (second, here) = list(lines.items())[:2]
                    raise ValueError(
                        f'{options.path}: the code "{code}" leads to two {name}, "{first}" in '
                        f'line {at} and "{second}" in line {here}; keep one, or write both '
                        "with --data.crosswalk.joined_by=+."
                    )
    if not any(target_lines.values()):
        raise ValueError(
            f"{options.path} has no code of this model, such as {book.codes[0]}; are "
            "leading zeros lost, or is it of another system?"
        )
    if unknown:
        log.warning(
            '%s: %d codes are not in the model\'s book, such as "%s" in line %d: left out.',
            *(options.path, len(unknown), *next(iter(unknown.items()))),
        )
    columns: dict[str, np.ndarray] = {}
    for name, targets in target_lines.items():
        if missing := [code for code in book.codes if code not in targets]:
            log.warning(
                '%s: %d of %d codes lead to no %s, such as "%s": empty in the coded table.',
                *(options.path, len(missing), len(book), name, missing[0]),
            )
        joined = [(options.joined_by or "").join(targets.get(code, {})) for code in book.codes]
        columns[name] = np.array([*joined, ""], object)
    return columns


def write_coded_table(
    index: PredictIndex,
    book: CodeBook,
    results: dict[str, np.ndarray],
    path: Path,
    crosswalk: Mapping[str, np.ndarray] | None = None,
) -> None:
    """Write the coded table to a new file, atomically.

    Args:
        index: the inputs, and the input of each row.
        book: code book of the model.
        results: code_ids [D, K] int64 (negative = none), code_confidence [D, K] and
            set_confidence [D] probabilities, needs_review [D] bool; if further sets are asked for,
            next_ids [D, k, K] and next_confidence [D, k]; if a coverage is, plausible
            [D, ceil(C / 8)] uint8, one bit per code, lowest first, for membership in the set of
            plausible codes; embedding [D, W] float32, written to `embeddings_path`.
        path: a table file of any kind.
        crosswalk: codes of other systems, see `read_crosswalk`.

    Raises:
        FileExistsError: the file exists, or that of the embeddings.
        RuntimeError: a table has changed since the index was made.
    """
    crosswalk, is_typed = crosswalk or {}, kind_of(path) in (*PARQUET_SUFFIXES, EXCEL_SUFFIX)
    num_codes = int((results["code_ids"] >= 0).sum(1).max(initial=1))  # the most in any answer
    num_next = results["next_ids"].shape[1] if "next_ids" in results else 0
    # The last entry is empty, for index -1 (no code).
    codes, descriptions = (np.array([*n, ""], object) for n in (book.codes, book.descriptions))

    def values(column: np.ndarray, is_there: np.ndarray) -> pa.Array:
        """Return a column; fractions get six decimals, as text in csv files."""
        is_fraction = np.issubdtype(column.dtype, np.floating)
        if is_fraction and is_typed:
            column = np.round(column.astype(np.float64), 6)
        elif is_fraction:
            column = np.array([f"{x:.6f}" for x in column.tolist()], object)
        return pa.array(column, mask=~is_there)

    def added(rows: slice) -> dict[str, pa.Array]:
        """Return the added columns of these rows."""
        input_ids = index.arrays["input_of_row"][rows]
        is_coded, ids = input_ids >= 0, np.maximum(input_ids, 0)
        columns: dict[str, pa.Array] = {}
        for k in range(num_codes):
            code_ids = np.maximum(np.where(is_coded, results["code_ids"][ids, k], -1), -1)
            columns[f"code_{k + 1}"] = pa.array(codes[code_ids], pa.string())
            columns[f"description_{k + 1}"] = pa.array(descriptions[code_ids], pa.string())
            confidence = results["code_confidence"][ids, k]
            columns[f"confidence_{k + 1}"] = values(confidence, code_ids >= 0)
            for name, targets in crosswalk.items():
                columns[f"{name}_{k + 1}"] = pa.array(targets[code_ids], pa.string())
        columns["confidence_set"] = values(results["set_confidence"][ids], is_coded)
        for k in range(num_next):
            next_ids = np.maximum(results["next_ids"][ids, k], -1)
            has_set = is_coded & (next_ids[:, 0] >= 0)
            sets = ["+".join(filter(None, row)) for row in codes[next_ids].tolist()]
            of_rows = np.where(has_set, np.array(sets, object), "")
            columns[f"set_{k + 2}"] = pa.array(of_rows, pa.string())
            columns[f"confidence_set_{k + 2}"] = values(results["next_confidence"][ids, k], has_set)
        if "plausible" in results:
            bits = np.unpackbits(results["plausible"][ids], axis=1, bitorder="little")
            members = (bits[:, : len(book)] * is_coded[:, None]).astype(bool)
            sets = ["|".join(codes[:-1][row]) for row in members]
            columns["plausible_codes"] = pa.array(sets, pa.string())
            columns["num_plausible"] = values(members.sum(1), is_coded)
        # A row without text has no code, so a person must look at it.
        needs_review = results["needs_review"][ids].astype(bool) | ~is_coded
        columns["needs_review"] = values(needs_review, np.ones_like(is_coded))
        columns["truncated"] = values(index.arrays["is_truncated"][ids], is_coded)
        columns["language_known"] = values(index.arrays["language_ids"][ids] != 0, is_coded)
        return columns

    if "embedding" in results and embeddings_path(path).exists():
        raise FileExistsError(f"{embeddings_path(path)} exists and is not overwritten; move it.")
    texts = book.codes + book.descriptions
    texts += [text for targets in crosswalk.values() for text in targets]
    write_beside(index.files, index.table, path, len(index.arrays["input_of_row"]), added, texts)
    if "embedding" in results:
        write_embeddings(index, results["embedding"], embeddings_path(path))


def embeddings_path(path: Path) -> Path:
    """Return the path of the embeddings that belong to a coded table."""
    return path.with_name(f"{path.name}.embeddings.parquet")


def write_embeddings(index: PredictIndex, vectors: np.ndarray, path: Path) -> None:
    """Write vectors [D, W] float32 atomically to a parquet file with the column `embedding` and one
    row per row of the tables, null for rows without text."""
    width = vectors.shape[1]
    kind = pa.list_(pa.float32(), width)
    with (
        replacing(path) as unfinished,
        pq.ParquetWriter(unfinished, pa.schema({"embedding": kind})) as file,
    ):
        input_of_row = index.arrays["input_of_row"]
        for start in range(0, len(input_of_row), ROWS_AT_ONCE):
            ids = input_of_row[start : start + ROWS_AT_ONCE]
            flat = pa.array(vectors[np.maximum(ids, 0)].astype(np.float32).ravel())
            array = pa.FixedSizeListArray.from_arrays(flat, width, mask=pa.array(ids < 0))
            file.write_table(pa.table({"embedding": array}))


class OccupationDataModule(PlannedDataModule):
    """Reads tables of job descriptions and codes. Without any file it uses embedded demo data.

    Args:
        train_files: csv, tsv, parquet or xlsx; a path, a pattern, or a list of them.
        validation_files: `None` divides the training rows by their texts, see `split`.
        test_files: as validation_files; `None` beside validation files means no test.
        predict_files: tables to code; they need no code columns.
        predict_output: the coded table; `None`: mine.csv becomes mine.coded.csv in the run folder.
        table: separator, encoding and sheet of the tables.
        columns: names of the columns.
        code_system: hisco, occ1950, from_data, or a CodeSystem.
        code_book: the file of valid codes; without one, the codes in the data are the valid ones.
        split: how training rows are divided into parts.
        augmentation: noise in training texts.
        on_bad_rows: `error` fails and names the first, `reject` skips all (see rejected.csv).
        text: length and normalisation of texts; a trained model keeps its own.
        crosswalk: table that adds codes of other systems to the coded table.
        planned: batch sizes, plan and loader, see `PlannedDataModule`.

    After `setup`, `recipe` holds what a checkpoint must keep to encode texts in the same way.

    Raises:
        ValueError: options contradict each other.
    """

    output_suffixes, output_mark, predict_hint = SUFFIXES, "coded", own_files_hint
    index: PredictIndex  # inputs to predict, after `setup`

    def __init__(
        self,
        train_files: Files = None,
        validation_files: Files = None,
        test_files: Files = None,
        predict_files: Files = None,
        predict_output: str | None = None,
        table: TableOptions = TableOptions(),  # noqa: B008 - frozen
        columns: Columns | None = None,
        code_system: str | CodeSystem = "hisco",
        code_book: CodeBookOptions | None = None,
        split: SplitOptions | None = None,
        augmentation: Augmentation | None = None,
        on_bad_rows: OnBadRows = "error",
        text: TextOptions = TextOptions(),  # noqa: B008 - frozen
        crosswalk: CrosswalkOptions | None = None,
        **planned: Any,
    ) -> None:
        super().__init__(**planned)
        self.files = {TRAIN: train_files, VALIDATION: validation_files, TEST: test_files}
        self.predict_files, self.predict_output = predict_files, predict_output
        self.options = StoreRequest(
            {},
            columns or Columns(),
            named_code_system(code_system),
            code_book or CodeBookOptions(),
            split or SplitOptions(),
            text,
            table,
        )
        self.on_bad_rows, self.table = on_bad_rows, table
        self.augmentation, self.crosswalk = augmentation or Augmentation(), crosswalk
        self.store: OccupationStore | None = None
        self.targets: dict[str, np.ndarray] = {}  # of the crosswalk
        if self.options.columns.split and (validation_files or test_files):
            raise ValueError(
                f'columns.split ("{self.options.columns.split}") divides the training files, and '
                "validation_files or test_files are given too; leave one of them out."
            )

    def prepare_data(self) -> None:
        """Tokenise the stage's tables into the cache; copy rejected.csv to the run folder."""
        stage = self._trainer_stage()
        is_coding, recipe = stage == "predict", self.trained_recipe(stage)
        arrays = self._open_index(recipe) if is_coding else self._open_store(recipe)
        for note in arrays.notes if isinstance(arrays, PredictIndex) else ():
            log.warning("%s", note)
        hand_over_rejected(arrays.folder, self.run_folder)

    def setup(self, stage: str) -> None:
        """Open the store and build the stage's datasets; ValueError for rows that break a rule."""
        recipe = self.trained_recipe(stage)
        if stage == "predict":
            self.index = self._open_index(recipe)
            self.recipe = recipe
            if self.crosswalk is not None and recipe is not None:  # fails before any work is done
                book = CodeBook.from_dict(recipe["code_book"])
                self.targets = read_crosswalk(self.crosswalk, book)
        elif self.store is None or (
            recipe is not None and encoding_digest(recipe) != encoding_digest(self.store.recipe)
        ):
            self.store = self._open_store(recipe)
            self.recipe = recipe or self.store.recipe
            self.datasets.clear()
        super().setup(stage)

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage; ValueError if it has no rows."""
        if stage == "predict":
            self._say_cut(stage, self.index.arrays["is_truncated"])
            return DistinctInputs(self.index)
        assert self.store is not None
        noise = self.augmentation if stage == "train" else None
        dataset = OccupationDataset(self.store, PART_NAMES.index(stage), noise, self.seed)
        if not len(dataset.row_ids):
            raise ValueError(
                f"no row is for {stage}; name data.{stage}_files or raise data.split.{stage}_share "
                "(trainer.limit_val_batches=0 validates nothing, test_after_fit=false tests none)."
            )
        arrays = self.store.arrays
        self._say_cut(stage, arrays["is_truncated"][arrays["text_id"][dataset.row_ids]])
        book = CodeBook.from_dict(self.store.recipe["code_book"])
        is_open = self.options.book.path is None and book.system.is_open
        for warning in code_warnings(book.codes) if stage == "train" and is_open else ():
            log.warning("%s", warning)
        code_sets = {ids.tobytes() for ids in self.store.code_sets(dataset.row_ids)}
        if stage == "train" and len(code_sets) == 1 < len(dataset.row_ids):
            log.warning(
                "All %d rows of training have the same code, so that the model learns to answer it "
                "whatever the text; check the code column.",
                len(dataset.row_ids),
            )
        return dataset

    def _say_cut(self, stage: Stage, is_cut: np.ndarray) -> None:
        if (count := int(is_cut.sum())) and self.recipe is not None:
            rank_zero_only(log.warning)(
                f"{count:,} {stage} texts exceed the {self.recipe['max_length']} characters of "
                "data.text.max_length in training: their ends are cut off"
            )

    def audit(self) -> Audit:
        """Return contents and faults of the tables; needs no model."""
        request, bad_rows = self.store_request(), BadRows("reject")
        reader = RowReader(request, bad_rows)
        book = reader.book
        audit = Audit("rows", "characters", limit=request.text.max_length)

        def rows() -> Iterator[tuple[Path, str, Job]]:
            """Yield file, name of the part and row for every valid row."""
            for number, paths in request.files.items():
                for path in paths:
                    for job in reader.jobs(path, number == TRAIN):
                        yield path, PART_NAMES[number if job.part is None else job.part], job
            for path in coded:
                coded_reader = RowReader(request, bad_rows)
                for text, language in coded_reader.inputs(path):
                    if text is not None:
                        yield path, "predict", Job(text, language, (), None)
                audit.warnings += [f"{path}: {note}" for note in coded_reader.notes()]

        coded = expand_files(self.predict_files, "data.predict_files")
        audit.files = {str(p): 0 for paths in (*request.files.values(), coded) for p in paths}
        parts = {name: (array("q"), array("Q")) for name in (*PART_NAMES, "predict")}
        codes: Counter[str] = Counter()
        languages: Counter[str] = Counter()
        code_sets: dict[str, set[tuple[str, ...]]] = {}
        for path, name, job in rows():
            audit.files[str(path)] += 1
            lengths, keys = parts[name]
            lengths.append(len(job.text))
            keys.append(text_hash(job.text))
            languages[job.language] += 1
            if job.codes:
                codes.update(job.codes)
                code_sets.setdefault(job.text, set()).add(tuple(sorted(job.codes)))
        audit.parts = [AuditPart(name, *part) for name, part in parts.items() if part[0]]
        audit.labels = {"languages": languages, "codes": codes}
        audit.bad_rows = bad_rows.rows
        if book is not None:
            unseen = set(book.codes) - set(book.system.specials) - set(codes)
            audit.notes.append(("code book", f"{len(unseen):,} of its codes occur in no row"))
        elif request.system.is_open:
            refuse_decimals(codes)
            audit.warnings += code_warnings(codes)
        conflicts = [text for text, sets in code_sets.items() if len(sets) > 1]
        if conflicts:
            audit.warnings.append(
                f"{len(conflicts):,} texts have different codes in different rows, such as "
                f'"{conflicts[0][:40]}"'
            )
        return audit

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the coded table from the `results` that `write_coded_table` describes."""
        assert self.recipe is not None
        book = CodeBook.from_dict(self.recipe["code_book"])
        write_coded_table(self.index, book, results, path, self.targets)

    def store_request(self, is_trained: bool = False) -> StoreRequest:
        """Return the files and options of the store; the demo table if no file is named. A
        trained model may lack its training files if another part has files."""
        files = {part: self._paths(part) for part in (VALIDATION, TEST)}
        try:
            files = {TRAIN: self._paths(TRAIN), **files}
        except FileNotFoundError as error:
            if not is_trained or not any(files.values()):
                raise
            log.warning("%s Seen and unseen strings are not told apart.", error)
        options = replace(self.options, files=files)
        if not any(files.values()):
            from datamodules import demo  # its import is needed here only

            files[TRAIN] = [demo.demo_occupations()]
            options.columns = Columns(language="language", split="split")
            path = options.book.path or str(files[TRAIN][0].with_name("codes.csv"))
            options.book = replace(options.book, path=path)
        if options.book.descriptions_as_examples and options.book.path is None:
            raise ValueError("descriptions_as_examples needs a code book: data.code_book.path.")
        return options

    def _open_store(self, recipe: dict[str, Any] | None) -> OccupationStore:
        request = self.store_request(is_trained=recipe is not None)
        if recipe is not None:
            folder = request.folder()  # training on the same files has most likely made it
            digest = encoding_digest(OccupationStore(folder).recipe) if folder.exists() else None
            if digest != encoding_digest(recipe):
                request.recipe = recipe
        return open_store(request, self.on_bad_rows)

    def _open_index(self, recipe: dict[str, Any] | None) -> PredictIndex:
        assert recipe is not None
        columns = self.options.columns
        if columns.default_language == UNKNOWN:
            columns = replace(columns, default_language=recipe["default_language"])
        request = replace(self.options, columns=columns, recipe=recipe)
        return open_index(self.predict_paths, request, self.on_bad_rows)

    def _paths(self, part: int) -> list[Path]:
        return expand_files(self.files[part], f"data.{PART_NAMES[part]}_files")


class NearestTexts:
    """Search for similar rows in the training part of an OccupationDataModule, one row per distinct
    text, by cosine similarity of character n-grams (TF-IDF)."""

    def __init__(self, data: Any) -> None:
        # Seconds of import that only the page needs.
        from sklearn.feature_extraction.text import TfidfVectorizer

        self.rows = OccupationDataset(open_store(data.store_request(), data.on_bad_rows), TRAIN)
        texts = self.rows.store.texts(self.rows.row_ids)
        self.number_of = {decode(text): number for number, text in enumerate(texts)}  # last row
        self.ngrams = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4))
        self.known = self.ngrams.fit_transform(self.number_of)

    def find(self, text: str, number: int) -> list[dict[str, str]]:
        """Return `OccupationDataset.describe` of the `number` nearest rows, nearest first."""
        likeness = (self.known @ self.ngrams.transform([text]).T).toarray()[:, 0]
        numbers = list(self.number_of.values())
        return [self.rows.describe(numbers[n], 0) for n in likeness.argsort()[::-1][:number]]
