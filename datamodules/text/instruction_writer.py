"""Makes stores of instructions: reads rows, divides them, tokenises them once into the cache."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from datamodules.core.store import cache_root, digest_of, file_digest, made_once
from datamodules.files.bad_rows import BadRow, BadRows
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION, keyed_hashes
from datamodules.text.chat import MarkedText, Marker, TrainedTokens, TrainOn
from datamodules.text.instruction_rows import Instruction, read_instructions
from datamodules.text.instruction_store import PER_SAMPLE, InstructionStore
from datamodules.text.splitting import Fragments, TextSplit, cuts_of
from datamodules.text.token_store import token_dtype
from datamodules.tokenizers.text_tokenizer import TextTokenizer, TokenizerOptions, make_tokenizer

STORE_VERSION = 2
ROWS_PER_BATCH = 1024


@dataclass(frozen=True)
class InstructionRequest:
    """All that a store depends on.

    Args:
        files: per part (train, validation, test) the files.
        tokenizer: which tokenizer.
        split: how training samples are divided where validation has no files.
        train_on: see `Marker`.
        separator: see `Marker`.
        given: a tokenizer that is there already, such as a checkpoint's; wins over `tokenizer`.
    """

    files: dict[int, list[Path]]
    tokenizer: TokenizerOptions
    split: TextSplit
    train_on: TrainOn
    separator: str
    given: TextTokenizer | None = None

    def folder(self) -> Path:
        """Return the store's place in the cache, a digest of all that it depends on."""
        root = cache_root()
        facts = {
            "version": STORE_VERSION,
            "files": {
                PART_NAMES[part]: [[str(p), file_digest(p, root)] for p in paths]
                for part, paths in self.files.items()
            },
            "tokenizer": self.given.digest if self.given else self.tokenizer.facts(),
            "split": asdict(self.split),
            "train_on": self.train_on,
            "separator": self.separator,
        }
        return root / "instructions" / digest_of(facts)

    def marker(self, tokenizer: TextTokenizer) -> Marker:
        """Return what turns rows into tokens."""
        return Marker(tokenizer, self.train_on, self.separator)

    def rows(self, bad_rows: BadRows) -> Iterator[tuple[int, int, Instruction]]:
        """Yield the part, the number of the file and the row of all sound rows."""
        number = 0
        for part, paths in self.files.items():
            for path in paths:
                for row in read_instructions(path, bad_rows):
                    yield part, number, row
                number += 1

    def divided(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the part [N] int8 and the key [N] uint64 of each row, equal texts together."""
        files: list[int] = []

        def keys() -> Iterator[str]:
            for part, _, row in self.rows(BadRows("collect")):
                files.append(part)
                yield row.key

        hashes = keyed_hashes(keys(), 0)
        parts, whole = np.array(files, np.int8), np.ones(len(files), bool)
        split = None if self.files.get(VALIDATION) else self.split
        if split is not None and self.files.get(TEST):
            split = replace(split, test_share=0.0)
        ones = np.ones(len(files), np.int64)  # a sample is not cut: all of it, or nothing
        cuts = cuts_of(Fragments(parts, ones, hashes, whole, whole), split)
        return np.where(cuts[:, 0], TRAIN, np.where(cuts[:, 1], VALIDATION, TEST)), hashes


def open_instruction_store(request: InstructionRequest) -> InstructionStore:
    """Return the store of a request, made at first use; bad rows are left out and listed in it.

    Raises:
        ValueError: no row is sound, or there are chats and no chat template.
    """
    folder = made_once(request.folder(), lambda folder: _Writer(request, folder).write())
    return InstructionStore(folder)


class _Writer:
    def __init__(self, request: InstructionRequest, folder: Path) -> None:
        self.request, self.folder = request, folder
        self.bad_rows = BadRows("reject")
        self.parts, self.keys = request.divided()
        self.tokenizer = request.given or make_tokenizer(request.tokenizer, self._training_texts())
        self.marker = request.marker(self.tokenizer)
        self.dtype = np.dtype(token_dtype(self.tokenizer.vocab_size))
        self.content = hashlib.sha256()
        self.counts = {"begins_inside_token": 0, "holds_special_token": 0}

    def write(self) -> None:
        """Fill the folder."""
        columns: list[dict[str, list[int]]] = [{n: [] for n in PER_SAMPLE} for _ in PART_NAMES]
        with ExitStack() as stack:
            files = [
                [
                    stack.enter_context((self.folder / f"{name}.{kind}.bin").open("wb"))
                    for kind in ("tokens", "is_trained")
                ]
                for name in PART_NAMES
            ]
            for index, number, row, tokens in self._tokenised():
                part = int(self.parts[index])
                tokens.ids.astype(self.dtype).tofile(files[part][0])
                tokens.is_trained.tofile(files[part][1])
                sample = columns[part]
                sample["starts"].append(sum(sample["sizes"][-1:] + sample["starts"][-1:]))
                sample["sizes"].append(len(tokens.ids))
                sample["keys"].append(int(self.keys[index]))
                sample["files"].append(number)
                sample["lines"].append(row.line)
                for values in (tokens.ids, tokens.is_trained, np.array([part])):
                    self.content.update(values.tobytes())
        for name, sample in zip(PART_NAMES, columns, strict=True):
            for kind, dtype in PER_SAMPLE.items():
                np.save(self.folder / f"{name}.{kind}.npy", np.array(sample[kind], dtype))
        self._close(sum(len(sample["sizes"]) for sample in columns))

    def _close(self, num_samples: int) -> None:
        if not num_samples:
            raise ValueError(
                self.bad_rows.message()
                if self.bad_rows.count
                else "the files hold no rows; write prompts and completions, or chats, into them."
            )
        self.bad_rows.settle(self.folder)
        text = json.dumps(self.tokenizer.to_dict())
        (self.folder / "tokenizer.json").write_text(text, "utf-8")
        facts = {
            "fingerprint": self.content.hexdigest()[:32],
            "dtype": self.dtype.name,
            "files": [str(path) for paths in self.request.files.values() for path in paths],
            **self.counts,
        }
        (self.folder / "facts.json").write_text(json.dumps(facts), "utf-8")

    def _tokenised(self) -> Iterator[tuple[int, int, Instruction, TrainedTokens]]:
        marked = self._marked(self.marker, self.bad_rows)
        while batch := list(islice(marked, ROWS_PER_BATCH)):
            tokens = self._tokens([(row, text) for _, _, row, text in batch])
            for (index, number, row, _), found in zip(batch, tokens, strict=True):
                self.counts["begins_inside_token"] += found.begins_inside_token
                self.counts["holds_special_token"] += self.marker.holds_special_token(row)
                yield index, number, row, found

    def _tokens(self, texts: list[tuple[Instruction, MarkedText]]) -> list[TrainedTokens]:
        """Return the tokens of each text; an error names the row."""
        try:
            return self.marker.tokens([text for _, text in texts])
        except ValueError:
            for row, text in texts:
                try:
                    self.marker.tokens([text])
                except ValueError as error:
                    raise ValueError(f"{row.file}:{row.line}: {error}") from error
            raise

    def _marked(
        self, marker: Marker, bad_rows: BadRows
    ) -> Iterator[tuple[int, int, Instruction, MarkedText]]:
        """Yield each sound row with its text; what the template refuses goes to `bad_rows`."""
        for index, (_, number, row) in enumerate(self.request.rows(bad_rows)):
            marker.check_template(row)
            try:
                text = marker.marked(row)
            except ValueError as error:
                bad_rows.add(BadRow(row.file, row.line, "", str(error), "template"))
            else:
                yield index, number, row, text

    def _training_texts(self) -> Iterator[str]:
        """What a vocabulary is taken from; templates read special tokens and no vocabulary."""
        template = TokenizerOptions(chat_template=self.request.tokenizer.chat_template)
        marker = Marker(make_tokenizer(template, iter(())), "all", self.request.separator)
        # Collected alone, as `divided` does: the reading that fills the store names them all.
        for index, _, _, marked in self._marked(marker, BadRows("collect")):
            if self.parts[index] == TRAIN:
                text = marked.text
                for token in marker.special:
                    text = text.replace(token, "")
                yield text
