"""The dataset that gives `TextBatch` of instructions, and what happens to over-long samples."""

from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from datamodules.core.batches import IGNORED, TERM
from datamodules.core.planned import PlannedDataset
from datamodules.files.splitting import PART_NAMES
from datamodules.text.batches import Piece, one_row, padded_rows
from datamodules.text.instruction_store import InstructionPart, InstructionStore
from datamodules.text.packing import best_fit

TooLong = Literal["cut", "leave_out", "error"]
Layout = Literal["packed", "documents"]
LONG_WAY_OUT = "Raise it, or set data.too_long to cut (drops the beginning) or leave_out."


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


class InstructionDataset(PlannedDataset):
    """One part of a store. A sample is a list of instructions, which share a row.

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
        self.is_padded = layout != "documents"
        self.fitted = fitted(self.part, context_length, too_long)
        if too_long == "error" and self.fitted.num_too_long:
            raise ValueError(
                f"{_long_ones(store, self.part, context_length, self.fitted.num_too_long)} "
                f"{self.long_way_out}"
            )
        sizes = self.fitted.sizes
        if not len(sizes):
            raise ValueError(_none_left(PART_NAMES[part], self.fitted, context_length))
        if layout == "packed":
            self.order, self.offsets = best_fit(sizes, context_length)
        else:
            self.order, self.offsets = np.arange(len(sizes)), np.arange(len(sizes) + 1)
        self.lengths = np.add.reduceat(sizes[self.order], self.offsets[:-1])
        targets = np.add.reduceat(self.fitted.num_targets[self.order], self.offsets[:-1])
        self.target_counts = {TERM: targets}
        self.fingerprint = f"{store.fingerprint}-{part}-{layout}-{context_length}-{too_long}"

    def example(self, sample_id: int, epoch: int) -> list[Piece]:
        """Return the instructions of one row."""
        return [self._piece(int(i)) for i in self._instructions(sample_id)]

    def collate(self, examples: list[list[Piece]]) -> dict[str, Any]:
        """Return the rows; samples of single documents follow each other in one row, unpadded."""
        return padded_rows(examples) if self.is_padded else one_row(examples)

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the places, the texts and what is trained on, one line per instruction."""
        shown: dict[str, list[str]] = {"place": [], "text": [], "trained on": []}
        for i in self._instructions(sample_id):
            piece = self._piece(int(i))
            answer = piece.labels[piece.labels != IGNORED]
            shown["place"].append(self.store.place(self.part, int(self.fitted.samples[i])))
            shown["text"].append(repr(self.store.tokenizer.decode(piece.input_ids)))
            decoded = self.store.tokenizer.decode(answer, skip_special_tokens=False)
            shown["trained on"].append(repr(decoded))
        return {name: "\n".join(lines) for name, lines in shown.items()}

    def _instructions(self, sample_id: int) -> np.ndarray:
        return self.order[self.offsets[sample_id] : self.offsets[sample_id + 1]]

    def _piece(self, i: int) -> Piece:
        start = int(self.fitted.starts[i])
        end = start + int(self.fitted.sizes[i]) + 1
        tokens = self.part.tokens[start:end].astype(np.int64)
        return Piece(
            tokens[:-1], np.where(self.part.is_trained[start + 1 : end], tokens[1:], IGNORED)
        )


def _long_ones(
    store: InstructionStore, part: InstructionPart, context_length: int, count: int
) -> str:
    longest = int(part.sizes.argmax())
    return (
        f"{count} samples are longer than data.context_length {context_length}; the longest, "
        f"{store.place(part, longest)}, has {part.sizes[longest] - 1} positions."
    )


def _none_left(name: str, found: Fitted, context_length: int) -> str:
    if found.num_too_long or found.num_without_target:
        return (
            f"no sample of the {name} part is left: {found.num_too_long} are longer than "
            f"data.context_length {context_length}, {found.num_without_target} have no target; "
            "raise data.context_length."
        )
    return f"no sample is for {name}; name data.{name}_files, or raise data.split.{name}_share."
