"""Datamodule of the occupation coder: tables of job descriptions as planned batches.

Shapes: B samples in the micro-batch, K codes of the record with the most codes.
"""

import logging
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_only

from datamodules.core.batches import padded, padded_texts
from datamodules.core.plan import check_range, rng_for, uniforms_for
from datamodules.core.planned import PlannedDataModule, PlannedDataset, Stage, own_files_hint
from datamodules.core.store import text_hash
from datamodules.files.audit import Audit, AuditPart
from datamodules.files.rows import BadRows, OnBadRows, hand_over_rejected
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION, SplitOptions
from datamodules.files.tables import SUFFIXES, Files, TableOptions, expand_files
from datamodules.occupations.store import (
    UNKNOWN,
    CodeBookOptions,
    Columns,
    Job,
    OccupationStore,
    PredictIndex,
    RowReader,
    StoreRequest,
    TextOptions,
    encoding_digest,
    open_index,
    open_store,
)
from datamodules.occupations.written import Crosswalk, CrosswalkOptions, write_coded_table
from datamodules.tokenizers.codes import (
    CodeBook,
    CodeSystem,
    build_code_book,
    code_warnings,
    decode,
    encode,
    named_code_system,
    refuse_decimals,
)

log = logging.getLogger(__name__)
NO_CODE = -100
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
        self.walk: Crosswalk | None = None
        if self.options.columns.split and (validation_files or test_files):
            raise ValueError(
                f'columns.split ("{self.options.columns.split}") divides the training files, and '
                "validation_files or test_files are given too; leave one of them out."
            )

    def prepare_data(self) -> None:
        """Tokenise the stage's tables into the cache; copy rejected.csv to the run folder."""
        stage = self._trainer_stage()
        is_coding, recipe = stage == "predict", self.trained_recipe(stage)
        made = self._open_index(recipe) if is_coding else self._open_store(recipe)
        for note in made.notes if isinstance(made, PredictIndex) else ():
            log.warning("%s", note)
        hand_over_rejected(made.folder, self.run_folder)

    def setup(self, stage: str) -> None:
        """Open the store and build the stage's datasets; ValueError for rows that break a rule."""
        recipe = self.trained_recipe(stage)
        if stage == "predict":
            self.index = self._open_index(recipe)
            self.recipe = recipe
            if self.crosswalk is not None and recipe is not None:  # fails before any work is done
                self.walk = Crosswalk(self.crosswalk, CodeBook.from_dict(recipe["code_book"]))
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
        request, book, bad_rows = self.store_request(), None, BadRows("reject")
        if request.book.path is not None:
            book = build_code_book(request.system, Path(request.book.path), ())
        how = (request.columns, request.text.normalisation, request.system)
        rules = (*how, bad_rows, book, request.table)
        audit = Audit("rows", "characters", limit=request.text.max_length)

        def rows() -> Iterator[tuple[Path, str, Job]]:
            """Yield file, name of the part and row for every valid row."""
            for number, paths in request.files.items():
                for path in paths:
                    for job in RowReader(*rules).jobs(path, number == TRAIN):
                        yield path, PART_NAMES[number if job.part is None else job.part], job
            for path in coded:
                reader = RowReader(*rules)
                for text, language in reader.inputs(path):
                    if text is not None:
                        yield path, "predict", Job(text, language, (), None)
                audit.warnings += [f"{path}: {note}" for note in reader.notes()]

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
        write_coded_table(self.index, book, results, path, self.walk)

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
            made = request.folder()  # training on the same files has most likely made it
            digest = encoding_digest(OccupationStore(made).recipe) if made.exists() else None
            if digest != encoding_digest(recipe):
                request.recipe = recipe
        return open_store(request, self.on_bad_rows)

    def _open_index(self, recipe: dict[str, Any] | None) -> PredictIndex:
        assert recipe is not None
        options, columns = self.options, self.options.columns
        if columns.default_language == UNKNOWN:
            columns = replace(columns, default_language=recipe["default_language"])
        return open_index(self.predict_paths, columns, recipe, self.on_bad_rows, options.table)

    def _paths(self, part: int) -> list[Path]:
        return expand_files(self.files[part], f"data.{PART_NAMES[part]}_files")
