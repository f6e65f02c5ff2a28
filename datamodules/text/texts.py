"""Text files as planned batches of tokens for language models.

Shapes: R rows of the micro-batch, T positions of its longest; D documents, N pieces of them.
"""

from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from datamodules.core.batches import TERM
from datamodules.core.plan import rng_for
from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import cache_root
from datamodules.files.audit import Audit, MakeModel
from datamodules.files.documents import DocumentsBy, Reading, text_files
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION
from datamodules.text.language_model import LanguageModelDataModule, trained_pieces
from datamodules.text.packing import Piece, RowDataset
from datamodules.text.splitting import TextSplit, without_text
from datamodules.text.store import TokenRequest, TokenStore, TokenStream, open_token_store
from datamodules.tokenizers.text import (
    TextTokenizer,
    TokenizerOptions,
    model_options,
    options_of_model,
)

Layout = Literal["blocks", "packed", "documents"]
Files = str | list[str] | None
Demo = Literal["documentation", "stories"]


class TokenDataset(RowDataset):
    """One part of a token store, its documents cut into pieces.

    Args:
        stream: the tokens.
        fingerprint: of the store and the part.
        context_length: most positions of a row.
        layout: `packed` or `documents`, see `TextDataModule`.
        tokenizer: that of the stream, for `describe`.
    """

    def __init__(
        self,
        stream: TokenStream,
        fingerprint: str,
        context_length: int,
        layout: Layout,
        tokenizer: TextTokenizer,
    ) -> None:
        self.stream, self.tokenizer = stream, tokenizer
        self.starts, self.sizes = cut_into_pieces(stream, context_length)
        super().__init__(self.sizes, context_length, layout)
        self.fingerprint = f"{fingerprint}-{layout}-{context_length}"
        self.target_counts = {TERM: self.lengths}

    def piece(self, number: int) -> Piece:
        """Return one piece."""
        return self._stretch(int(self.starts[number]), int(self.sizes[number]))

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the text of each document of the row, special tokens included."""
        texts = {"positions": str(self.lengths[sample_id])}
        for number, piece in enumerate(self.example(sample_id, epoch), start=1):
            tokens = np.append(piece.input_ids, piece.labels[-1:])
            text = self.tokenizer.decode(tokens, skip_special_tokens=False)
            texts[f"document {number}"] = text
        return texts

    def _stretch(self, start: int, size: int) -> Piece:
        tokens = self.stream.tokens[start : start + size + 1].astype(np.int64)
        return Piece(tokens[:-1], tokens[1:])


class BlockDataset(TokenDataset):
    """Successive blocks of a stream, whatever its documents; each epoch cuts at other places.

    The stream is a ring: a block that passes its end goes on at its beginning, as a document of
    its own. So every epoch has the same number of blocks and uses each position exactly once.

    Args:
        stream: the tokens.
        fingerprint: of the store and the part.
        context_length: positions of a block; the last one may be shorter.
        tokenizer: that of the stream, for `describe`.
        seed: key of the places; `None` always cuts from the beginning (evaluation).
    """

    def __init__(
        self,
        stream: TokenStream,
        fingerprint: str,
        context_length: int,
        tokenizer: TextTokenizer,
        seed: int | None,
    ) -> None:
        self.stream, self.context_length = stream, context_length
        self.tokenizer, self.seed, self.is_padded = tokenizer, seed, True
        self.num_positions = max(0, len(stream.tokens) - 1)
        self.starts = np.arange(0, self.num_positions, context_length)
        self.lengths = np.minimum(context_length, self.num_positions - self.starts)
        self.fingerprint = f"{fingerprint}-blocks-{context_length}"
        self.target_counts = {TERM: self.lengths}
        self._phase_of: tuple[int, int] = (-1, 0)

    def example(self, sample_id: int, epoch: int) -> list[Piece]:
        """Return one block, in two pieces where it passes the end of the stream."""
        start = (int(self.starts[sample_id]) + self.phase(epoch)) % self.num_positions
        size = int(self.lengths[sample_id])
        before_end = min(size, self.num_positions - start)
        pieces = [self._stretch(start, before_end)]
        if before_end < size:
            pieces.append(self._stretch(0, size - before_end))
        return pieces

    def phase(self, epoch: int) -> int:
        """Return the position at which the blocks of an epoch begin."""
        if self.seed is None:
            return 0
        if self._phase_of[0] != epoch:
            phase = int(rng_for(self.seed, epoch, 0).integers(self.num_positions))
            self._phase_of = epoch, phase
        return self._phase_of[1]


def cut_into_pieces(stream: TokenStream, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts [N] and sizes [N] of the pieces of all documents, 1 to `longest` positions."""
    counts = -(-stream.num_positions // longest)  # [D]
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    before = number * longest
    starts = np.repeat(stream.starts, counts) + before
    sizes = np.minimum(longest, np.repeat(stream.num_positions, counts) - before)
    return starts, sizes


class TextDataModule(LanguageModelDataModule):
    """Tokenises text once and deals it in rows; without any file, embedded demo text.

    `global_batch_size` counts rows, with `layout: documents` documents.

    Args:
        train_files: txt, jsonl or parquet; a path, a pattern or a folder, or several.
        validation_files: `None` divides the training files.
        test_files: as validation_files; with validation files and none here, nothing is tested.
        tokenizer: how text becomes tokens; `None` takes that of a pretrained model, else bytes. A
            checkpoint's own wins in evaluation.
        context_length: most positions of a row; longer documents are cut into pieces.
        layout: `packed` fills rows with whole documents that do not see each other, `blocks` cuts
            the stream of all documents into equal blocks, `documents` makes each document a
            sample of its own and joins those of a micro-batch without padding.
        split: how training files are divided.
        text_column: of jsonl and parquet files, whose rows are documents.
        documents_by: a txt file is one document (`file`), or holds several, between blank lines
            (`blank_line`) or one in each line (`line`).
        demo: what is read where no file is named: the `documentation` of Python, or `stories` of a
            small grammar, each a document of at most 60 words, divided into files already.
        planned: files of prediction, see `LanguageModelDataModule`; batch sizes, plan and loader,
            see `PlannedDataModule`.

    After `setup`, `tokenizer` is what a model needs to know of the data, and `store` what it holds.

    Raises:
        ValueError: an option is out of its range, or in conflict with another.
    """

    def __init__(
        self,
        train_files: Files = None,
        validation_files: Files = None,
        test_files: Files = None,
        tokenizer: TokenizerOptions | None = None,
        context_length: int = 256,
        layout: Layout = "packed",
        split: TextSplit = TextSplit(),  # noqa: B008 - frozen
        text_column: str = "text",
        documents_by: DocumentsBy = "file",
        demo: Demo = "documentation",
        **planned: Any,
    ) -> None:
        super().__init__(**planned)
        self.files: dict[int, Files] = {
            TRAIN: train_files,
            VALIDATION: validation_files,
            TEST: test_files,
        }
        self.tokenizer_options = tokenizer
        self.context_length, self.layout, self.split = context_length, layout, split
        self.reading = Reading(text_column, documents_by)
        self.demo = demo
        self.store: TokenStore | None = None
        self._check()

    def prepare_data(self) -> None:
        """Tokenise into the cache."""
        if not self.is_predicting:
            self.open_store(self._trainer_stage())

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage.

        Raises:
            ValueError: no text belongs to it.
        """
        if stage == "predict":
            return self.build_prompts()
        assert self.store is not None
        part = PART_NAMES.index(stage)
        stream, fingerprint = self.store.stream(part), f"{self.store.fingerprint}-{part}"
        if not stream.num_positions.sum():
            is_divided = not self.files[VALIDATION] and not (stage == "test" and self.files[TEST])
            split = self.split if is_divided else None
            num_documents = len(self.store.stream(TRAIN).num_positions)
            raise ValueError(without_text(stage, split, num_documents))
        if self.layout == "blocks":
            seed = self.seed if stage == "train" else None
            return BlockDataset(stream, fingerprint, self.context_length, self.tokenizer, seed)
        return TokenDataset(stream, fingerprint, self.context_length, self.layout, self.tokenizer)

    def audit(self, make_model: MakeModel | None = None) -> Audit:
        """Return what is in the files.

        Args:
            make_model: builds the module of the run, which may bring its tokenizer.
        """
        if make_model is not None:
            self.tokenizer_options = options_of_model(make_model(), self.tokenizer_options)
        self.store = store = self.open_store("fit")
        audit = Audit("documents", "tokens", limit=self.context_length + 1)
        audit.notes.append(("tokenizer", f"{self.tokenizer.vocab_size:,} tokens"))
        for number, name in enumerate(PART_NAMES):
            sizes = store.stream(number).num_positions
            if not sizes.sum():
                continue
            dataset = self.build(cast(Stage, name))
            num_bytes = store.part_facts(number).num_bytes
            keys = store.hashes(number)
            audit.parts.append(self.audit_part(name, sizes + 1, keys, num_bytes, dataset))
            num_long, num_empty = (sizes > self.context_length).sum(), (sizes < 1).sum()
            if num_long and self.layout != "blocks":
                audit.warnings.append(
                    f"{num_long:,} {name} documents exceed the context; they are cut into pieces"
                )
            if num_empty:
                audit.warnings.append(f"{num_empty:,} {name} documents teach nothing")
            if name == "train":
                audit.excerpt = trained_pieces(dataset, self.tokenizer)
        return audit

    def store_request(self, may_lack_training: bool = False) -> TokenRequest:
        """Return what is read and how; the demo text where no file is named."""
        files = self.named_files(may_lack_training)
        reading = self.reading
        if not any(files.values()):
            files, reading = self._demo_files(), Reading()
        options = model_options(self.trainer, self.tokenizer_options)
        return TokenRequest(files, options, self.split, None, reading)

    def make_store(self, request: TokenRequest) -> TokenStore:
        return open_token_store(request)

    def _check(self) -> None:
        self.check_training()
        for name, choices in (("layout", get_args(Layout)), ("demo", get_args(Demo))):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f'{name} must be one of {", ".join(choices)}, got "{value}".')

    def paths(self, part: int) -> list[Path]:
        return text_files(self.files[part], f"data.{PART_NAMES[part]}_files")

    def _demo_files(self) -> dict[int, list[Path]]:
        from datamodules import demo  # made only where it is asked for

        if self.demo == "documentation":
            return {TRAIN: [demo.demo_text(cache_root())], VALIDATION: [], TEST: []}
        folder = demo.demo_stories(cache_root())
        return {part: [folder / f"{PART_NAMES[part]}.jsonl"] for part in (TRAIN, VALIDATION, TEST)}
