"""Datamodule of web pages for a model that writes their titles or descriptions."""

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
from datamodules.files.rows import (
    BadRows,
    JsonRow,
    RowFault,
    check_characters,
    placed,
    refuse,
    report_rejected,
)
from datamodules.files.splitting import TRAIN
from datamodules.text.instructions import (
    Instruction,
    InstructionDataModule,
    InstructionDataset,
    InstructionRequest,
    Marker,
    tokens_within,
)
from datamodules.text.prompts import Prompt, PromptDataset, padded_prompts, with_begin
from datamodules.tokenizers.text import TextTokenizer

log = logging.getLogger(__name__)
Target = Literal["title", "description"]
TARGETS = ("title", "description")
COLUMNS = ("html", "text", *TARGETS, "query")
WRITTEN = ("snippet", "num_characters", "finish_reason", "page_tokens_cut")  # in a prediction
SHAPES = '{"html": "<html>…", "query": "…"} or {"text": "…", "title": "…", "description": "…"}'
WORD = re.compile(r"\w+")
SEPARATORS = re.compile(r"\s+[|–—·»:/<>~•-]+\s+")  # between the parts of a title
# Version of the prompts; the most lines over which a heading may be broken.
PAGES_VERSION, MOST_BROKEN = 4, 16


class WriterPage(NamedTuple):
    """One page as the model reads it; a text that the row lacks is ""."""

    text: str  # visible lines without the target
    target: str  # the title or description to write
    title: str  # "" if it is the target
    query: str  # search query that should find the page


def page_of(row: JsonRow, target: Target) -> WriterPage:
    """Return the page of a row, which may lack its target; RowFault if it breaks a rule."""
    values = {name: row.values.get(name) for name in COLUMNS}
    for name, value in values.items():
        if value is not None and not isinstance(value, str):
            raise RowFault("type", str(value), f'"{name}" must be a text, got {value!r}.')
    check_characters(json.dumps(values, ensure_ascii=False))
    html, text = values["html"] or "", (values["text"] or "").strip()
    texts = {name: " ".join((values[name] or "").split()) for name in (*TARGETS, "query")}
    lines = [" ".join(line.split()) for line in text.splitlines()]  # `text` wins over html
    if html.strip():
        tree = parsed(html)
        lines = lines or visible_lines(tree.body)
        meta = tree.css_first('meta[name="description" i]')
        content = (meta and meta.attributes.get("content")) or ""
        own = (line_of(tree.css_first("title:not(svg *)")), " ".join(content.split()))
        texts |= {name: texts[name] or text for name, text in zip(TARGETS, own, strict=True)}
    elif not lines:
        keys = ", ".join(row.values) or "nothing"
        rule = f'the row has no "html" and no "text", or both are empty; write {SHAPES}.'
        raise RowFault("no page", keys, rule)
    parts = {_folded(part) for part in (texts[target], *SEPARATORS.split(texts[target]))} - {""}
    folded = [_folded(line) for line in lines]  # a part of the target may span several
    sizes = range(1, MOST_BROKEN + 1)
    runs = (range(first, first + size) for first in range(len(lines)) for size in sizes)
    taken = {n for run in runs if " ".join(folded[run.start : run.stop]) in parts for n in run}
    visible = [line for n, line in enumerate(lines) if line and n not in taken]
    if not visible:
        rule = f"the page has no visible text besides its {target}; leave the row out."
        raise RowFault("empty page", (text or html)[:60], rule)
    title = texts["title"] if target != "title" else ""
    return WriterPage("\n".join(visible), texts[target], title, texts["query"])


def _folded(text: str) -> str:
    """Return the words of a text in lower case, without punctuation."""
    return " ".join(WORD.findall(text.casefold()))


def prompt_of(page: WriterPage, target: Target) -> tuple[str, int]:
    """Return the prompt of a page (query, title unless it is the target, text) and its number of
    characters up to the end of the text, where tokens are cut if the prompt is too long."""
    parts = (("Query", page.query), ("Title", page.title))
    head = "".join(f"{name}: {value}\n" for name, value in parts if value)
    asking = f"{head}Page: {page.text}"
    return f"{asking}\n{target.capitalize()}:\n", len(asking)


@dataclass(frozen=True)
class PageRequest(InstructionRequest):
    """`InstructionRequest` for pages."""

    target: Target = "title"  # what the model writes
    max_prompt: int = 384  # tokens of a prompt at most; a longer page loses its end
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
        prompt, shrinks = prompt_of(page, self.target)
        texts = json.dumps([page.text, page.target, page.query])
        sample = Instruction(str(row.file), row.line, prompt, page.target)
        # The split keeps rows of one page, with different queries, in one part.
        return sample._replace(shrinks=shrinks, group=page.text, extra=texts)


