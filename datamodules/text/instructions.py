"""Prompts with answers, and chats, as planned batches of tokens for language models."""

import logging
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from datamodules.core.batches import IGNORED, TERM
from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import cache_root
from datamodules.files.audit import TOO_LONG, Audit, AuditPart, MakeModel
from datamodules.files.rows import SUFFIXES, BadRow, BadRows, hand_over_rejected
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION
from datamodules.files.tables import expand_files
from datamodules.text.instruction_store import (
    InstructionPart,
    InstructionRequest,
    InstructionStore,
    TrainOn,
    open_instruction_store,
)
from datamodules.text.language_model import LanguageModelDataModule, trained_pieces
from datamodules.text.packing import Piece, RowDataset
from datamodules.text.splitting import TextSplit
from datamodules.tokenizers.text import TokenizerOptions, model_options, options_of_model

TooLong = Literal["cut", "leave_out", "error"]
Layout = Literal["packed", "documents"]
LONG_WAY_OUT = "Raise it, or set data.too_long to cut (drops the beginning) or leave_out."
log = logging.getLogger(__name__)
Files = str | list[str] | None
TOKENS_AT_ONCE = 1 << 24


class Loss(NamedTuple):
    """A label of one or two words, and what is lost in how many samples."""

    label: str
    sentence: str


class Fitted(NamedTuple):
    """The samples that are used, K of them, and how many are not.

    samples [K] int64, their numbers in the part; starts [K] int64, first token used; sizes [K]
    int64, positions, one less than tokens; num_targets [K] int64.
    """

    samples: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    num_targets: np.ndarray
    num_too_long: int
    num_without_target: int
    num_answers_cut: int  # samples that lose some of their targets

    def losses(self, name: str, context_length: int, too_long: TooLong) -> list[Loss]:
        """Return what a user should hear of samples that are cut or left out.

        Args:
            name: of the part.
            context_length: as `fitted` took it.
            too_long: as `fitted` took it.
        """
        found = []
        if self.num_too_long:
            fate = {"cut": "their beginnings are cut off", "leave_out": "they are left out"}.get(
                too_long, "a run stops at them"
            )
            lost = f", {self.num_answers_cut:,} lose a part of an answer" * bool(
                self.num_answers_cut
            )
            sentence = (
                f"{self.num_too_long:,} {name} samples exceed data.context_length "
                f"{context_length:,}: {fate}{lost}"
            )
            found.append(Loss("too long", sentence))
        if self.num_without_target:
            sentence = f"{self.num_without_target:,} {name} samples have no target: left out"
            found.append(Loss("no target", sentence))
        return found


def fitted(part: InstructionPart, context_length: int, too_long: TooLong) -> Fitted:
    """Return the samples of a part as they fit into the context.

    `cut` drops the beginning: the end of the answer, where end-of-text stands, is what stays.

    Args:
        part: N samples.
        context_length: most positions of a sample.
        too_long: what happens to longer ones.
    """
    sizes = part.sizes - 1
    is_long = sizes > context_length
    surplus = np.where(is_long, sizes - context_length, 0)
    starts, sizes = part.starts + surplus, sizes - surplus
    before = count_trained(part.is_trained, part.starts + 1, part.sizes - 1)
    targets = before.copy()
    targets[is_long] = count_trained(part.is_trained, starts[is_long] + 1, sizes[is_long])
    stays = np.ones(len(sizes), bool) if too_long == "cut" else ~is_long
    used = np.flatnonzero(stays & (targets > 0))
    return Fitted(
        used,
        starts[used],
        sizes[used],
        targets[used],
        int(is_long.sum()),
        int((stays & (targets == 0)).sum()),
        int((stays & (targets < before)).sum()),
    )


def count_trained(is_trained: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the trained tokens of each stretch, [K] int64."""
    stretches = zip(starts.tolist(), sizes.tolist(), strict=True)
    counts = (np.count_nonzero(is_trained[start : start + size]) for start, size in stretches)
    return np.fromiter(counts, np.int64, len(starts))


class InstructionDataset(RowDataset):
    """One part of a store, each instruction a piece.

    Args:
        store: of the part.
        part: 0 train, 1 validation, 2 test.
        context_length: most positions of a row.
        layout: see `InstructionDataModule`.
        too_long: see `fitted`.

    Raises:
        ValueError: a sample is too long and the policy is `error`, or none is left.
    """

    long_way_out: ClassVar[str] = LONG_WAY_OUT

    def __init__(
        self,
        store: InstructionStore,
        part: int,
        context_length: int,
        layout: Layout,
        too_long: TooLong,
    ) -> None:
        self.store, self.part = store, store.part(part)
        self.fitted = fitted(self.part, context_length, too_long)
        if too_long == "error" and self.fitted.num_too_long:
            longest = int(self.part.sizes.argmax())
            raise ValueError(
                f"{self.fitted.num_too_long} samples are longer than data.context_length "
                f"{context_length}; the longest, {store.place(self.part, longest)}, has "
                f"{self.part.sizes[longest] - 1} positions. {self.long_way_out}"
            )
        sizes, name = self.fitted.sizes, PART_NAMES[part]
        if not len(sizes) and (self.fitted.num_too_long or self.fitted.num_without_target):
            raise ValueError(
                f"no sample of the {name} part is left: {self.fitted.num_too_long} are longer than "
                f"data.context_length {context_length}, {self.fitted.num_without_target} have no "
                "target; raise data.context_length."
            )
        if not len(sizes):
            raise ValueError(
                f"no sample is for {name}; name data.{name}_files, or raise "
                f"data.split.{name}_share."
            )
        super().__init__(sizes, context_length, layout)
        self.target_counts = {TERM: self.per_row(self.fitted.num_targets)}
        self.fingerprint = f"{store.fingerprint}-{part}-{layout}-{context_length}-{too_long}"

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the places, the texts and what is trained on, one line per instruction."""
        shown: dict[str, list[str]] = {"place": [], "text": [], "trained on": []}
        for i in self.pieces_of(sample_id):
            piece = self.piece(i)
            answer = piece.labels[piece.labels != IGNORED]
            shown["place"].append(self.store.place(self.part, int(self.fitted.samples[i])))
            shown["text"].append(repr(self.store.tokenizer.decode(piece.input_ids)))
            decoded = self.store.tokenizer.decode(answer, skip_special_tokens=False)
            shown["trained on"].append(repr(decoded))
        return {name: "\n".join(lines) for name, lines in shown.items()}

    def piece(self, number: int) -> Piece:
        """Return one instruction; what is not trained on has no label."""
        start = int(self.fitted.starts[number])
        end = start + int(self.fitted.sizes[number]) + 1
        tokens = self.part.tokens[start:end].astype(np.int64)
        return Piece(
            tokens[:-1], np.where(self.part.is_trained[start + 1 : end], tokens[1:], IGNORED)
        )


class InstructionDataModule(LanguageModelDataModule):
    """Tokenises instructions once and deals them; without any file, embedded demo data.

    Args:
        train_files: jsonl, json or parquet; a path, a pattern, or several. A row has prompt and
            completion, messages with role and content, conversations with from and value
            (ShareGPT), or instruction, input and output (Alpaca).
        validation_files: `None` divides the training files.
        test_files: as validation_files.
        tokenizer: how text becomes tokens; `None` takes that of a pretrained model, else bytes. A
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
        planned: files of prediction, see `LanguageModelDataModule`; batch sizes, plan and loader,
            see `PlannedDataModule`.

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
