"""Pages with a title or a description become planned batches for a model that writes them."""

import logging
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import cache_root
from datamodules.files.audit import Audit, MakeModel
from datamodules.files.bad_rows import BadRows
from datamodules.files.splitting import PART_NAMES, TEST, VALIDATION
from datamodules.files.tables import own_files_hint
from datamodules.text.instruction_batches import InstructionDataset
from datamodules.text.instruction_store import InstructionStore
from datamodules.text.instructions import InstructionDataModule
from datamodules.text.page_batches import PageDataset, PagePromptDataset, SnippetDataset
from datamodules.text.page_output import write_snippets
from datamodules.text.page_rows import TARGETS, Target
from datamodules.text.page_store import PagePrompts, PageRequest, open_page_texts
from datamodules.text.prompt_rows import read_rows
from datamodules.text.prompts import PromptDataset

log = logging.getLogger(__name__)


class PagesDataModule(InstructionDataModule):
    """Pages in, prompts with a title or description out; without any file, embedded demo data.

    A row of the files has `html` or `text` (which wins), `title` and `description` (or its html
    has them), and may have `query` and `url`. The target is taken out of the page, see
    `datamodules.text.page_rows`; a page that is too long loses its end, never the target.

    Args:
        target: what is written, `title` or `description`.
        max_target_tokens: room for it in context_length, in training as in use.
        too_long: a target beyond its room is left out (`leave_out`), or an `error`.
        instructions: see `InstructionDataModule`; rows beneath `train_files` and the others are
            pages.

    Raises:
        ValueError: options are wrong or in conflict.
    """

    dataset_class: ClassVar[type[InstructionDataset]] = PageDataset

    def __init__(
        self,
        target: Target = "title",
        max_target_tokens: int = 128,
        too_long: Literal["leave_out", "error"] = "error",
        **instructions: Any,
    ) -> None:
        if target not in TARGETS:
            raise ValueError(f'target must be {" or ".join(TARGETS)}, got "{target}".')
        if too_long == "cut":
            raise ValueError(
                "too_long must be leave_out or error: a page loses its end in any case, and a "
                "target is never cut."
            )
        super().__init__(
            too_long=too_long, train_on="answers", separator="", prompt_column=None, **instructions
        )
        self.target, self.max_target_tokens = target, max_target_tokens
        self.page_request: PageRequest | None = None  # of the store
        if not 0 < max_target_tokens < self.context_length:
            raise ValueError(
                f"max_target_tokens must be 1 to {self.context_length - 1}, got "
                f"{max_target_tokens}: it is a part of context_length {self.context_length}."
            )

    @property
    def max_prompt(self) -> int:
        """Tokens that a page may have with what is asked of it."""
        return self.context_length - self.max_target_tokens

    def prepare_data(self) -> None:
        """Tokenise into the cache, and copy the texts by which is judged what is written."""
        super().prepare_data()
        if self.page_request is not None and not self.is_predicting:
            store = self.make_store(self.page_request)
            for part in (VALIDATION, TEST):
                open_page_texts(self.page_request, store, part)

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage; evaluation has one page per sample.

        Raises:
            ValueError: see `InstructionDataModule.build`.
        """
        if stage in ("train", "predict"):
            return super().build(stage)
        assert self.store is not None
        assert self.page_request is not None
        part = PART_NAMES.index(stage)
        texts = open_page_texts(self.page_request, self.store, part)
        return SnippetDataset(self.store, texts, part, self.context_length, self.too_long)

    def build_prompts(self, separator: str = "") -> PromptDataset:
        """Return the dataset of prediction; rows may lack the target."""
        tokenizer = self.prompt_tokenizer()
        asked = PagePrompts(
            self._predict_paths(), tokenizer, target=self.target, max_prompt=self.max_prompt
        )
        dataset = PagePromptDataset(asked)
        num_cut = int((dataset.num_cut > 0).sum())
        if num_cut and self.trainer.is_global_zero:
            log.warning(
                "%d of %d pages are longer than the %d tokens that data.context_length leaves: "
                "their end is cut.",
                num_cut,
                len(dataset.num_cut),
                self.max_prompt,
            )
        return dataset

    def audit(self, make_model: MakeModel | None = None) -> Audit:
        """Return what is in the files, what is wrong with them, and where the target shows."""
        audit = super().audit(make_model)
        pages = [page for _, _, page in self.store_request().pages(BadRows("collect"))]
        if num_removed := sum(page.num_removed > 0 for page in pages):
            audit.warnings.append(
                f"{num_removed:,} of {len(pages):,} pages have their {self.target} as a line of "
                "its own, such as the h1; it is taken out."
            )
        if num_holding := sum(page.holds_target for page in pages):
            audit.warnings.append(
                f"{num_holding:,} of {len(pages):,} pages hold the words of their {self.target} "
                "within a longer passage; it stays, and copying it is part of what is learnt."
            )
        return audit

    def store_request(self, may_lack_training: bool = False) -> PageRequest:
        """Return what is read and how; the demo pages where no file is named."""
        request = super().store_request(may_lack_training)
        return PageRequest(**vars(request), target=self.target, max_prompt=self.max_prompt)

    def predict_hint(self, command: str) -> str:
        """Return the command for the pages of this run."""
        return own_files_hint(command, self.store_request().files)

    def demo_files(self) -> list[Path]:
        """Return the embedded data."""
        from datamodules import demo

        return [demo.demo_pages(cache_root())]

    def make_store(self, request: Any) -> InstructionStore:
        self.page_request = request
        return super().make_store(request)

    @property
    def predict_output_path(self) -> Path:
        """Where the rows go with what was written for them."""
        if self.predict_output is not None:
            return Path(self.predict_output).expanduser()
        name = f"{self._predict_paths()[0].stem}.written.jsonl"
        return Path(self.trainer.default_root_dir) / name

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write each row with what was written for it; `results` as `complete` returns them."""
        dataset, module = self.datasets["predict"], self.trainer.lightning_module
        assert isinstance(dataset, PromptDataset)
        rows, tokenizer = read_rows(self._predict_paths()), self.prompt_tokenizer()
        write_snippets(rows, results, path, tokenizer, dataset.num_cut, module.page_records())
