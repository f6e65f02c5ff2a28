"""Text files become planned batches of tokens for language models."""

from pathlib import Path
from typing import Any, Literal, cast, get_args

from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import cache_root
from datamodules.files.audit import Audit, MakeModel
from datamodules.files.documents import DocumentsBy, Reading, text_files
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION
from datamodules.text.batches import BlockDataset, Layout, TokenDataset
from datamodules.text.prompted import PromptedDataModule, trained_pieces
from datamodules.text.splitting import TextSplit, without_text
from datamodules.text.token_store import TokenStore
from datamodules.text.token_writer import TokenRequest, open_token_store
from datamodules.tokenizers.text_tokenizer import TokenizerOptions
from datamodules.tokenizers.wanted import model_options, options_of_model

Files = str | list[str] | None
Demo = Literal["documentation", "stories"]


class TextDataModule(PromptedDataModule):
    """Tokenises text once and deals it in rows; without any file, embedded demo text.

    `global_batch_size` counts rows, with `layout: documents` documents.

    Args:
        train_files: txt, jsonl or parquet; a path, a pattern or a folder, or several.
        validation_files: none divides the training files.
        test_files: as validation_files; with validation files and none here, nothing is tested.
        tokenizer: how text becomes tokens; none takes that of a pretrained model, else bytes. A
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
        planned: files of prediction, see `PromptedDataModule`; batch sizes, plan and loader, see
            `PlannedDataModule`.

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
