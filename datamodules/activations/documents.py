"""DocumentsDataModule: the documents that a subject reads, whether dumped or read again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.activations.attributes import NONE, DocumentFacts, document_facts
from datamodules.activations.pieces import Pieces
from datamodules.activations.positions import PositionRule, drawn_positions
from datamodules.core.planned import PlannedDataModule
from datamodules.core.store import cache_root
from datamodules.files.audit import Audit, AuditPart
from datamodules.files.documents import DocumentsBy, Reading, text_files
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION
from datamodules.text.preparation import TokenRequest, open_token_store
from datamodules.text.splitting import TextSplit
from datamodules.text.store import TokenStore
from datamodules.tokenizers.text_tokenizer import TokenizerOptions
from datamodules.tokenizers.wanted import model_options

Files = str | list[str] | None
STORY_FILES = {TRAIN: ["train"], VALIDATION: ["validation"], TEST: ["test", "combinations"]}


class DocumentsDataModule(PlannedDataModule):
    """Reads documents with the subject's tokenizer and chooses positions in them.

    Args:
        train_files: txt, jsonl or parquet; without any file, embedded stories.
        validation_files: none divides the training files by documents.
        test_files: as validation_files.
        tokenizer: of a subject with random weights; one in a folder brings its own.
        context_length: tokens of the longest document that the subject reads, the one that follows
            its last position included; longer ones are cut into pieces.
        positions: which activations are taken.
        split: how training files are divided.
        text_column: of jsonl and parquet files, whose rows are documents.
        attributes_column: of jsonl and parquet files; maps names to words of the text.
        documents_by: see `TextDataModule`.
        planned: batch sizes, plan and loader, see `PlannedDataModule`.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        train_files: Files = None,
        validation_files: Files = None,
        test_files: Files = None,
        tokenizer: TokenizerOptions | None = None,
        context_length: int = 64,
        positions: PositionRule = PositionRule(),  # noqa: B008 - frozen
        split: TextSplit = TextSplit(test_share=0.1),  # noqa: B008 - frozen
        text_column: str = "text",
        attributes_column: str | None = "attributes",
        documents_by: DocumentsBy = "file",
        **planned: Any,
    ) -> None:
        super().__init__(**planned)
        self.files: dict[int, Files] = {
            TRAIN: train_files,
            VALIDATION: validation_files,
            TEST: test_files,
        }
        self.tokenizer_options = tokenizer
        self.context_length, self.positions, self.split = context_length, positions, split
        self.reading = Reading(text_column, documents_by)
        self.attributes_column = attributes_column
        shortest = positions.min_position + 2  # a position, and the token that follows
        if context_length < shortest:
            raise ValueError(
                f"context_length {context_length} leaves no position from positions.min_position "
                f"{positions.min_position} on; raise it to {shortest} or more, or lower "
                "positions.min_position."
            )
        if split.by != "documents":
            raise ValueError(
                f'split.by is "{split.by}", and a lens may not share documents between parts; '
                "leave it at documents."
            )

    @property
    def has_files(self) -> bool:
        """Whether files are named, or the embedded stories are read."""
        return any(self.files.values())

    def open_tokens(self) -> TokenStore:
        """Return the documents as tokens, made at first use.

        Raises:
            ValueError: there is no text, or two parts hold the same document.
        """
        options = model_options(self.trainer, self.tokenizer_options)
        paths = {part: self.paths(part) for part in (TRAIN, VALIDATION, TEST)}
        store = open_token_store(TokenRequest(paths, options, self.split, None, self._reading()))
        check_parts(store)
        return store

    def paths(self, part: int) -> list[Path]:
        """Return the files of a part; the embedded stories where no file is named."""
        if not self.has_files:
            from datamodules import demo  # made only where it is asked for

            folder = demo.demo_stories(cache_root())
            return [folder / f"{name}.jsonl" for name in STORY_FILES[part]]
        return text_files(self.files[part], f"data.{PART_NAMES[part]}_files")

    def facts_of(self, store: TokenStore, part: int) -> DocumentFacts:
        """Return the attributes and files of a part's documents."""
        files = self.paths(part) or self.paths(TRAIN)
        column = self.attributes_column
        return document_facts(files, store.hashes(part), self._reading(), column, store.tokenizer)

    def places_of(self, store: TokenStore, part: int) -> tuple[Pieces, np.ndarray, np.ndarray]:
        """Return the documents of a part, and the piece [N] and position [N] of each activation."""
        pieces = Pieces(store, part, self.context_length)
        return pieces, *drawn_positions(pieces.sizes, pieces.hashes, self.positions)

    def audit_of(
        self,
        store: TokenStore,
        places: Callable[[int], tuple[Pieces, np.ndarray, np.ndarray]],
        facts_of: Callable[[int], DocumentFacts],
        rule: PositionRule,
    ) -> Audit:
        """Return what the parts of a store of tokens, or of activations, hold.

        Args:
            store: of the documents.
            places: returns the documents of a part, and the piece and position of each activation.
            facts_of: returns what is known of its documents.
            rule: how positions are drawn.
        """
        audit = Audit("documents", "tokens")
        names: list[str] = []
        shares: list[str] = []
        for number, name in enumerate(PART_NAMES):
            pieces, piece, _ = places(number)
            facts, hashes = facts_of(number), store.hashes(number)
            audit.limit, count = pieces.context_length, len(facts.group)
            is_read = np.zeros(count, bool)
            is_read[pieces.document[piece]] = True
            names += [known for known in facts.names if known not in names]
            if not count:
                continue
            shares.append(f"{name} {100 * (facts.attributes != NONE).any(1).mean():.1f} %")
            columns: dict[str, int | str] = {
                "tokens": store.part_facts(number).num_tokens,
                "too short": int((~is_read).sum()),
                "cut": int((np.bincount(pieces.document, minlength=count) > 1).sum()),
                "activations": len(piece),
            }
            lengths = pieces.stream.num_positions + 1
            audit.parts.append(AuditPart(name, lengths, hashes, columns))
        audit.notes.append(
            (
                "positions",
                f"up to {rule.per_document} of each document, from {rule.min_position} on, seed "
                f"{rule.seed}; documents of more than {audit.limit:,} tokens are cut",
            )
        )
        sentence = "none; recall of known attributes is not reported"
        if names:
            listed = ", ".join(names[:12]) + (" …" if len(names) > 12 else "")
            sentence = f"{len(names)} ({listed}); documents with any: {', '.join(shares)}"
        audit.notes.append(("attributes", sentence))
        return audit

    def _reading(self) -> Reading:
        return self.reading if self.has_files else Reading()


def without_activation(name: str) -> str:
    """Return what to say where a part has no activation."""
    return (
        f"the part {name} holds no activation: none of its documents is longer than "
        "data.positions.min_position, or it has none; lower that, or give it texts, with "
        f"data.{name}_files or a share of data.split (and dump again where there is a store)."
    )


def check_parts(store: TokenStore) -> None:
    """Refuse documents that stand in two parts: a lens would be tested on what it has learnt.

    Raises:
        ValueError: there are some.
    """
    hashes = [set(store.hashes(part).tolist()) for part in (TRAIN, VALIDATION, TEST)]
    for one, other in ((TRAIN, VALIDATION), (TRAIN, TEST), (VALIDATION, TEST)):
        shared = hashes[one] & hashes[other]
        if shared:
            raise ValueError(
                f"{len(shared)} documents are both in {PART_NAMES[one]} and in "
                f"{PART_NAMES[other]}; take them out of one of the two, or name the training files "
                "alone and let data.split divide them."
            )
