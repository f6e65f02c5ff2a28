"""Pages with a title or a description as planned batches for a model that writes them."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch

from datamodules.core.batches import IGNORED
from datamodules.core.planned import PlannedDataset, Stage
from datamodules.core.store import cache_root, digest_of
from datamodules.files.audit import Audit
from datamodules.files.html import parsed, visible_lines
from datamodules.files.rows import (
    HALF_RULE,
    BadRows,
    JsonRow,
    RowFault,
    half_character,
    sound_rows,
)
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION
from datamodules.files.tables import own_files_hint
from datamodules.text.instructions import (
    Instruction,
    InstructionDataModule,
    InstructionDataset,
    InstructionRequest,
    Marker,
    kept_tokens,
)
from datamodules.text.packing import Piece
from datamodules.text.prompts import (
    ROWS_AT_ONCE,
    Prompt,
    PromptDataset,
    begun,
    completed,
    padded_prompts,
    read_rows,
    write_rows,
)
from datamodules.tokenizers.text import TextTokenizer, TokenizerOptions

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser

Target = Literal["title", "description"]
TARGETS = ("title", "description")
COLUMNS = ("html", "text", *TARGETS, "query")
SHAPES = '{"html": "<html>…", "query": "…"} or {"text": "…", "title": "…", "description": "…"}'
WORD = re.compile(r"\w+")
SEPARATORS = re.compile(r"\s+[|–—·»:/<>~•-]+\s+")  # of the parts of a title
PAGES_VERSION = 2  # of how pages become prompts
WRITTEN_COLUMNS = ("snippet", "num_characters", "finish_reason", "page_tokens_cut")


class WriterPage(NamedTuple):
    """One page as a writer reads it.

    Args:
        file: where it comes from.
        line: of the file, or row.
        text: visible lines without the target.
        target: what is to be written; "" where the row has none.
        title: "" where it is the target, or there is none.
        query: by which the page is to be found; mostly "".
        num_removed: lines that were the target.
    """

    file: str
    line: int
    text: str
    target: str
    title: str = ""
    query: str = ""
    num_removed: int = 0

    @property
    def holds_target(self) -> bool:
        """Whether a passage still has the target's words in their order."""
        return f" {_folded(self.target)} " in f" {_folded(self.text)} "


class PagePrompt(NamedTuple):
    """What a writer is asked, and the characters of it that may lose their end."""

    prompt: str
    shrinks: tuple[int, int]


def read_pages(path: Path, target: Target, bad_rows: BadRows) -> Iterator[WriterPage]:
    """Yield the sound pages of one file that have a target; the others go to `bad_rows`.

    Raises:
        ValueError: the file cannot be read as rows.
    """

    def taught(row: JsonRow) -> WriterPage:
        page = _page(row, target)
        if not page.target:
            rule = (
                f'the page has no {target}, neither as "{target}" nor in its html: nothing could '
                "be learnt; fill it in."
            )
            raise RowFault("no target", page.text[:60], rule)
        return page

    return sound_rows(path, taught, bad_rows)


def page_of(row: JsonRow, target: Target) -> WriterPage:
    """Return the page of a row that may lack its target.

    Raises:
        ValueError: the row breaks a rule; file and line are named.
    """
    try:
        return _page(row, target)
    except RowFault as fault:
        raise ValueError(f"{row.place}: {fault.args[2]}") from fault


def framed(page: WriterPage, target: Target) -> PagePrompt:
    """Return the prompt of a page: the query, the title where it is not the target, the text."""
    given = (("Query", page.query), ("Title", page.title))
    head = "".join(f"{name}: {value}\n" for name, value in given if value) + "Page: "
    end = len(head) + len(page.text)
    return PagePrompt(f"{head}{page.text}\n{target.capitalize()}:\n", (len(head), end))


def without_target(lines: list[str], target: str) -> list[str]:
    """Return the lines that are not the target, nor a part of it."""
    taken = {_folded(part) for part in (target, *SEPARATORS.split(target))} - {""}
    return [line for line in lines if _folded(line) not in taken]


def _page(row: JsonRow, target: Target) -> WriterPage:
    values = _texts(row)
    if not values["html"] and not values["text"]:
        keys = ", ".join(row.values) or "nothing"
        raise RowFault("no page", keys, f'the row has no "html" and no "text"; write {SHAPES}.')
    given = {name: _line(values[name]) for name in (*TARGETS, "query")}
    if values["text"]:  # somebody has taken it out of the HTML already
        lines = [_line(line) for line in values["text"].splitlines()]
    else:
        tree = parsed(values["html"])
        lines = visible_lines(tree)
        given |= {name: given[name] or _line(_own(tree, name)) for name in TARGETS}
    wanted = given[target]
    kept = [line for line in without_target(lines, wanted) if line]
    if not kept:
        rule = f"the page has no visible text besides its {target}; leave the row out."
        raise RowFault("empty page", (values["text"] or values["html"])[:60], rule)
    num_removed = sum(map(bool, lines)) - len(kept)
    title = given["title"] if target != "title" else ""
    place = (str(row.file), row.line)
    return WriterPage(*place, "\n".join(kept), wanted, title, given["query"], num_removed)


