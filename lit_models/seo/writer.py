"""Titles and descriptions from pages as a LightningModule. Batch: TextBatch, SnippetBatch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from datamodules.core.batches import SnippetBatch
from datamodules.core.planned import ModelFacts
from datamodules.text.pages import TARGETS, PagePromptDataset, Target
from datamodules.text.prompts import rows_in_memory
from lit_models.causal_lm.generation import Completions, GenerationOptions, generate
from lit_models.causal_lm.module import LitCausalLM
from lit_models.seo.ranker import LitRanker
from lit_models.seo.snippets import (
    BestOf,
    SnippetMetrics,
    best,
    onpage_record,
    written_text,
    written_texts,
)
from lit_models.training.metrics import SampleResult


class LitSnippetWriter(LitCausalLM):
    """A language model that writes a page's title or description; logs as LitCausalLM, and what
    `SnippetMetrics` says of texts that it writes in validation and test.

    Args:
        target: what is written; the data must name the same.
        onpage: prediction adds the on-page report of each row that has html.
        best_of: write several snippets and let a ranker choose, in evaluation and prediction.
        language_model: see `LitCausalLM`; generation writes 64 tokens at most where not given.

    Raises:
        ValueError: an unknown target, or options of generation for scores.
    """

    settled_options: ClassVar[tuple[str, ...]] = (*LitCausalLM.settled_options, "target")

    def __init__(
        self,
        target: Target = "title",
        onpage: bool = False,
        generation: GenerationOptions | None = None,
        best_of: BestOf | None = None,
        **language_model: Any,
    ) -> None:
        if target not in TARGETS:
            raise ValueError(f'target must be {" or ".join(TARGETS)}, got "{target}".')
        generation = generation or GenerationOptions(max_new_tokens=64)
        if generation.mode != "generate":
            raise ValueError('a writer writes texts; leave generation.mode at "generate".')
        super().__init__(generation=generation, **language_model)
        self.target, self.onpage, self.best_of = target, onpage, best_of
        self._rankers: list[LitRanker] = []  # at most one; a list hides it from the state
        self.val_snippets, self.test_snippets = SnippetMetrics(target), SnippetMetrics(target)

    def setup(self, stage: str) -> None:
        """Refuse data of another target, whose prompts ask for something else."""
        given = getattr(self.trainer.datamodule, "target", None)
        if given != self.target:
            raise ValueError(
                f"model.target is {self.target} and the data's is {given}; set both to the same, "
                "with a PagesDataModule."
            )
        super().setup(stage)

    def model_facts(self) -> ModelFacts:
        facts = super().model_facts()
        records = {"onpage": onpage_record} if self.onpage else {}
        return replace(facts, options={**facts.options, "page_records": records})

    def written(self, batch: SnippetBatch) -> list[str]:
        """Return what the model writes for each page, on one line."""
        return written_texts(self._completions(batch), self.tokenizer)

    def write(self, pages: Sequence[str | dict[str, str]], max_prompt: int = 384) -> list[str]:
        """Return the title or description of each page, on one line.

        Args:
            pages: their texts; or dicts as the rows of a file, with `text` or `html`, and `query`
                or `title` where there is one.
            max_prompt: tokens of a page that are read, at most.

        Raises:
            ValueError: a page holds neither text nor html.
        """
        rows = [{"text": page} if isinstance(page, str) else page for page in pages]
        limit = self.max_positions(self.recipe)
        if limit is not None:
            max_prompt = min(max_prompt, limit - self.generation.max_new_tokens)
        asked = rows_in_memory(rows)
        dataset = PagePromptDataset(asked, self.tokenizer, self.target, max_prompt)
        return [
            written_text(self.tokenizer, ids, characters)
            for done in self._answers(dataset, self.generation)
            for ids, characters in zip(
                done["completion_ids"].numpy(), done["num_characters"].tolist(), strict=True
            )
        ]

    def predict_step(self, batch: Any, batch_idx: int, options: Any = None) -> dict[str, Tensor]:
        if self.best_of is None:
            return super().predict_step(batch, batch_idx, options)
        prompts = (batch["input_ids"], batch["lengths"], batch["sample_id"])
        return self._completed(*prompts, batch["queries"])._asdict()

    def _completions(self, batch: SnippetBatch) -> Completions:
        prompts = (batch["prompt_ids"], batch["prompt_lengths"], batch["sample_id"])
        return self._completed(*prompts, batch["queries"])

    def _completed(
        self, input_ids: Tensor, lengths: Tensor, sample_ids: Tensor, queries: list[str]
    ) -> Completions:
        prompts = (input_ids, lengths, sample_ids)
        if self.best_of is None:
            return generate(self.network, self.tokenizer, *prompts, self.generation)
        candidates = [
            generate(self.network, self.tokenizer, *prompts, options)
            for options in self.best_of.options(self.generation)
        ]
        return best(candidates, self._texts_of, queries, self._ranker())

    def _texts_of(self, done: Completions) -> list[str]:
        return written_texts(done, self.tokenizer)

    def _ranker(self) -> LitRanker:
        assert self.best_of is not None
        if not self._rankers:
            self._rankers.append(self.best_of.loaded_ranker().to(self.device))
        return self._rankers[0]

    def in_words(self, answers: dict[str, list[float]]) -> dict[str, str]:
        ids, [num_characters] = np.array(answers["written"], np.int64), answers["num_characters"]
        return {"written": written_text(self.tokenizer, ids, int(num_characters))}

    def _evaluate(self, split: Literal["val", "test"], batch: Any) -> SampleResult:
        judged = super()._evaluate(split, batch)
        metrics: SnippetMetrics = getattr(self, f"{split}_snippets")
        done = self._completions(batch)
        metrics.add_batch(written_texts(done, self.tokenizer), batch)
        for name, metric in metrics.items():
            self.log(f"{split}/{name}", metric, on_step=False, on_epoch=True)
        answers = {"written": done.completion_ids, "num_characters": done.num_characters}
        return SampleResult(judged.loss, answers)
