"""Text files become planned batches of tokens for language models."""

from pathlib import Path
from typing import Any

from datamodules.audits import Audit
from datamodules.documents import SUFFIXES
from datamodules.planned import PlannedDataModule, PlannedDataset, Stage
from datamodules.sources import expand_files
from datamodules.splitting import PART_NAMES, TEST, TRAIN, VALIDATION
from datamodules.text_batches import BlockDataset, Layout, TokenDataset
from datamodules.token_store import TokenStore
from datamodules.token_writer import TextSplit, TokenRequest, open_token_store
from datamodules.tokenizers.text_tokenizer import TextTokenizer, TokenizerOptions

Files = str | list[str] | None


class TextDataModule(PlannedDataModule):
    """Tokenises text once and deals it in rows; `global_batch_size` counts these rows.

    Args:
        train_files: txt; a path, a pattern, or several.
        validation_files: none divides the training files.
        test_files: as validation_files.
        tokenizer: how text becomes tokens; a pretrained model brings its own.
        context_length: most positions of a row; longer documents are cut into pieces.
        layout: `packed` fills rows with whole documents that do not see each other, `blocks` cuts
            the stream of all documents into equal blocks, `documents` makes each document a
            sample of its own and joins those of a micro-batch without padding.
        split: how training files are divided.
        planned: batch sizes, plan and loader, see `PlannedDataModule`.

    After `setup`, `tokenizer` is what a model needs to know of the data.
    """

    def __init__(
        self,
        train_files: Files = None,
        validation_files: Files = None,
        test_files: Files = None,
        tokenizer: TokenizerOptions = TokenizerOptions(),  # noqa: B008 - frozen
        context_length: int = 256,
        layout: Layout = "packed",
        split: TextSplit = TextSplit(),  # noqa: B008 - frozen
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
        self.store: TokenStore | None = None

    def prepare_data(self) -> None:
        """Tokenise into the cache."""
        open_token_store(self.request_tokens())

    def setup(self, stage: str) -> None:
        """Open the cache and build the datasets of the stage."""
        if self.store is None:
            self.store = open_token_store(self.request_tokens())
        super().setup(stage)

    @property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer of the data; there after `setup`."""
        assert self.store is not None
        return self.store.tokenizer

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage.

        Raises:
            ValueError: no text belongs to it.
        """
        assert self.store is not None
        part = PART_NAMES.index(stage)
        stream, fingerprint = self.store.stream(part), f"{self.store.fingerprint}-{part}"
        if not stream.num_positions.sum():
            raise ValueError(
                f"no text is for {stage}; name data.{stage}_files, or raise "
                f"data.split.{stage}_share above {getattr(self.split, stage + '_share', 0)}."
            )
        if self.layout == "blocks":
            seed = self.seed if stage == "train" else None
            return BlockDataset(stream, fingerprint, self.context_length, seed)
        return TokenDataset(stream, fingerprint, self.context_length, self.layout)

    def audit(self) -> Audit:
        """Return what is in the files."""
        from datamodules.text_audit import audit_text

        if self.store is None:
            self.store = open_token_store(self.request_tokens())
        return audit_text(self)

    def request_tokens(self) -> TokenRequest:
        """Return what is read and how.

        Raises:
            FileNotFoundError: a named file does not exist.
        """
        files = {part: self._paths(part) for part in self.files}
        return TokenRequest(files, self.tokenizer_options, self.split)

    def _paths(self, part: int) -> list[Path]:
        return expand_files(self.files[part], f"data.{PART_NAMES[part]}_files", SUFFIXES)
