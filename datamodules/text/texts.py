"""Datamodule of text files, and the base class of all language models' datamodules."""

import json
import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_only

from datamodules import demo
from datamodules.core.batches import TERM
from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import text_hash
from datamodules.files.audit import Audit, AuditPart
from datamodules.files.rows import (
    JSON_OUTPUT,
    SUFFIXES,
    BadRow,
    BadRows,
    JsonRow,
    OnBadRows,
    RowFault,
    hand_over_rejected,
    read_rejected,
)
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION
from datamodules.files.tables import Files
from datamodules.text.packing import BlockDataset, RowDataset, TokenDataset
from datamodules.text.prompts import (
    ChoiceDataset,
    Prompt,
    PromptDataset,
    read_prompts,
    read_rows,
    row_prompt,
    write_rows,
)
from datamodules.text.store import CorpusDataModule, TokenStore
from datamodules.tokenizers.text import TextTokenizer, make_tokenizer

log = logging.getLogger(__name__)


class LanguageModelDataModule(CorpusDataModule):
    """Base of the datamodules of texts, instructions, pages and text pairs: makes the token store
    of a stage, and reads prompts for prediction. `setup` makes `tokenizer` and `store` available.

    Args:
        layout: how documents fill the rows of a batch.
        predict_files: jsonl, json or parquet; rows with a prompt or a chat; mode `score`: choices.
        predict_output: jsonl; `None` turns mine.jsonl into mine.completed.jsonl (mine.scored.jsonl
            in mode `score`) in the run folder.
        corpus: files, tokenizer, context and split, see `CorpusDataModule`.
    """

    predict_suffixes: tuple[str, ...] = SUFFIXES
    output_suffixes: tuple[str, ...] = JSON_OUTPUT
    separator = ""  # between a prompt and its completion
    on_bad_rows: OnBadRows = "error"

    def __init__(
        self,
        layout: Literal["packed", "blocks", "documents"] = "packed",
        predict_files: Files = None,
        predict_output: str | None = None,
        **corpus: Any,
    ) -> None:
        super().__init__(**corpus)
        self.layout = layout
        self.predict_files, self.predict_output = predict_files, predict_output

    @abstractmethod
    def part_dataset(self, part: int) -> RowDataset:
        """Return the dataset of a part (0 train, 1 validation, 2 test); it may be empty."""

    def predict_hint(self, command: str) -> str:
        """Return an example command, which also writes prompts.jsonl if there is none."""
        row, is_there = json.dumps({"prompt": "The"}), Path("prompts.jsonl").exists()
        write = "" if is_there else f"echo '{row}' > prompts.jsonl && "
        return f"{write}{command} --data.predict_files=prompts.jsonl"

    def open_store(self, stage: str) -> TokenStore:
        """Return the token store of a training or evaluation stage, made at first use; ValueError
        for rows that break a rule, unless `on_bad_rows` is "reject"."""
        path, is_training, trained = self._options().path, stage == "fit", self.model.recipe
        has_gone = path is not None and not Path(path).expanduser().exists()
        # With validation files no training text is held out, so evaluation need not read them.
        is_apart = trained is not None and not is_training and self.files[VALIDATION]
        request = self.store_request((VALIDATION, TEST) if is_apart else (TRAIN, VALIDATION, TEST))
        # Evaluation uses a trained model's tokenizer; so does training if its folder is gone.
        if trained is not None and (has_gone or not is_training):
            own = TextTokenizer.from_dict(trained["tokenizer"])
            # The training on the same files has most likely made the store with this tokenizer.
            made = None if has_gone else request.folder()
            if not (made and made.exists() and TokenStore(made).tokenizer.digest == own.digest):
                request = replace(request, given=own)
        return request.open(self.on_bad_rows)

    def prepare_data(self) -> None:
        """Tokenise into the cache; prediction needs no training files."""
        stage = self._trainer_stage()
        if stage != "predict":
            hand_over_rejected(self.open_store(stage).folder, self.run_folder)

    def setup(self, stage: str) -> None:
        """Open the store and build the stage's datasets; prediction reads its prompts each time."""
        if stage != "predict":
            store = self.open_store(stage)
            if self.store is None or store.folder != self.store.folder:
                self.store = store
                self.datasets.clear()
        super().setup(stage)
        if stage != "predict" and self.model.options.get("compiles"):
            # torch.compile makes its fastest code for one fixed shape.
            rows = 0 if self.micro_batch_size == "auto" else self.batching.micro_batch_size
            for dataset in self.datasets.values():
                dataset.least_shape = (rows, self.context_length)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The store's tokenizer, in prediction the model's; available after `setup`."""
        return self.prompt_tokenizer() if self.store is None else self.store.tokenizer

    def prompt_tokenizer(self) -> TextTokenizer:
        """Return the model's tokenizer, from its checkpoint or its pretrained folder.

        Raises:
            ValueError: there is no trained model, or the user's tokenizer is not the model's.
        """
        if self.model.recipe is None and self.model.tokenizer is not None:
            return make_tokenizer(self._options(), iter(()))
        recipe: Any = self.trained_recipe("predict")
        return TextTokenizer.from_dict(recipe["tokenizer"])

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage, and warn of documents that are cut or left out;
        ValueError if none is left."""
        if stage == "predict":
            return self.build_prompts()
        dataset = self.part_dataset(PART_NAMES.index(stage))
        losses = "; ".join(dataset.losses)
        if not len(dataset.lengths):
            more = losses and f" ({losses})"
            raise ValueError(
                f"no {self.noun} are for {stage}{more}; name data.{stage}_files, give it a share "
                "in data.split, divide a single text with by=tail, or raise what limits them."
            )
        if losses:
            rank_zero_only(log.warning)(losses)
        return dataset

    def build_prompts(self) -> PromptDataset:
        """Return the dataset of prediction."""
        prompts = self.prompts(read_rows(self.predict_paths), self.prompt_tokenizer())
        return (ChoiceDataset if self.is_scored else PromptDataset)(prompts)

    def prompts(self, rows: Iterable[JsonRow], tokenizer: TextTokenizer) -> Iterator[list[Prompt]]:
        """Yield the tokens of the rows to predict, see `read_prompts`."""
        mode, limit = "score" if self.is_scored else "generate", "max_positions"
        options = (self.separator, mode, self.model.options.get(limit))
        return read_prompts(rows, tokenizer, *options)

    @property
    def is_scored(self) -> bool:
        """Whether prediction scores given choices instead of generating text."""
        generation = self.model.options.get("generation")  # `None` for models of other families
        return generation is not None and generation.mode == "score"

    @property
    def output_mark(self) -> str:  # type: ignore[override]
        return "scored" if self.is_scored else "completed"

    def written_columns(self, results: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
        """Yield the output columns of each row."""
        dataset: Any = self.datasets["predict"]
        return dataset.columns(results, self.prompt_tokenizer())

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write completions or scores from `results`, see `PromptDataset.columns`."""
        write_rows(read_rows(self.predict_paths), self.written_columns(results), path)

    def audit(self) -> Audit:
        """Return contents and faults of the files."""
        self.store = store = self.store_request().open("reject")
        limit, bad_rows = self.context_length + 1, read_rejected(store.folder)
        audit = Audit(self.noun, "tokens", limit=limit, bad_rows=bad_rows)
        audit.notes.append(("tokenizer", f"{store.tokenizer.vocab_size:,} tokens"))
        for number in range(len(PART_NAMES)):
            dataset = self.part_dataset(number)
            audit.warnings += dataset.losses
            if len((part := self.audit_part(number, dataset)).lengths):
                audit.parts.append(part)
        if self.predict_files is not None:
            self.audit_predict(audit)
        return audit

    def audit_predict(self, audit: Audit) -> None:
        """Add contents and faults of the prediction files."""
        lengths, keys, bad_rows = list[int](), list[int](), BadRows("reject")
        for row, prompts in self.sound_prompts(self.tokenizer, bad_rows):
            if prompts is not None:
                lengths.append(sum(len(prompt.ids) for prompt in prompts))
                keys.append(text_hash(self.question(row)))
        audit.bad_rows += bad_rows.rows
        if keys:
            audit.parts.append(AuditPart("predict", lengths, np.array(keys, np.uint64)))

    def sound_prompts(
        self, tokenizer: TextTokenizer, bad_rows: BadRows
    ) -> Iterator[tuple[JsonRow, list[Prompt] | None]]:
        """Yield each row to predict and its prompts, `None` for one that goes to `bad_rows`."""
        for row in read_rows(self.predict_paths):
            prompts: list[Prompt] | None = None
            try:
                (prompts,) = self.prompts([row], tokenizer)
            except ValueError as error:
                rule = str(error).removeprefix(f"{row.place}: ")
                is_fault = isinstance(error.__cause__, RowFault)
                kind, value = error.__cause__.args[:2] if is_fault else ("prompt", "")
                bad_rows.add(BadRow(str(row.file), row.line, value, rule, kind))
            yield row, prompts

    def question(self, row: JsonRow) -> str:
        """Return the question of a row to predict, as training samples hash it."""
        return row_prompt(row.values)[0] or ""

    def audit_part(self, number: int, dataset: Any) -> AuditPart:
        """Return the figures of a part of the store, and how much `part_dataset` uses."""
        stream, num_rows = self.store.stream(number), len(dataset.lengths)
        part = AuditPart(PART_NAMES[number], stream.num_positions + 1, stream.hashes)
        part.questions = stream.questions
        if num_rows:
            part.columns |= {
                "tokens": int(part.lengths.sum()),
                "trained on": int(dataset.target_counts[TERM].sum()),
                "rows": num_rows,
            }
        if num_rows and dataset.is_padded and self.layout != "documents":
            share = dataset.lengths.sum() / (num_rows * self.context_length)
            part.columns["used"] = f"{100 * share:.1f} %"
        return part


class TextDataModule(LanguageModelDataModule):
    """Tokenises text files once and serves rows of tokens. Without any file it uses demo text.

    `global_batch_size` counts rows; with `layout: documents` it counts documents. Documents longer
    than `context_length` are cut into pieces.

    Args:
        train_files: txt files, each a document, or jsonl, json or parquet files, each row a
            document; a path, a pattern, a folder, or a list of them.
        layout: `packed` fills rows with whole documents that do not see each other, `blocks` cuts
            the stream of all documents into equal blocks, `documents` makes each document a
            sample of its own and joins those of a micro-batch without padding.
        text_column: column with the documents of jsonl, json and parquet files.
        demo: text to use without files: the `documentation` of Python, or `stories` of at most 60
            words from a small grammar, which come with validation and test files.
        language_model: other files, tokenizer, split and prediction, see `LanguageModelDataModule`.
    """

    cuts_documents = True
    demo_file = demo.demo_text

    def __init__(
        self,
        train_files: Files = None,
        layout: Literal["packed", "blocks", "documents"] = "packed",
        text_column: str = "text",
        demo: Literal["documentation", "stories"] = "documentation",
        **language_model: Any,
    ) -> None:
        super().__init__(train_files=train_files, layout=layout, **language_model)
        self.text_column, self.demo = text_column, demo

    def part_dataset(self, part: int) -> TokenDataset:
        """Return the documents of a part."""
        if self.layout == "blocks":
            seed = self.seed if part == TRAIN else None
            return BlockDataset(self.store, part, self.context_length, seed)
        return TokenDataset(self.store, part, self.context_length, self.layout)

    def demo_files(self) -> dict[int, list[Path]]:
        if self.demo == "documentation":
            return super().demo_files()
        folder = demo.demo_stories()
        return {part: [folder / f"{name}.jsonl"] for part, name in enumerate(PART_NAMES)}
