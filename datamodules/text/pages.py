"""Pages with a title or a description as planned batches for a model that writes them."""

import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from lightning.pytorch.utilities import rank_zero_only

from datamodules import demo
from datamodules.core.batches import IGNORED
from datamodules.core.plan import check_range
from datamodules.core.planned import own_files_hint
from datamodules.files.documents import line_of, parsed, visible_lines
from datamodules.files.rows import JsonRow, RowFault, check_characters, placed
from datamodules.files.splitting import TRAIN
from datamodules.text.instructions import (
    Instruction,
    InstructionDataModule,
    InstructionDataset,
    InstructionRequest,
    Marker,
    tokens_within,
)
from datamodules.text.prompts import Prompt, PromptDataset, begun, padded_prompts
from datamodules.tokenizers.text import TextTokenizer

log = logging.getLogger(__name__)
Target = Literal["title", "description"]
TARGETS = ("title", "description")
COLUMNS = ("html", "text", *TARGETS, "query")
SHAPES = '{"html": "<html>…", "query": "…"} or {"text": "…", "title": "…", "description": "…"}'
WORD = re.compile(r"\w+")
SEPARATORS = re.compile(r"\s+[|–—·»:/<>~•-]+\s+")  # of the parts of a title
PAGES_VERSION, MOST_BROKEN = 4, 16  # of how pages become prompts; lines of a heading


class WriterPage(NamedTuple):
    """One page as a writer reads it; "" stands for what the row lacks."""

    text: str  # visible lines without the target
    target: str  # what is to be written
    title: str  # "" where it is the target
    query: str  # by which the page is to be found


def page_of(row: JsonRow, target: Target) -> WriterPage:
    """Return the page of a row, which may lack its target; RowFault where it breaks a rule."""
    values = {name: row.values.get(name) for name in COLUMNS}
    for name, value in values.items():
        if value is not None and not isinstance(value, str):
            raise RowFault("type", str(value), f'"{name}" must be a text, got {value!r}.')
    check_characters(json.dumps(values, ensure_ascii=False))
    html, text = values["html"] or "", (values["text"] or "").strip()
    given = {name: " ".join((values[name] or "").split()) for name in (*TARGETS, "query")}
    lines = [" ".join(line.split()) for line in text.splitlines()]  # taken out of the HTML already
    if html.strip():
        tree = parsed(html)
        lines = lines or visible_lines(tree.body)
        meta = tree.css_first('meta[name="description" i]')
        content = (meta and meta.attributes.get("content")) or ""
        own = (line_of(tree.css_first("title:not(svg *)")), " ".join(content.split()))
        given |= {name: given[name] or text for name, text in zip(TARGETS, own, strict=True)}
    elif not lines:
        keys = ", ".join(row.values) or "nothing"
        raise RowFault("no page", keys, f'the row has no "html" and no "text"; write {SHAPES}.')
    parts = {_folded(part) for part in (given[target], *SEPARATORS.split(given[target]))} - {""}
    folded = [_folded(line) for line in lines]  # a part may be broken over several
    sizes = range(1, MOST_BROKEN + 1)
    runs = (range(first, first + size) for first in range(len(lines)) for size in sizes)
    taken = {n for run in runs if " ".join(folded[run.start : run.stop]) in parts for n in run}
    kept = [line for n, line in enumerate(lines) if line and n not in taken]
    if not kept:
        rule = f"the page has no visible text besides its {target}; leave the row out."
        raise RowFault("empty page", (text or html)[:60], rule)
    title = given["title"] if target != "title" else ""
    return WriterPage("\n".join(kept), given[target], title, given["query"])


def _folded(text: str) -> str:
    """Return the words alone, without case."""
    return " ".join(WORD.findall(text.casefold()))


def framed(page: WriterPage, target: Target) -> tuple[str, int]:
    """Return the prompt of a page, the query, the title where it is not the target, the text; and
    how many characters go as far as the end of the text, which they lose first."""
    given = (("Query", page.query), ("Title", page.title))
    head = "".join(f"{name}: {value}\n" for name, value in given if value)
    asking = f"{head}Page: {page.text}"
    return f"{asking}\n{target.capitalize()}:\n", len(asking)


@dataclass(frozen=True)
class PageRequest(InstructionRequest):
    """As `InstructionRequest`, of pages."""

    target: Target = "title"  # what is written
    max_prompt: int = 384  # tokens of a prompt, from which on the page loses its end
    kind = "pages"

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "pages": PAGES_VERSION}

    def marker(self, tokenizer: TextTokenizer) -> Marker:
        return Marker(tokenizer, self.separator, self.max_prompt)

    def sample(self, row: JsonRow) -> Instruction:
        page = page_of(row, self.target)
        if not page.target:
            rule = (
                f'the page has no {self.target}, neither as "{self.target}" nor in its html: '
                "nothing could be learnt; fill it in."
            )
            raise RowFault("no target", page.text[:60], rule)
        prompt, shrinks = framed(page, self.target)
        texts = json.dumps([page.text, page.target, page.query])
        sample = Instruction(str(row.file), row.line, prompt, page.target)
        # The queries of one page are on one side of the split.
        return sample._replace(shrinks=shrinks, group=page.text, extra=texts)


