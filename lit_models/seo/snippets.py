"""Snippets: candidates, the best of them, their metrics, and the on-page report beside them."""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

from datamodules.files.rows import JsonRow
from datamodules.text.prompts import completion_text
from datamodules.text.terms import sentences_of
from datamodules.tokenizers.text import TextTokenizer
from lit_models.causal_lm.generation import Completions, GenerationOptions
from lit_models.seo.onpage import (
    LONGEST_DESCRIPTION,
    LONGEST_TITLE,
    SHORTEST_DESCRIPTION,
    Page,
    PageFinding,
    check_page,
    is_address,
    shown,
)
from lit_models.seo.ranker import LitRanker
from lit_models.training.metrics import SumCount


@dataclass(frozen=True)
class BestOf:
    """What is written besides the usual, and who chooses.

    A page without a query keeps the usual snippet: there is nothing to rank by.

    Args:
        ranker: folder of a LitRanker that `unisono export` wrote; one without `prior`.
        num_candidates: K; the first is written as `generation` says, the others are drawn.
        temperature: of the draws.

    Raises:
        ValueError: fewer than two candidates, or a temperature that draws nothing.
    """

    ranker: str
    num_candidates: int = 4
    temperature: float = 0.8

    def __post_init__(self) -> None:
        if self.num_candidates < 2:
            raise ValueError(
                f"best_of.num_candidates must be at least 2, got {self.num_candidates}; leave "
                "best_of out to write one."
            )
        if not self.temperature > 0:
            raise ValueError(f"best_of.temperature must be above 0, got {self.temperature}.")

    def options(self, usual: GenerationOptions) -> list[GenerationOptions]:
        """Return how each candidate is written; every draw has numbers of its own."""
        drawn = [
            replace(usual, temperature=self.temperature, seed=usual.seed + number)
            for number in range(1, self.num_candidates)
        ]
        return [usual, *drawn]

    def loaded_ranker(self) -> LitRanker:
        """Return the ranker, on the CPU.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: it holds another module, or a ranker that needs a first stage's scores.
        """
        ranker = LitRanker.from_exported(self.ranker)
        if ranker.adds_prior:
            raise ValueError(
                f"best_of.ranker {self.ranker} adds a first stage's scores, which snippets do not "
                "have; train one with model.prior=false."
            )
        return ranker


def best(
    candidates: Sequence[Completions],
    texts_of: Callable[[Completions], list[str]],
    queries: Sequence[str],
    ranker: LitRanker,
) -> Completions:
    """Return the best candidate of each page; of equal scores, the first.

    Args:
        candidates: K completions of the same pages.
        texts_of: what gives their texts [B].
        queries: [B], "" where there is none.
        ranker: that scores texts for a query.
    """
    texts = [texts_of(candidate) for candidate in candidates]  # [K][B]
    chosen = [
        int(ranker.rank(query, [of_page[row] for of_page in texts]).argmax()) if query else 0
        for row, query in enumerate(queries)
    ]
    rows = range(len(queries))
    fields = zip(*candidates, strict=True)
    return Completions(
        *(
            torch.stack([values[k][row] for k, row in zip(chosen, rows, strict=True)])
            for values in fields
        )
    )


def onpage_record(row: JsonRow, snippet: str) -> dict[str, Any] | None:
    """Return the report of a row's html as it is, its query counted as a keyword; none without
    html.

    Args:
        row: with `html`, and perhaps `query` and `url`.
        snippet: what was written for it, which is not yet in the page.
    """
    html, query = row.values.get("html"), (row.values.get("query") or "").strip()
    if not html:
        return None
    url = row.values.get("url") or None
    is_known = url is not None and is_address(url)
    page = Page(row.place, html, url if is_known else None)
    if url is not None and not is_known:
        rule = "the url is no whole address, such as https://example.org/page"
        page.findings.append(PageFinding("address", rule, shown(url)))
    keywords = [query] if any(c.isalnum() for c in query) else []
    return check_page(page, keywords).to_dict()


if TYPE_CHECKING:
    from datamodules.core.batches import SnippetBatch

LIMITS = {"title": (1, LONGEST_TITLE), "description": (SHORTEST_DESCRIPTION, LONGEST_DESCRIPTION)}
WORDS_COPIED = 3  # in a run
WORD = re.compile(r"\w+")
ROUGE = ("rouge1", "rouge2", "rougeL")
BASELINE = "lead_"  # before the names of the same scores of the lead sentence


class Score(NamedTuple):
    """A value of one page, and 1 where it counts or 0 where there is nothing to rate."""

    value: float
    weight: float = 1.0


