"""Writer of titles and descriptions for pages as a LightningModule, and its metrics.

Batch: TextBatch, SnippetBatch. Shapes: B pages.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.functional.text.rouge import rouge_score

from datamodules.core.batches import SnippetBatch
from datamodules.text.encoding import sentences_of
from datamodules.text.pages import WORD, Target, page_prompts
from datamodules.text.prompts import PromptDataset, completion_text, rows_in_memory
from datamodules.tokenizers.text import TextTokenizer
from lit_models.causal_lm.generation import GenerationOptions, generate
from lit_models.causal_lm.module import LitCausalLM
from lit_models.causal_lm.pretrained import most_positions
from lit_models.seo.metrics import GatheredRows
from lit_models.seo.onpage import LIMITS
from lit_models.training.metrics import SampleResult, SumCount, texts_for
from lit_models.training.strategies import EVALUATION_STEPS

ROUGE = ("rouge1", "rouge2", "rougeL")
BASELINE = "lead_"  # prefix of the lead sentence's scores


class SnippetMetrics(nn.ModuleDict):
    """All scores of one split, for the outputs and, with prefix `lead_`, for the lead sentence.

    Names, 0 to 1 except for the length: `rouge1`, `rouge2`, `rougeL` (F measure; words without
    case, not stemmed); `within_limits` (title 1 to 60 characters, description 70 to 160);
    `query_coverage`, the share of the query's words in the output, over pages with a query;
    `copy_rate`, the share of runs of three words that occur in the page; `characters`, the mean
    length; `duplicates`, the share of outputs that another page has, too.
    """

    def __init__(self, target: str) -> None:
        self.limits = LIMITS[target]
        names = (*ROUGE, "within_limits", "query_coverage", "copy_rate", "characters")
        metrics: dict[str, Metric] = {}
        for start in ("", BASELINE):
            metrics |= {start + name: SumCount() for name in names}
            metrics[f"{start}duplicates"] = Duplicates()
        super().__init__(metrics)

    def add_batch(self, snippets: Sequence[str], batch: SnippetBatch) -> None:
        """Add one batch. Args: snippets [B], and the batch of their pages."""
        leads = [next(iter(sentences_of(text.splitlines())), "") for text in batch["texts"]]
        for start, outputs in (("", snippets), (BASELINE, leads)):
            columns = zip(outputs, batch["texts"], batch["targets"], batch["queries"], strict=True)
            rated = [snippet_scores(*column, self.limits) for column in columns]
            weight = batch["weight"].double()
            for name in rated[0]:
                pairs = torch.tensor([page[name] for page in rated], dtype=torch.float64)
                value, own = pairs.to(weight.device).unbind(1)
                self[start + name].update(value * own * weight, own * weight)
            self[f"{start}duplicates"].update(outputs, weight)


class Duplicates(GatheredRows):
    """Share of texts that equal another one up to case and spaces; stores only hashes."""

    def update(self, texts: Sequence[str], weight: Tensor) -> None:  # type: ignore[override]
        """Add texts [B], except those of weight 0."""
        folded = [" ".join(text.casefold().split()).encode() for text in texts]
        digests = [hashlib.blake2b(text, digest_size=8).digest() for text in folded]
        numbers = [int.from_bytes(digest, "big", signed=True) for digest in digests]
        hashes = torch.tensor(numbers, dtype=torch.int64, device=weight.device)
        super().update(weight > 0, id=hashes)

    def compute(self) -> Tensor:  # type: ignore[override]
        """Return the share, [] float64."""
        _, counts = super().compute().id.unique(return_counts=True)
        return counts[counts > 1].sum().double() / counts.sum().clamp(min=1)


def snippet_scores(
    output: str, text: str, target: str, query: str, limits: tuple[int, int]
) -> dict[str, tuple[float, float]]:
    """Return name -> (score, weight) of one output, see `SnippetMetrics`; the weight is 0 if there
    is nothing to score, else 1. Args: the page's text; the target that people wrote; the query, ""
    if there is none; minimum and maximum of characters.

    Source of ROUGE: Lin 2004, sections 2 and 3.1; as torchmetrics computes it.
    """
    query_words, words, page_words = set(_words(query)), _words(output), _words(text)
    coverage, size = len(query_words & set(words)) / max(len(query_words), 1), min(3, len(words))
    runs, there = (
        [tuple(part[i : i + size]) for i in range(len(part) - size + 1)]
        for part in (words, page_words)
    )
    known = set(there)
    copied = sum(run in known for run in runs) / len(runs) if words else 0.0
    rouge = rouge_score(output, target, rouge_keys=ROUGE, normalizer=str, tokenizer=_words)
    return {
        **{name: (float(rouge[f"{name}_fmeasure"]), 1.0) for name in ROUGE},
        "within_limits": (float(limits[0] <= len(output) <= limits[1]), 1.0),
        "query_coverage": (coverage, float(bool(query_words))),
        "copy_rate": (copied, float(bool(words))),
        "characters": (float(len(output)), 1.0),
    }


def _words(text: str) -> list[str]:
    return WORD.findall(text.casefold())


def written_text(tokenizer: TextTokenizer, ids: np.ndarray, num_characters: int) -> str:
    """Return the text of one completion on one line. Args: as in `completion_text`."""
    return " ".join(completion_text(tokenizer, ids, num_characters).split())


class LitSnippetWriter(LitCausalLM):
    """Language model that writes a page's title or description. Logs the same as LitCausalLM, and
    the `SnippetMetrics` of its outputs in validation and test.

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
        self.val_snippets, self.test_snippets = SnippetMetrics(target), SnippetMetrics(target)

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

    def in_words(self, answers: dict[str, list[float]]) -> dict[str, str]:
        ids, [num_characters] = np.array(answers["written"], np.int64), answers["num_characters"]
        return {"written": written_text(self.tokenizer, ids, int(num_characters))}

    def _evaluate(self, split: Literal["val", "test"], batch: Any) -> SampleResult:
        result = super()._evaluate(split, batch)
        metrics: SnippetMetrics = getattr(self, f"{split}_snippets")
        prompts = (batch["prompt_ids"], batch["prompt_lengths"], batch["sample_id"])
        output = generate(self.network, self.tokenizer, *prompts, self.generation)
        pairs = zip(
            output.completion_ids.cpu().numpy(), output.num_characters.tolist(), strict=True
        )
        metrics.add_batch([written_text(self.tokenizer, *pair) for pair in pairs], batch)
        for name, metric in metrics.items():
            self.log(f"{split}/{name}", metric)
        answers = {"written": output.completion_ids, "num_characters": output.num_characters}
        return SampleResult(result.loss, answers)
