"""Pages as instructions: their store, and the texts by which what is written is judged."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datamodules.core.store import cache_root, digest_of, made_once
from datamodules.files.bad_rows import BadRows
from datamodules.files.splitting import PART_NAMES
from datamodules.text.chat import Marker
from datamodules.text.instruction_rows import Instruction
from datamodules.text.instruction_store import InstructionStore
from datamodules.text.instruction_writer import InstructionRequest
from datamodules.text.page_rows import Target, WriterPage, framed, page_of, read_pages
from datamodules.text.prompt_output import json_line
from datamodules.text.prompt_rows import (
    ROWS_AT_ONCE,
    Prompt,
    PromptRequest,
    begun,
    kept_tokens,
)
from datamodules.tokenizers.text_tokenizer import TextTokenizer

PAGES_VERSION = 1  # of how pages become prompts
LINES, PLACES = "texts.jsonl", "starts.npy"


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
        return Marker(tokenizer, self.train_on, self.separator, self.max_prompt)

    def rows(self, bad_rows: BadRows) -> Iterator[tuple[int, int, Instruction]]:
        """Yield the part, the number of the file and the row of all sound pages."""
        for part, number, page in self.pages(bad_rows):
            asked = framed(page, self.target)
            row = Instruction(page.file, page.line, asked.prompt, page.target)
            # One page that is asked for by several queries is on one side of the split.
            yield part, number, row._replace(shrinks=asked.shrinks, group=page.text)

    def pages(self, bad_rows: BadRows) -> Iterator[tuple[int, int, WriterPage]]:
        """Yield the part, the number of the file and the page of all sound rows."""
        number = 0
        for part, paths in self.files.items():
            for path in paths:
                for page in read_pages(path, self.target, bad_rows):
                    yield part, number, page
                number += 1


@dataclass(frozen=True)
class PagePrompts(PromptRequest):
    """Pages to write for; they may lack the target.

    Args:
        target: what is written.
        max_prompt: see `PageRequest`.
    """

    target: Target = "title"
    max_prompt: int = 384

    def prompts(self) -> Iterator[list[Prompt]]:
        """Yield the tokens of each page.

        Raises:
            ValueError: a row is no page.
        """
        rows = self.rows()
        while some := [row for _, row in zip(range(ROWS_AT_ONCE), rows, strict=False)]:
            for row in some:
                json_line(row, row.values)  # what cannot be written is said now
            asked = [framed(page_of(row, self.target), self.target) for row in some]
            encodings = self.tokenizer.encode_with_offsets([one.prompt for one in asked])
            most = self.max_prompt - (self.tokenizer.begin_id is not None)
            for one, encoding in zip(asked, encodings, strict=True):
                offsets = np.array(encoding.offsets).reshape(-1, 2)
                kept = kept_tokens(offsets, len(one.prompt), one.shrinks, most)
                ids = np.array(encoding.ids, np.int64)[kept].tolist()
                yield [Prompt(begun(ids, False, self.tokenizer), 0, int((~kept).sum()))]

    def queries(self) -> Iterator[str]:
        """Yield the query of each page, "" where it has none."""
        for row in self.rows():
            yield " ".join(str(row.values.get("query") or "").split())


class PageText(NamedTuple):
    """What is written about, what people wrote, and for which query."""

    text: str
    target: str
    query: str


class PageTexts:
    """The texts of one part on disk, in the order of its store.

    Args:
        folder: as `open_page_texts` made it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LINES
        self.starts = np.load(folder / PLACES)

    def __getitem__(self, number: int) -> PageText:
        with self.path.open("rb") as file:
            file.seek(self.starts[number])
            return PageText(*json.loads(file.readline()))


def open_page_texts(request: PageRequest, store: InstructionStore, part: int) -> PageTexts:
    """Return the whole texts of a part's pages, copied from the user's files at first use.

    Args:
        request: of the store.
        store: that was made of it.
        part: 0 train, 1 validation, 2 test.
    """
    folder = store.folder.with_name(f"{store.folder.name}-{PART_NAMES[part]}")
    return PageTexts(made_once(folder, partial(_copy_texts, request, store, part)))


def _copy_texts(request: PageRequest, store: InstructionStore, part: int, folder: Path) -> None:
    samples = store.part(part)
    wanted = set(zip(samples.files.tolist(), samples.lines.tolist(), strict=True))
    starts = []
    with (folder / LINES).open("wb") as file:
        for _, number, page in request.pages(BadRows("collect")):
            if (number, page.line) in wanted:
                starts.append(file.tell())
                line = json.dumps([page.text, page.target, page.query], ensure_ascii=False)
                file.write(line.encode("utf-8") + b"\n")
    if len(starts) != len(samples.sizes):
        raise RuntimeError(
            f"{store.folder} knows {len(samples.sizes)} pages for {PART_NAMES[part]}, the files "
            f"hold {len(starts)} of them: a file changed meanwhile; start again."
        )
    np.save(folder / PLACES, np.array(starts, np.int64))