class SnippetMetrics(nn.ModuleDict):
    """All scores of one split, of what is written and, after `lead_`, of the lead sentence.

    Names, all 0 to 1 but for the length: `rouge1`, `rouge2`, `rougeL` (F measure; words without
    case, not stemmed); `within_limits` (title 1 to 60 characters, description 70 to 160);
    `query_coverage`, the share of the query's words that occur, over the pages with a query;
    `copy_rate`, the share of runs of three words that stand in the page; `characters`, the mean
    length; `duplicates`, the share of outputs that another page has too.

    Args:
        target: title or description.
    """

    def __init__(self, target: str) -> None:
        self.limits = LIMITS[target]
        names = (*ROUGE, "within_limits", "query_coverage", "copy_rate", "characters")
        metrics: dict[str, Metric] = {}
        for start in ("", BASELINE):
            metrics |= {start + name: SumCount() for name in names}
            metrics[f"{start}duplicates"] = Duplicates()
        super().__init__(metrics)

    def add_batch(self, snippets: Sequence[str], batch: "SnippetBatch") -> None:
        """Add one batch. Args: snippets [B], and the batch that they were written for."""
        leads = [lead_sentence(text) for text in batch["texts"]]
        for start, outputs in (("", snippets), (BASELINE, leads)):
            columns = zip(outputs, batch["texts"], batch["targets"], batch["queries"], strict=True)
            rated = [snippet_scores(*column, self.limits) for column in columns]
            weight = batch["weight"].double()
            for name in rated[0]:
                pairs = torch.tensor([page[name] for page in rated], dtype=torch.float64)
                value, own = pairs.to(weight.device).unbind(1)
                self[start + name].update(value * own * weight, own * weight)
            self[f"{start}duplicates"].update(outputs, weight)


class Duplicates(Metric):
    """The share of texts that another one equals, kept as hashes: exact on any number of devices.

    Case and spaces do not matter.
    """

    full_state_update = False
    hashes: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("hashes", [], dist_reduce_fx="cat")

    def update(self, texts: Sequence[str], weight: Tensor) -> None:
        """Add texts [B]; those of weight 0 do not count."""
        hashes = torch.tensor([_hash(text) for text in texts], device=weight.device)
        self.hashes.append(hashes[weight > 0])

    def compute(self) -> Tensor:
        """Return the share, [] float64; 0 without any text."""
        none_yet = torch.zeros(0, dtype=torch.int64, device=self.device)
        kept = (
            self.hashes if isinstance(self.hashes, Tensor) else torch.cat([none_yet, *self.hashes])
        )
        _, counts = kept.unique(return_counts=True)
        repeated = counts[counts > 1].sum().double()
        return repeated / max(len(kept), 1)


def written_texts(done: Completions, tokenizer: TextTokenizer) -> list[str]:
    """Return the text of each completion, on one line."""
    pairs = zip(done.completion_ids.cpu().numpy(), done.num_characters.tolist(), strict=True)
    return [written_text(tokenizer, *pair) for pair in pairs]


def written_text(tokenizer: TextTokenizer, ids: np.ndarray, num_characters: int) -> str:
    """Return the text of one completion, on one line; arguments as for `completion_text`."""
    return " ".join(completion_text(tokenizer, ids, num_characters).split())


def snippet_scores(
    output: str, text: str, target: str, query: str, limits: tuple[int, int]
) -> dict[str, Score]:
    """Return the scores of one output by name, see `SnippetMetrics`.

    Args:
        output: what is rated.
        text: of the page.
        target: what people wrote.
        query: "" where there is none.
        limits: fewest and most characters.
    """
    asked = set(words(query))
    said = words(output)
    return {
        **{name: Score(value) for name, value in rouge(output, target).items()},
        "within_limits": Score(float(limits[0] <= len(output) <= limits[1])),
        "query_coverage": Score(len(asked & set(said)) / max(len(asked), 1), float(bool(asked))),
        "copy_rate": Score(copy_rate(said, words(text)), float(bool(said))),
        "characters": Score(float(len(output))),
    }


def rouge(output: str, target: str) -> dict[str, float]:
    """Return ROUGE-1, -2 and -L, F measures from 0 to 1; words of all scripts count.

    In single precision, so that figures are those of torchmetrics, whose import takes 2 s.

    Source: Lin 2004, sections 2 and 3.1.
    """
    said, wanted = words(output), words(target)
    shared: dict[str, tuple[int, int, int]] = {}
    for size, name in enumerate(ROUGE[:2], start=1):
        own, other = Counter(_runs(said, size)), Counter(_runs(wanted, size))
        shared[name] = (own & other).total(), own.total(), other.total()
    shared[ROUGE[2]] = longest_common(said, wanted), len(said), len(wanted)
    return {name: float(np.float32(_f_measure(*counts))) for name, counts in shared.items()}


def longest_common(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    lengths = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for place, other in enumerate(second, start=1):
            above = lengths[place]
            lengths[place] = diagonal + 1 if word == other else max(above, lengths[place - 1])
            diagonal = above
    return lengths[-1]


def _f_measure(shared: int, said: int, wanted: int) -> float:
    if not shared:
        return 0.0
    precision, recall = shared / said, shared / wanted
    return 2 * precision * recall / (precision + recall)


def _runs(said: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(said[i : i + size]) for i in range(len(said) - size + 1)]


def copy_rate(said: Sequence[str], page: Sequence[str]) -> float:
    """Return the share of the runs of three words that stand in the page; a shorter output is one
    run."""
    if not said:
        return 0.0
    size = min(WORDS_COPIED, len(said))
    there, runs = set(_runs(page, size)), _runs(said, size)
    return sum(run in there for run in runs) / len(runs)


def lead_sentence(text: str) -> str:
    """Return the first sentence of a page's text: what a writer must be better than."""
    return next(iter(sentences_of(text.splitlines())), "")


def words(text: str) -> list[str]:
    """Return the words of a text without case."""
    return WORD.findall(text.casefold())


def _hash(text: str) -> int:
    folded = " ".join(text.casefold().split())
    return int.from_bytes(
        hashlib.blake2b(folded.encode(), digest_size=8).digest(), "big", signed=True
    )