def page_prompts(
    rows: Iterable[JsonRow], tokenizer: TextTokenizer, target: Target, max_prompt: int
) -> Iterator[list[Prompt]]:
    """Yield the prompt tokens of pages, lazily; pages may lack the target. See `PageRequest`."""
    most = max_prompt - (tokenizer.begin_id is not None)

    def read(row: JsonRow) -> list[Prompt]:
        prompt, shrinks = prompt_of(page_of(row, target), target)
        [encoding] = tokenizer.encode_with_offsets([prompt])
        offsets = np.array(encoding.offsets).reshape(-1, 2)
        stays = tokens_within(offsets, len(prompt), shrinks, most)
        ids = np.array(encoding.ids, np.int64)[stays].tolist()
        return [Prompt(with_begin(ids, False, tokenizer), 0, int((~stays).sum()))]

    return (placed(row.place, read, row) for row in rows)


class SnippetDataset(InstructionDataset):
    """One part for evaluation: a sample is one page, for the loss and for generation."""

    def example(self, sample_id: int, epoch: int) -> Any:
        """Return the tokens of one page, and its text, target and query."""
        return self.piece(sample_id), json.loads(self.stream.extra(int(self.samples[sample_id])))

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Return the pages with their targets in one row, the prompts alone, and the texts."""
        pieces, texts = zip(*examples, strict=True)
        # A prompt ends before the first token that is trained on.
        prompts = [p.input_ids[: int(np.argmax(p.labels != IGNORED)) + 1] for p in pieces]
        prompt_ids, prompt_lengths = padded_prompts(prompts)
        names = ("texts", "targets", "queries")
        columns = dict(zip(names, map(list, zip(*texts, strict=True)), strict=True))
        rows = super().collate([[piece] for piece in pieces])
        return {**rows, "prompt_ids": prompt_ids, "prompt_lengths": prompt_lengths, **columns}


class PagesDataModule(InstructionDataModule):
    """Turns pages into prompts for their title or description. Without any file it uses demo data.

    A row of the files has `html` or `text` (which wins), `title` and `description` (or its html
    has them), and may have `query`. The target is removed from the page's text. A page that is too
    long loses its end; one whose target exceeds `max_target_tokens` is left out, and a warning
    counts them.

    Args:
        target: what the model writes, `title` or `description`.
        max_target_tokens: positions of context_length that are kept free for the target.
        instructions: see `InstructionDataModule`; the rows of all files are pages.
    """

    too_long, output_mark = "leave_out", "written"
    request_class, predict_hint = PageRequest, own_files_hint
    demo_file = demo.demo_pages

    def __init__(
        self, target: Target = "title", max_target_tokens: int = 128, **instructions: Any
    ) -> None:
        super().__init__(separator="", **instructions)
        # Page and target share the context.
        check_range("data", 1, self.context_length - 1, max_target_tokens=max_target_tokens)
        self.target = target
        # The most tokens of a prompt: the page with query and title.
        self.max_prompt = self.context_length - max_target_tokens

    def part_dataset(self, part: int) -> InstructionDataset:
        """Return the pages of a part that fit; in evaluation each is a sample of its own."""
        if part == TRAIN:
            return super().part_dataset(part)
        return SnippetDataset(self.store, part, self.context_length, "documents", self.too_long)

    def build_prompts(self) -> PromptDataset:
        """Return the prediction dataset; its rows may lack the target. Bad rows raise a ValueError,
        or get no snippet if they are rejected."""
        bad_rows = BadRows(self.on_bad_rows)
        pages = [own for _, own in self.sound_prompts(self.prompt_tokenizer(), bad_rows)]
        refuse(bad_rows.rows, self.on_bad_rows)
        rank_zero_only(report_rejected)(bad_rows.rows, self.run_folder)
        self.is_sound = [own is not None for own in pages]
        dataset = PromptDataset(filter(None, pages))
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
        written = super().written_columns(results)
        for is_sound in self.is_sound:
            if not is_sound:
                yield dict.fromkeys(WRITTEN)
                continue
            columns = next(written)
            snippet = " ".join(columns["completion"].split())
            values = (snippet, len(snippet), columns["finish_reason"], columns["prompt_tokens_cut"])
            yield dict(zip(WRITTEN, values, strict=True))
