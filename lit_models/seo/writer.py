"""Writer of titles and descriptions for pages as a LightningModule, and its metrics.

Batch: TextBatch, SnippetBatch. Shapes: B pages.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torchmetrics.functional.text.rouge import rouge_score

from datamodules.core.batches import SnippetBatch
from datamodules.core.store import text_hash
from datamodules.text.encoding import sentences_of
from datamodules.text.pages import WORD, Target, page_prompts
from datamodules.text.prompts import PromptDataset, completion_text, rows_in_memory
from datamodules.tokenizers.text import TextTokenizer
from lit_models.causal_lm.generation import GenerationOptions, generate
from lit_models.causal_lm.module import LitCausalLM
from lit_models.causal_lm.pretrained import most_positions
from lit_models.seo.metrics import GatheredRows, log_means
from lit_models.seo.onpage import LIMITS
from lit_models.training.metrics import SampleResult, texts_for
from lit_models.training.strategies import EVALUATION_STEPS

ROUGE = ("rouge1", "rouge2", "rougeL")
SCORES = (*ROUGE, "within_limits", "query_coverage", "copy_rate", "characters")
BASELINE = "lead_"  # prefix of the lead sentence's scores


class SnippetRows(GatheredRows):
    """Scores of a split's outputs and, with prefix `lead_`, of the lead sentences.

    Means, 0 to 1 except for the length: `rouge1`, `rouge2`, `rougeL` (F measure; words without
    case, not stemmed); `within_limits` (title 1 to 60 characters, description 70 to 160);
    `query_coverage`, the share of the query's words in the output, over pages with a query;
    `copy_rate`, the share of runs of three words that occur in the page; `characters`, the mean
    length; `duplicates`, the share of outputs that another page has, too.
    """

    def __init__(self, target: str) -> None:
        super().__init__(*(start + name for start in ("", BASELINE) for name in (*SCORES, "hash")))
        self.limits = LIMITS[target]

    def add_batch(self, snippets: Sequence[str], batch: SnippetBatch) -> None:
        """Add one batch. Args: snippets [B], and the batch of their pages."""
        leads = [next(iter(sentences_of(text.splitlines())), "") for text in batch["texts"]]
        columns, weight = {"id": batch["sample_id"]}, batch["weight"]
        for start, outputs in (("", snippets), (BASELINE, leads)):
            pages = zip(outputs, batch["texts"], batch["targets"], batch["queries"], strict=True)
            rated = [snippet_scores(*page, self.limits) for page in pages]
            for name in rated[0]:
                values = torch.from_numpy(np.array([page[name] for page in rated]))
                columns[start + name] = values.to(weight.device)
        self.update(weight > 0, **columns)

    def means(self) -> dict[str, Tensor]:
        """Return name -> mean [] float64, and reset; a collective."""
        rows, found = self.take(), dict[str, Tensor]()
        for start in ("", BASELINE):
            found |= {start + name: getattr(rows, start + name).nanmean() for name in SCORES}
            _, counts = getattr(rows, f"{start}hash").unique(return_counts=True)
            duplicates = counts[counts > 1].sum().double() / counts.sum().clamp(min=1)
            found[f"{start}duplicates"] = duplicates
        return found


def snippet_scores(
    output: str, text: str, target: str, query: str, limits: tuple[int, int]
) -> dict[str, float]:
    """Return name -> score of one output, see `SnippetRows`, NaN if there is nothing to score; and
    the `hash` of its words, an int64. Args: the page's text; the target that people wrote; the
    query, "" if there is none; minimum and maximum of characters.

    Source of ROUGE: Lin 2004, sections 2 and 3.1; as torchmetrics computes it.
    """
    query_words, words, page_words = set(_words(query)), _words(output), _words(text)
    size = min(3, len(words))
    runs, there = (
        [tuple(part[i : i + size]) for i in range(len(part) - size + 1)]
        for part in (words, page_words)
    )
    known = set(there)
    rouge = rouge_score(output, target, rouge_keys=ROUGE, normalizer=str, tokenizer=_words)
    covered = len(query_words & set(words))
    return {
        **{name: float(rouge[f"{name}_fmeasure"]) for name in ROUGE},
        "within_limits": float(limits[0] <= len(output) <= limits[1]),
        "query_coverage": covered / len(query_words) if query_words else math.nan,
        "copy_rate": sum(run in known for run in runs) / len(runs) if words else math.nan,
        "characters": float(len(output)),
        "hash": text_hash(" ".join(output.casefold().split())) - 2**63,
    }


def _words(text: str) -> list[str]:
    return WORD.findall(text.casefold())


def written_text(tokenizer: TextTokenizer, ids: np.ndarray, num_characters: int) -> str:
    """Return the text of one completion on one line. Args: as in `completion_text`."""
    return " ".join(completion_text(tokenizer, ids, num_characters).split())


class LitSnippetWriter(LitCausalLM):
    """Language model that writes a page's title or description. Logs the same as LitCausalLM, and
    the means of `SnippetRows` in validation and test.

    Args:
        target: `title` or `description`; must equal the data's target.
        generation: decoding options; by default at most 64 new tokens.
        language_model: see `LitCausalLM`.
    """

    settled_options: ClassVar[tuple[str, ...]] = (*LitCausalLM.settled_options, "target")
    uneven_steps: ClassVar[tuple[str, ...]] = EVALUATION_STEPS

    def __init__(
        self,
        target: Target = "title",
        generation: GenerationOptions | None = None,
        **language_model: Any,
    ) -> None:
        generation = generation or GenerationOptions(max_new_tokens=64)
        super().__init__(generation=generation, **language_model)
        self.target = target
        self.snippets = SnippetRows(target)

    def setup(self, stage: str) -> None:
        """Raise ValueError if the data have another target, and so other prompts."""
        target = getattr(self.trainer.datamodule, "target", None)
        if target != self.target:
            raise ValueError(
                f"model.target is {self.target} and the data's is {target}; set both to the same, "
                "with a PagesDataModule."
            )
        super().setup(stage)

    def recipe_of(self, data: Any, trained: dict[str, Any] | None) -> dict[str, Any]:
        return {"max_prompt": data.max_prompt, **super().recipe_of(data, trained)}

    def write(self, pages: Sequence[str | dict[str, str]]) -> list[str]:
        """Return the title or description of each page, on one line.

        Args:
            pages: their texts; or dicts like the rows of a file, with `text` or `html`, and
                optionally `query` or `title`. Prompts are cut as in training.

        Raises:
            ValueError: a page has neither text nor html.
        """
        pages = texts_for(self, pages, are_texts=False)
        rows = [page if isinstance(page, dict) else {"text": page} for page in pages]
        most, limit = self.recipe["max_prompt"], most_positions(self.recipe["network"])
        if limit is not None:
            most = min(most, limit - self.generation.max_new_tokens)
        prompts = page_prompts(rows_in_memory(rows), self.tokenizer, self.target, most)
        dataset = PromptDataset(prompts)
        return [" ".join(text.split()) for text in self.completions(dataset, self.generation)]

    def on_validation_epoch_end(self) -> None:
        self._log_snippets("val")

    def on_test_epoch_end(self) -> None:
        self._log_snippets("test")

    def in_words(self, answers: dict[str, list[float]]) -> dict[str, str]:
        ids, [num_characters] = np.array(answers["written"], np.int64), answers["num_characters"]
        return {"written": written_text(self.tokenizer, ids, int(num_characters))}

    def _evaluate(self, split: Literal["val", "test"], batch: Any) -> SampleResult:
        result = super()._evaluate(split, batch)
        prompts = (batch["prompt_ids"], batch["prompt_lengths"], batch["sample_id"])
        output = generate(self.network, self.tokenizer, *prompts, self.generation)
        pairs = zip(
            output.completion_ids.cpu().numpy(), output.num_characters.tolist(), strict=True
        )
        snippets = [written_text(self.tokenizer, *pair) for pair in pairs]
        self.snippets.add_batch(snippets, batch)
        answers = {"written": output.completion_ids, "num_characters": output.num_characters}
        return SampleResult(result.loss, answers)

    def _log_snippets(self, split: str) -> None:
        log_means(self, {f"{split}/{n}": mean for n, mean in self.snippets.means().items()})