def _texts(row: JsonRow) -> dict[str, str]:
    values = {name: row.values.get(name) for name in COLUMNS}
    for name, value in values.items():
        if value is not None and not isinstance(value, str):
            raise RowFault("type", str(value), f'"{name}" must be a text, got {value!r}.')
    if (half := half_character(json.dumps(values, ensure_ascii=False))) is not None:
        raise RowFault("half character", half, f'"{half}" {HALF_RULE}')
    return {name: (value or "").strip() for name, value in values.items()}


def _own(tree: "LexborHTMLParser", name: str) -> str:
    """Return the title or the description that the page itself has in its head."""
    if name == "title":
        node = tree.css_first("head title")
        return node.text() if node else ""
    metas: Any = tree.css("meta[name]")
    found = (m.attributes for m in metas if (m.attributes["name"] or "").lower() == name)
    return next((a.get("content") or "" for a in found), "")


def _line(text: str) -> str:
    return " ".join(text.split())


def _folded(text: str) -> str:
    """Return the words alone, without case."""
    return " ".join(WORD.findall(text.casefold()))


@dataclass(frozen=True)
class PageRequest(InstructionRequest):
    """All that a store of pages depends on.

    Args:
        target: what is written.
        max_prompt: tokens of a prompt, from which on the page loses its end.
    """

    target: Target = "title"
    max_prompt: int = 384

    def folder(self) -> Path:
        """Return the store's place in the cache."""
        facts = [PAGES_VERSION, super().folder().name, self.target, self.max_prompt]
        return cache_root() / "pages" / digest_of(facts)

    def marker(self, tokenizer: TextTokenizer) -> Marker:
        """Return what turns rows into tokens."""
        return Marker(tokenizer, self.separator, self.max_prompt)

    def read(self, path: Path, bad_rows: BadRows) -> Iterator[Instruction]:
        """Yield the sound pages of one file; the others go to `bad_rows`."""
        for page in read_pages(path, self.target, bad_rows):
            asked = framed(page, self.target)
            texts = json.dumps([page.text, page.target, page.query])
            # One page that is asked for by several queries is on one side of the split.
            row = Instruction(page.file, page.line, asked.prompt, page.target)
            yield row._replace(shrinks=asked.shrinks, group=page.text, extra=texts)


def page_prompts(
    rows: Iterable[JsonRow], tokenizer: TextTokenizer, target: Target, max_prompt: int
) -> Iterator[Prompt]:
    """Yield the tokens of pages to write for; they may lack the target.

    Args:
        rows: of the pages.
        tokenizer: of the model.
        target: what is written.
        max_prompt: see `PageRequest`.

    Raises:
        ValueError: a row is no page.
    """
    rows, most = iter(rows), max_prompt - (tokenizer.begin_id is not None)
    while some := list(islice(rows, ROWS_AT_ONCE)):
        asked = [framed(page_of(row, target), target) for row in some]
        encodings = tokenizer.encode_with_offsets([one.prompt for one in asked])
        for one, encoding in zip(asked, encodings, strict=True):
            offsets = np.array(encoding.offsets).reshape(-1, 2)
            kept = kept_tokens(offsets, len(one.prompt), one.shrinks, most)
            ids = np.array(encoding.ids, np.int64)[kept].tolist()
            yield Prompt(begun(ids, False, tokenizer), 0, int((~kept).sum()))


class PagePromptDataset(PromptDataset):
    """Pages to write for: one sample per row, with its query.

    Args:
        rows: of the pages.
        prompts: see `page_prompts`.

    Raises:
        ValueError: there is no row, or one is no page; file and line are named.
    """

    def __init__(self, rows: Iterable[JsonRow], *prompts: Any) -> None:
        rows = list(rows)
        super().__init__([prompt] for prompt in page_prompts(rows, *prompts))
        self.queries = [_line(str(row.values.get("query") or "")) for row in rows]

    def example(self, sample_id: int, epoch: int) -> Any:
        """Return the texts of one row, and its query."""
        return super().example(sample_id, epoch), self.queries[sample_id]

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Return input_ids [B, S], padded at the right, lengths [B], and the queries [B]."""
        prompts, queries = zip(*examples, strict=True)
        return {**super().collate(list(prompts)), "queries": list(queries)}


class SnippetExample(NamedTuple):
    """The tokens of a page with its target; the texts of the page and the target, and the query."""

    piece: Piece
    texts: list[str]


class SnippetDataset(InstructionDataset):
    """One part for evaluation: a sample is one page, to be rated and to be written for; see
    `InstructionDataset`."""

    def example(self, sample_id: int, epoch: int) -> Any:
        """Return the tokens and the texts of one page."""
        texts = self.part.extra(int(self.fitted.samples[sample_id]))
        return SnippetExample(self.piece(sample_id), json.loads(texts))

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Return the pages with their targets as one row, their prompts, and their texts."""
        prompts = [torch.from_numpy(prompt_of(example.piece)) for example in examples]
        prompt_ids, prompt_lengths = padded_prompts(prompts)
        rows = super().collate([[example.piece] for example in examples])
        columns = zip(*(example.texts for example in examples), strict=True)
        texts = dict(zip(("texts", "targets", "queries"), map(list, columns), strict=True))
        return {**rows, "prompt_ids": prompt_ids, "prompt_lengths": prompt_lengths, **texts}


