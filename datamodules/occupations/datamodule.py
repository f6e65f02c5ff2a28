"""Tables of job descriptions become planned batches for the occupation coder."""

import logging
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.core.planned import PlannedDataModule, PlannedDataset, Stage
from datamodules.core.store import text_hash
from datamodules.files.audit import Audit, AuditPart
from datamodules.files.rows import BadRows, hand_over_rejected
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION, SplitOptions
from datamodules.files.tables import (
    Files,
    TableOptions,
    check_file,
    check_suffix,
    expand_files,
    output_like,
    own_files_hint,
)
from datamodules.occupations.batches import Augmentation, DistinctInputs, OccupationDataset
from datamodules.occupations.coded import PredictIndex, open_index, write_coded_table
from datamodules.occupations.store import (
    UNKNOWN,
    CodeBookOptions,
    Columns,
    OccupationStore,
    RowReader,
    StoreRequest,
    TextOptions,
    encoding_digest,
    open_store,
)
from datamodules.tokenizers.codes import (
    CodeBook,
    CodeSystem,
    build_code_book,
    lost_zero_suspects,
    named_code_system,
)

log = logging.getLogger(__name__)
RECIPE_KEY = "occupation_recipe"


class OccupationDataModule(PlannedDataModule):
    """Reads tables of job descriptions and codes; without any file, embedded demo data.

    Args:
        train_files: csv, tsv, parquet or xlsx; a path, a pattern, or several.
        validation_files: without any, the training rows are divided by their strings.
        test_files: as validation_files; beside validation files alone nothing is tested.
        predict_files: tables to code; they need no code columns.
        predict_output: the coded table; `None` makes mine.csv mine.coded.csv in the run folder.
        table: separator, encoding and sheet of the tables.
        columns: which column holds what.
        code_system: hisco, occ1950, from_data, or a CodeSystem.
        code_book: the file of legal codes; without one the codes of the data are legal.
        split: how training rows are divided.
        augmentation: noise in training texts.
        on_bad_rows: `error` names the first 20, `reject` writes all to rejected.csv.
        text: length and normalisation of texts; a checkpoint's own win over these.
        planned: batch sizes, plan and loader, see `PlannedDataModule`.

    After `setup`, `recipe` holds what a checkpoint must keep to code a text in the same way.

    Raises:
        ValueError: options are in conflict.
    """

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
        on_bad_rows: Literal["error", "reject"] = "error",
        text: TextOptions = TextOptions(),  # noqa: B008 - frozen
        **planned: Any,
    ) -> None:
        super().__init__(**planned)
        self.files: dict[int, Files] = {
            TRAIN: train_files,
            VALIDATION: validation_files,
            TEST: test_files,
        }
        self.predict_files, self.predict_output = predict_files, predict_output
        self.table, self.columns = table, columns or Columns()
        self.code_system = named_code_system(code_system)
        self.code_book = code_book or CodeBookOptions()
        self.split = split or SplitOptions()
        self.augmentation = augmentation or Augmentation()
        self.on_bad_rows = on_bad_rows
        self.text = text
        self.store: OccupationStore | None = None
        self.index: PredictIndex | None = None
        if predict_output is not None:
            check_suffix(Path(predict_output))  # not after hours of coding
        if self.columns.split and (validation_files or test_files):
            raise ValueError(
                f'columns.split ("{self.columns.split}") divides the training files, and '
                "validation_files or test_files are given too; leave one of them out."
            )
        if validation_files and not train_files and not test_files:
            raise ValueError("validation_files are given without train_files; name both.")

    def prepare_data(self) -> None:
        """Tokenise what the stage needs into the cache; copies the rejected rows to the run."""
        stage = self._trainer_stage()
        is_coding, recipe = stage == "predict", self.trained_recipe(stage)
        made = self._open_index(recipe) if is_coding else self._open_store(recipe)
        for note in made.notes if isinstance(made, PredictIndex) else ():
            log.warning("%s", note)
        hand_over_rejected(made.folder, self.run_folder)

    def setup(self, stage: str) -> None:
        """Open the cache and build the datasets; ValueError where rows break a rule."""
        recipe = self.trained_recipe(stage)
        if stage == "predict":
            self.index = self._open_index(recipe)
            self.recipe = recipe
        elif self.store is None or (
            recipe is not None and encoding_digest(recipe) != encoding_digest(self.store.recipe)
        ):
            self.store = self._open_store(recipe)
            self.recipe = recipe or self.store.recipe
            self.datasets.clear()
        super().setup(stage)

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage; ValueError where no row belongs to it."""
        if stage == "predict":
            assert self.index is not None
            return DistinctInputs(self.index)
        assert self.store is not None
        is_training = stage == "train"
        dataset = OccupationDataset(
            self.store,
            PART_NAMES.index(stage),
            self.augmentation if is_training else None,
            self.seed,
        )
        if not len(dataset.row_ids):
            may_be_left_out = stage == "validation" and self._trainer_stage() == "fit"
            without = ", or validate nothing: trainer.limit_val_batches=0" * may_be_left_out
            raise ValueError(
                f"no row is for {stage}; name data.{stage}_files, or raise "
                f"data.split.{stage}_share above {getattr(self.split, stage + '_share', 0)}"
                f"{without}."
            )
        code_sets = {ids.tobytes() for ids in self.store.code_sets(dataset.row_ids)}
        if is_training and len(code_sets) == 1 < len(dataset.row_ids):
            log.warning(
                "All %d rows of training have the same code, so that the model learns to answer it "
                "whatever the text; check the code column.", len(dataset.row_ids),
            )  # fmt: skip
        return dataset

    def audit(self) -> Audit:
        """Return what is in the tables, and what is wrong with them, whatever the model."""
        request, book, bad_rows = self.store_request(), None, BadRows("collect")
        system, columns = request.system, request.columns
        if request.book.path is not None:
            check_file(Path(request.book.path), "data.code_book")
            book = build_code_book(system, Path(request.book.path), ())
            system = book.system
        audit = Audit("rows", "characters", limit=request.text.max_length)
        names = (*PART_NAMES, "predict")
        parts = {name: (array("q"), array("Q")) for name in names}  # lengths, keys of texts
        codes: Counter[str] = Counter()
        languages: Counter[str] = Counter()
        code_sets: dict[str, set[tuple[str, ...]]] = {}
        rules = (columns, request.text.normalisation, system, bad_rows, book, request.table)

        def take(path: Path, name: str, text: str, language: str) -> None:
            audit.files[str(path)] += 1
            parts[name][0].append(len(text))
            parts[name][1].append(text_hash(text))
            languages[language] += 1

        for number, paths in request.files.items():
            for path in paths:
                audit.files[str(path)] = 0
                for job in RowReader(*rules).jobs(path, number == TRAIN and bool(columns.split)):
                    name = PART_NAMES[number if job.part is None else job.part]
                    take(path, name, job.text, job.language)
                    codes.update(job.codes)
                    code_sets.setdefault(job.text, set()).add(tuple(sorted(job.codes)))
        for path in expand_files(self.predict_files, "data.predict_files"):
            reader = RowReader(*rules)
            audit.files[str(path)] = 0
            for text, language in reader.inputs(path):
                if text is not None:
                    take(path, "predict", text, language)
            audit.warnings += [f"{path}: {note}" for note in reader.notes()]
        audit.parts = [AuditPart(name, *part) for name, part in parts.items() if part[0]]
        audit.labels = {"languages": languages, "codes": codes}
        audit.bad_rows = bad_rows.rows
        if book is not None:
            unseen = set(book.codes) - set(book.system.specials) - set(codes)
            audit.notes.append(("code book", f"{len(unseen):,} of its codes occur in no row"))
        elif system.length is None and (suspects := lost_zero_suspects(codes)):
            shown = ", ".join(suspects[:10])
            audit.warnings.append(f"{len(suspects)} codes may have lost a leading zero: {shown}")
        conflicts = [text for text, sets in code_sets.items() if len(sets) > 1]
        if conflicts:
            audit.warnings.append(
                f"{len(conflicts):,} texts have different codes in different rows, such as "
                f'"{conflicts[0][:40]}"'
            )
        return audit

    @property
    def default_output(self) -> str:
        return output_like(self._predict_paths(), "coded")

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write the coded table; `results` as `write_coded_table` takes them."""
        assert self.index is not None
        assert self.recipe is not None
        book = CodeBook.from_dict(self.recipe["code_book"])
        write_coded_table(self.index, book, results, path)

    def predict_hint(self, command: str) -> str:
        """Return the command for the table of this run."""
        return own_files_hint(command, self.store_request().files)

    def store_request(self, is_trained: bool = False) -> StoreRequest:
        """Return what is read and how; the demo table where no file is named. For a trained model
        the training files may be missing where the other parts have files."""
        files = {part: self._paths(part) for part in (VALIDATION, TEST)}
        try:
            files = {TRAIN: self._paths(TRAIN), **files}
        except FileNotFoundError as error:
            if not is_trained or not any(files.values()):
                raise
            log.warning("%s Seen and unseen strings are not told apart.", error)
        columns, book = self.columns, self.code_book
        if not any(files.values()):
            from datamodules import demo  # made only where it is asked for

            files[TRAIN] = [demo.demo_occupations()]
            columns = Columns(language="language", split="split")
            book = replace(book, path=book.path or str(demo.demo_code_book()))
        if book.descriptions_as_examples and book.path is None:
            raise ValueError(
                "descriptions_as_examples needs a code book; name it with data.code_book.path."
            )
        return StoreRequest(
            files,
            columns,
            self.code_system,
            book,
            self.split,
            self.text,
            self.on_bad_rows,
            table=self.table,
        )

    def _open_store(self, recipe: dict[str, Any] | None) -> OccupationStore:
        request = self.store_request(is_trained=recipe is not None)
        if recipe is not None:
            made = request.folder()  # by training on the same files, most likely
            if made.exists():
                store = OccupationStore(made)
                if encoding_digest(store.recipe) == encoding_digest(recipe):
                    return store
            request.recipe = recipe
        return open_store(request)

    def _open_index(self, recipe: dict[str, Any] | None) -> PredictIndex:
        assert recipe is not None
        columns = self.columns
        if columns.default_language == UNKNOWN:
            columns = replace(columns, default_language=recipe["default_language"])
        return open_index(self._predict_paths(), columns, recipe, self.on_bad_rows, self.table)

    def _paths(self, part: int) -> list[Path]:
        return expand_files(self.files[part], f"data.{PART_NAMES[part]}_files")

    def _predict_paths(self) -> list[Path]:
        files = expand_files(self.predict_files, "data.predict_files")
        if not files:
            raise ValueError("predict needs tables: name them with --data.predict_files=mine.csv.")
        return files