def page_prompts(
    rows: Iterable[JsonRow], tokenizer: TextTokenizer, target: Target, max_prompt: int
) -> Iterator[list[Prompt]]:
    """Return the tokens of pages to write for, read when they are asked for; they may lack the
    target. See `PageRequest`."""
    most = max_prompt - (tokenizer.begin_id is not None)

    def read(row: JsonRow) -> list[Prompt]:
        prompt, shrinks = framed(page_of(row, target), target)
        [encoding] = tokenizer.encode_with_offsets([prompt])
        offsets = np.array(encoding.offsets).reshape(-1, 2)
        kept = tokens_within(offsets, len(prompt), shrinks, most)
        ids = np.array(encoding.ids, np.int64)[kept].tolist()
        return [Prompt(begun(ids, False, tokenizer), 0, int((~kept).sum()))]

    return (placed(row.place, read, row) for row in rows)


class SnippetDataset(InstructionDataset):
    """One part for evaluation: a sample is one page, to be rated and to be written for."""

    def example(self, sample_id: int, epoch: int) -> Any:
        """Return the tokens of one page, and its text, its target and its query."""
        return self.piece(sample_id), json.loads(self.stream.extra(int(self.samples[sample_id])))

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Return the pages with their targets as one row, their prompts, and their texts."""
        pieces, texts = zip(*examples, strict=True)
        # A prompt ends before the first token that is trained on.
        prompts = [p.input_ids[: int(np.argmax(p.labels != IGNORED)) + 1] for p in pieces]
        prompt_ids, prompt_lengths = padded_prompts(prompts)
        names = ("texts", "targets", "queries")
        columns = dict(zip(names, map(list, zip(*texts, strict=True)), strict=True))
        rows = super().collate([[piece] for piece in pieces])
        return {**rows, "prompt_ids": prompt_ids, "prompt_lengths": prompt_lengths, **columns}


class PagesDataModule(InstructionDataModule):
    """Pages in, prompts with a title or description out; without any file, embedded demo data.

    A row of the files has `html` or `text` (which wins), `title` and `description` (or its html
    has them), and may have `query`. The target is taken out of the page, see
    `datamodules.text.pages`; a page that is too long loses its end, and one whose target has more
    than `max_target_tokens` is left out and counted.

    Args:
        target: what is written, `title` or `description`.
        max_target_tokens: room for it in context_length, in training as in use.
        instructions: see `InstructionDataModule`; rows beneath `train_files` and the others are
            pages.
    """

    too_long, output_mark = "leave_out", "written"
    request_class, predict_hint = PageRequest, own_files_hint
    demo_file = demo.demo_pages

    def __init__(
        self, target: Target = "title", max_target_tokens: int = 128, **instructions: Any
    ) -> None:
        super().__init__(separator="", **instructions)
        # The target is a part of the context.
        check_range("data", 1, self.context_length - 1, max_target_tokens=max_target_tokens)
        self.target = target
        # Tokens that a page may have with what is asked of it.
        self.max_prompt = self.context_length - max_target_tokens

    def part_dataset(self, part: int) -> InstructionDataset:
        """Return the pages of a part that fit; evaluation has one page per sample."""
        if part == TRAIN:
            return super().part_dataset(part)
        return SnippetDataset(self.store, part, self.context_length, "documents", self.too_long)

    def build_prompts(self) -> PromptDataset:
        """Return the dataset of prediction; rows may lack the target."""
        dataset = super().build_prompts()
        if num_cut := int((dataset.num_cut > 0).sum()):
            rank_zero_only(log.warning)(
                f"{num_cut} of {len(dataset.num_cut)} prompts are longer than the "
                f"{self.max_prompt} tokens that data.context_length leaves: the page's end is cut."
            )
        return dataset

    def prompts(self, rows: Iterable[JsonRow], tokenizer: TextTokenizer) -> Iterator[list[Prompt]]:
        return page_prompts(rows, tokenizer, self.target, self.max_prompt)

    def question(self, row: JsonRow) -> str:
        return page_of(row, self.target).text

    def written_columns(self, results: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
        for found in super().written_columns(results):
            snippet = " ".join(found["completion"].split())
            yield {
                "snippet": snippet,
                "num_characters": len(snippet),
                "finish_reason": found["finish_reason"],
                "page_tokens_cut": found["prompt_tokens_cut"],
            }