def prompt_of(piece: Piece) -> np.ndarray:
    """Return the tokens before the first one that is trained on, [n] int64."""
    return piece.input_ids[: int(np.argmax(piece.labels != IGNORED)) + 1]


def write_snippets(
    rows: Iterable[JsonRow],
    results: dict[str, np.ndarray],
    path: Path,
    tokenizer: TextTokenizer,
    num_cut: np.ndarray,
) -> None:
    """Write each row with what was written for it, its characters and the reason of its end.

    Args:
        rows: all rows that were predicted, in their order.
        results: see `datamodules.text.prompts.write_completions`.
        path: .jsonl.
        tokenizer: of the model.
        num_cut: [N] tokens at the end of a page that the model did not see.

    Raises:
        FileExistsError: the file exists.
        RuntimeError: there are more or fewer rows than results.
    """

    def added(number: int, row: JsonRow) -> tuple[Any, ...]:
        text, reason = completed(results, number, tokenizer)
        snippet = " ".join(text.split())
        return snippet, len(snippet), reason, int(num_cut[number])

    write_rows(rows, added, WRITTEN_COLUMNS, len(results["num_tokens"]), path)


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

    Raises:
        ValueError: options are in conflict.
    """

    def __init__(
        self, target: Target = "title", max_target_tokens: int = 128, **instructions: Any
    ) -> None:
        super().__init__(too_long="leave_out", separator="", **instructions)
        self.target, self.max_target_tokens = target, max_target_tokens
        if not 0 < max_target_tokens < self.context_length:
            raise ValueError(
                f"max_target_tokens must be 1 to {self.context_length - 1}, got "
                f"{max_target_tokens}: it is a part of context_length {self.context_length}."
            )

    @property
    def max_prompt(self) -> int:
        """Tokens that a page may have with what is asked of it."""
        return self.context_length - self.max_target_tokens

    def build(self, stage: Stage) -> PlannedDataset:
        """Return the dataset of one stage; evaluation has one page per sample.

        Raises:
            ValueError: see `InstructionDataModule.build`.
        """
        if stage in ("train", "predict"):
            return super().build(stage)
        assert self.store is not None
        part = PART_NAMES.index(stage)
        return SnippetDataset(self.store, part, self.context_length, "documents", "leave_out")

    def build_prompts(self) -> PromptDataset:
        """Return the dataset of prediction; rows may lack the target."""
        rows, tokenizer = read_rows(self._predict_paths()), self.prompt_tokenizer()
        dataset = PagePromptDataset(rows, tokenizer, self.target, self.max_prompt)
        room = f"the {self.max_prompt} tokens that data.context_length leaves"
        self.warn_of_cuts(dataset, f"{room}: the page's end is cut")
        return dataset

    def audit(self) -> Audit:
        """Return what is in the files, what is wrong with them, and where the target shows."""
        audit = super().audit()
        count = num_removed = num_holding = 0
        paths = [path for paths in self.store_request().files.values() for path in paths]
        for path in paths:
            for page in read_pages(path, self.target, BadRows("collect")):
                count += 1
                num_removed += page.num_removed > 0
                num_holding += page.holds_target
        if num_removed:
            audit.warnings.append(
                f"{num_removed:,} of {count:,} pages have their {self.target} as a line of "
                "its own, such as the h1; it is taken out."
            )
        if num_holding:
            audit.warnings.append(
                f"{num_holding:,} of {count:,} pages hold the words of their {self.target} "
                "within a longer passage; it stays, and copying it is part of what is learnt."
            )
        return audit

    def request_of(self, files: dict[int, list[Path]], tokenizer: TokenizerOptions) -> PageRequest:
        options = (None, "", self.target, self.max_prompt)
        return PageRequest(files, tokenizer, self.split, *options)

    def predict_hint(self, command: str) -> str:
        """Return the command for the pages of this run."""
        return own_files_hint(command, self.store_request().files)

    def demo_files(self) -> dict[int, list[Path]]:
        from datamodules import demo

        return {TRAIN: [demo.demo_pages(cache_root())], VALIDATION: [], TEST: []}

    @property
    def predict_output_path(self) -> Path:
        """Where the rows go with what was written for them."""
        if self.predict_output is not None:
            return Path(self.predict_output).expanduser()
        name = f"{self._predict_paths()[0].stem}.written.jsonl"
        return Path(self.trainer.default_root_dir) / name

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        """Write each row with what was written for it; `results` as `complete` returns them."""
        dataset = self.datasets["predict"]
        assert isinstance(dataset, PromptDataset)
        rows, tokenizer = read_rows(self._predict_paths()), self.prompt_tokenizer()
        write_snippets(rows, results, path, tokenizer, dataset.num_cut)
