"""What is in the tokens of a language model's data: lengths, repetition, packing, targets."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from datamodules.audits import TOO_LONG
from datamodules.core.batches import IGNORED, TERM
from datamodules.core.planned import PlannedDataset
from datamodules.files.bad_rows import BadRow
from datamodules.files.splitting import PART_NAMES, TRAIN
from datamodules.text.batches import Piece
from datamodules.text.instruction_batches import (
    InstructionDataset,
    Loss,
    TooLong,
    fitted,
)
from datamodules.text.instruction_store import InstructionPart, InstructionStore
from datamodules.tokenizers.text_tokenizer import TextTokenizer

if TYPE_CHECKING:
    from rich.console import Console

    from datamodules.text.instructions import InstructionDataModule
    from datamodules.text.texts import TextDataModule

TOKENS_AT_ONCE = 1 << 24


@dataclass
class PartAudit:
    """One part of the data.

    Args:
        name: train, validation or test.
        lengths: [N] tokens of each document or sample, special ones included.
        keys: [N] uint64, equal for equal ones.
        num_bytes: of UTF-8 that the tokens spell; none where they do not spell the text.
        losses: what is cut or teaches nothing.
        num_targets: tokens that are predicted, after cutting.
        num_rows: rows of a batch that they fill.
        used_share: of the positions of these rows, 0 to 1; none where rows have no fixed length.
    """

    name: str
    lengths: np.ndarray
    keys: np.ndarray
    num_bytes: int | None
    losses: list[Loss]
    num_targets: int = 0
    num_rows: int = 0
    used_share: float | None = None

    @property
    def num_tokens(self) -> int:
        """All tokens."""
        return int(self.lengths.sum())

    @property
    def num_duplicates(self) -> int:
        """Documents or samples that are there before, word for word."""
        return len(self.keys) - len(np.unique(self.keys))


class Run(NamedTuple):
    """Successive tokens of one sample that are all trained on, or all not."""

    text: str
    is_trained: bool


@dataclass
class TextAudit:
    """Findings over all parts.

    Args:
        noun: what a part consists of: documents or samples.
        parts: those that hold something.
        vocab_size: of the tokenizer.
        context_length: most positions of a row.
        layout: of the rows.
        warnings: one line each.
        bad_rows: rows that break a rule.
        excerpt: a row of training.
    """

    noun: str
    parts: list[PartAudit]
    vocab_size: int
    context_length: int
    layout: str
    warnings: list[str] = field(default_factory=list)
    bad_rows: list[BadRow] = field(default_factory=list)
    excerpt: list[Run] = field(default_factory=list)

    def overlap(self, part: PartAudit) -> int:
        """Return how many different documents of a part are in training too."""
        train = next((p.keys for p in self.parts if p.name == PART_NAMES[TRAIN]), np.zeros(0))
        return int(np.isin(np.unique(part.keys), train).sum())

    def show(self, console: "Console") -> None:
        """Print the findings."""
        from datamodules.text_audit_view import show_audit

        show_audit(console, self)


def audit_text(data: "TextDataModule") -> TextAudit:
    """Return what is in the token store of a `TextDataModule`.

    Args:
        data: with `store` opened.
    """
    store, tokenizer = data.store, data.tokenizer
    assert store is not None
    audit = TextAudit("documents", [], tokenizer.vocab_size, data.context_length, data.layout)
    for number, name in enumerate(PART_NAMES):
        stream = store.stream(number)
        if not stream.num_positions.sum():
            continue
        num_long = int((stream.num_positions > data.context_length).sum())
        part = PartAudit(
            name,
            stream.num_positions + 1,
            store.hashes(number),
            store.part_facts(number).num_bytes,
            _losses_of_text(name, num_long, int((stream.num_positions < 1).sum()), data.layout),
        )
        _add(audit, part, data.build(name), tokenizer)  # type: ignore[arg-type]
    return audit


def audit_instructions(data: "InstructionDataModule", store: InstructionStore) -> TextAudit:
    """Return what is in the store of an `InstructionDataModule`, bad rows included."""
    tokenizer = store.tokenizer
    bytes_of = tokenizer.byte_lengths()
    audit = TextAudit("samples", [], tokenizer.vocab_size, data.context_length, data.layout)
    audit.bad_rows = list(store.bad_rows)
    for number, name in enumerate(PART_NAMES):
        samples = store.part(number)
        if not len(samples.sizes):
            continue
        found = fitted(samples, data.context_length, data.too_long)
        part = PartAudit(
            name,
            samples.sizes,
            samples.keys,
            _spelled_bytes(samples.tokens, bytes_of),
            found.losses(name, data.context_length, data.too_long),
        )
        if data.too_long == "error":
            way_out = data.dataset_class.long_way_out
            audit.bad_rows += _long_rows(store, samples, data.context_length, way_out)
        if not len(found.samples):
            audit.parts.append(part)
            continue
        policy: TooLong = "leave_out" if data.too_long == "error" else data.too_long
        dataset = InstructionDataset(store, number, data.context_length, data.layout, policy)
        _add(audit, part, dataset, tokenizer)
    audit.warnings = _instruction_warnings(store)
    return audit


def runs_of(pieces: Sequence[Piece], tokenizer: TextTokenizer) -> list[Run]:
    """Return the text of one row, cut where training begins and ends."""
    runs: list[Run] = []
    for piece in pieces:
        tokens = np.append(piece.input_ids, np.maximum(piece.labels[-1:], 0))
        is_trained = np.append(False, piece.labels != IGNORED)
        if piece.labels[-1] == IGNORED:  # nobody knows this token
            tokens, is_trained = tokens[:-1], is_trained[:-1]
        borders = np.flatnonzero(np.diff(is_trained)) + 1
        for ids, flags in zip(
            np.split(tokens, borders), np.split(is_trained, borders), strict=True
        ):
            decode = tokenizer.decode_continuation if runs else tokenizer.decode
            text = decode(ids, skip_special_tokens=False)
            runs.append(Run(text, bool(flags[0])))
    return runs


def _add(
    audit: TextAudit, part: PartAudit, dataset: PlannedDataset, tokenizer: TextTokenizer
) -> None:
    targets = dataset.target_counts[TERM]
    assert targets is not None
    part.num_targets, part.num_rows = int(targets.sum()), len(dataset.lengths)
    if audit.layout != "documents":
        part.used_share = float(dataset.lengths.sum() / (part.num_rows * audit.context_length))
    if part.name == PART_NAMES[TRAIN]:
        audit.excerpt = runs_of(dataset.example(part.num_rows // 2, 0), tokenizer)
    audit.parts.append(part)


def _losses_of_text(name: str, num_long: int, num_empty: int, layout: str) -> list[Loss]:
    losses = []
    if num_long and layout != "blocks":
        found = f"{num_long:,} {name} documents exceed the context; they are cut into pieces"
        losses.append(Loss("too long", found))
    if num_empty:
        losses.append(Loss("no target", f"{num_empty:,} {name} documents teach nothing"))
    return losses


def _long_rows(
    store: InstructionStore, part: InstructionPart, context_length: int, way_out: str
) -> Iterator[BadRow]:
    for i in np.flatnonzero(part.sizes - 1 > context_length).tolist():
        rule = (
            f"the sample has {part.sizes[i] - 1} positions, more than data.context_length "
            f"{context_length}. {way_out}"
        )
        yield BadRow(store.file_of(part, i), int(part.lines[i]), "", rule, TOO_LONG)


def _instruction_warnings(store: InstructionStore) -> list[str]:
    inside, special = store.facts["begins_inside_token"], store.facts["holds_special_token"]
    warnings = []
    if inside:
        warnings.append(
            f"{inside:,} samples have an answer that begins inside a token; in use the prompt ends "
            "before it and the model meets other tokens. Move the space or line break at the end "
            "of the prompt to the beginning of the answer."
        )
    if special:
        warnings.append(
            f"{special:,} samples have a special token written in their text; it counts as one."
        )
    return warnings


def _spelled_bytes(tokens: np.ndarray, bytes_of: np.ndarray | None) -> int | None:
    if bytes_of is None:
        return None
    starts = range(0, len(tokens), TOKENS_AT_ONCE)
    return sum(int(bytes_of[tokens[start : start + TOKENS_AT_ONCE]].sum()) for start in starts)
