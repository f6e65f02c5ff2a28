"""Prompts with answers, and chats, become planned batches of tokens for language models."""

import logging
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import cache_root
from datamodules.files.audit import TOO_LONG, Audit, AuditPart, MakeModel
from datamodules.files.bad_rows import BadRow, BadRows, hand_over_rejected
from datamodules.files.rows import SUFFIXES
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION
from datamodules.files.tables import expand_files
from datamodules.text.chat import TrainOn
from datamodules.text.instruction_batches import InstructionDataset, Layout, TooLong, fitted
from datamodules.text.instruction_store import InstructionStore
from datamodules.text.instruction_writer import InstructionRequest, open_instruction_store
from datamodules.text.prompted import PromptedDataModule, trained_pieces
from datamodules.text.splitting import TextSplit
from datamodules.tokenizers.text_tokenizer import TokenizerOptions
from datamodules.tokenizers.wanted import model_options, options_of_model

log = logging.getLogger(__name__)
Files = str | list[str] | None
TOKENS_AT_ONCE = 1 << 24


class InstructionDataModule(PromptedDataModule):
    """Tokenises instructions once and deals them; without any file, embedded demo data.

    Args:
        train_files: jsonl, json or parquet; a path, a pattern, or several. A row has prompt and
            completion, messages with role and content, conversations with from and value
            (ShareGPT), or instruction, input and output (Alpaca).
        validation_files: none divides the training files.
        test_files: as validation_files.
        tokenizer: how text becomes tokens; none takes that of a pretrained model, else bytes. A
            checkpoint's own wins in evaluation. Chats need one with a chat template.
        context_length: most positions of a row.
        layout: `packed` fills rows with whole samples that do not see each other, `documents`
            keeps samples apart and joins those of a micro-batch without padding.
        train_on: `answers` only, each with its end, or `all` tokens.
        too_long: a sample beyond context_length is `cut` at its beginning, so that the end of the
            answer stays, or left out (`leave_out`), or an `error`.
        separator: stands between a prompt and its completion.
        split: how training files are divided, by a hash of the text.
        on_bad_rows: `error` names the first 20, `reject` writes all to rejected.csv.
        planned: files of prediction, see `PromptedDataModule`; batch sizes, plan and loader, see
            `PlannedDataModule`.

    After `setup`, `tokenizer` is what a model needs to know of the data.

    Raises:
        ValueError: options are wrong or in conflict.
    """

    dataset_class: ClassVar[type[InstructionDataset]] = InstructionDataset

    def __init__(
        self,
        train_files: Files = None,
        validation_files: Files = None,
        test_files: Files = None,
        tokenizer: TokenizerOptions | None = None,
        context_length: int = 512,
        layout: Layout = "packed",
        train_on: TrainOn = "answers",
        too_long: TooLong = "cut",
        separator: str = "",
        split: TextSplit = TextSplit(),  # noqa: B008 - frozen
        on_bad_rows: Literal["error", "reject"] = "error",
        **planned: Any,
    ) -> None:
        super().__init__(**planned)
        self.files: dict[int, Files] = {
            TRAIN: train_files,
            VALIDATION: validation_files,
            TEST: test_files,
        }
        self.tokenizer_options, self.split = tokenizer, split
        self.context_length, self.layout, self.too_long = context_length, layout, too_long
        self.train_on, self.separator, self.on_bad_rows = train_on, separator, on_bad_rows
        self.store: InstructionStore | None = None
        self._check()

    def prepare_data(self) -> None:
        """Tokenise into the cache; say what does not fit, and copy rejected rows to the run."""
        if self.is_predicting:
            return
        store = self.open_store(self._trainer_stage())
        run_folder = self.trainer.default_root_dir if self.trainer is not None else "."
        hand_over_rejected(store.folder, Path(run_folder))
        for number, name in enumerate(PART_NAMES):
            found = fitted(store.part(number), self.context_length, self.too_long)
            for loss in found.losses(name, self.context_length, self.too_long):
                log.warning(loss.sentence)

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage.

        Raises:
            ValueError: no sample belongs to it, or one is too long and must not be.
        """
        if stage == "predict":
            return self.build_prompts(self.separator)
        assert self.store is not None
        part = PART_NAMES.index(stage)
        options = (self.context_length, self.layout, self.too_long)
        return self.dataset_class(self.store, part, *options)

    def audit(self, make_model: MakeModel | None = None) -> Audit:
        """Return what is in the files, and what is wrong with them.

        Args:
            make_model: builds the module of the run, which may bring its tokenizer.
        """
        if make_model is not None:
            self.tokenizer_options = options_of_model(make_model(), self.tokenizer_options)
        store = open_instruction_store(self.store_request())
        tokenizer, is_error = store.tokenizer, self.too_long == "error"
        audit = Audit("samples", "tokens", limit=self.context_length + 1)
        audit.bad_rows = list(store.bad_rows)
        audit.notes.append(("tokenizer", f"{tokenizer.vocab_size:,} tokens"))
        bytes_of = tokenizer.byte_lengths()
        for number, name in enumerate(PART_NAMES):
            samples = store.part(number)
            if not len(samples.sizes):
                continue
            found = fitted(samples, self.context_length, self.too_long)
            losses = found.losses(name, self.context_length, self.too_long)
            audit.warnings += [loss.sentence for loss in losses]
            if is_error:
                for i in np.flatnonzero(samples.sizes - 1 > self.context_length).tolist():
                    rule = (
                        f"the sample has {samples.sizes[i] - 1} positions, more than "
                        f"data.context_length {self.context_length}. "
                        f"{self.dataset_class.long_way_out}"
                    )
                    place = store.file_of(samples, i), int(samples.lines[i])
                    audit.bad_rows.append(BadRow(*place, "", rule, TOO_LONG))
            if not len(found.samples):
                audit.parts.append(AuditPart(name, samples.sizes, samples.keys))
                continue
            # A part is read piece by piece: it may not fit into memory.
            starts = range(0, len(samples.tokens), TOKENS_AT_ONCE)
            pieces = (samples.tokens[start : start + TOKENS_AT_ONCE] for start in starts)
            num_bytes = None
            if bytes_of is not None:
                num_bytes = sum(int(bytes_of[piece].sum()) for piece in pieces)
            policy: TooLong = "leave_out" if is_error else self.too_long
            options = (self.context_length, self.layout, policy)
            dataset = InstructionDataset(store, number, *options)
            part = self.audit_part(name, samples.sizes, samples.keys, num_bytes, dataset)
            audit.parts.append(part)
            if name == "train":
                audit.excerpt = trained_pieces(dataset, tokenizer)
        if inside := store.facts["begins_inside_token"]:
            audit.warnings.append(
                f"{inside:,} samples have an answer that begins inside a token; in use the prompt "
                "ends before it and the model meets other tokens. Move the space or line break at "
                "the end of the prompt to the beginning of the answer."
            )
        if special := store.facts["holds_special_token"]:
            audit.warnings.append(
                f"{special:,} samples have a special token written in their text; it counts as one."
            )
        return audit

    def store_request(self, may_lack_training: bool = False) -> InstructionRequest:
        """Return what is read and how; the demo samples where no file is named."""
        files = self.named_files(may_lack_training)
        if not any(files.values()):
            files[TRAIN] = self.demo_files()
        options = model_options(self.trainer, self.tokenizer_options)
        return InstructionRequest(files, options, self.split, self.train_on, self.separator)

    def demo_files(self) -> list[Path]:
        """Return the embedded data, which is made only where it is asked for."""
        from datamodules import demo

        return [demo.demo_instructions(cache_root())]

    def make_store(self, request: InstructionRequest) -> InstructionStore:
        store = open_instruction_store(request)
        if store.bad_rows and self.on_bad_rows == "error":
            found = BadRows("error")
            for row in store.bad_rows:
                found.add(row)
            raise ValueError(found.message())
        return store

    def _check(self) -> None:
        self.check_training()
        choices = {
            "layout": ("packed", "documents"),
            "train_on": ("answers", "all"),
            "too_long": ("cut", "leave_out", "error"),
            "on_bad_rows": ("error", "reject"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f'{name} must be {" or ".join(allowed)}, got "{getattr(self, name)}".'
                )
        if self.split.by != "documents":
            raise ValueError(
                f'split.by "{self.split.by}" would cut samples apart; instructions are divided by '
                "documents."
            )

    def paths(self, part: int) -> list[Path]:
        return expand_files(self.files[part], f"data.{PART_NAMES[part]}_files", SUFFIXES)
