"""Token stores in memory-mapped files, made once, and the datamodule base that reads them.

Each part of a store is one stream of tokens. Document d owns the positions starts[d] … starts[d] +
num_positions[d] - 1; each position predicts the token after it. A part has D documents.
"""

import json
import logging
import time
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import numpy as np

from datamodules.core.plan import check_range
from datamodules.core.planned import PlannedDataModule
from datamodules.core.store import (
    ArrayFile,
    ArrayFolder,
    array_digest,
    cache_folder,
    file_digest,
    made_once,
    mapped_array,
    text_hash,
)
from datamodules.files.documents import SUFFIXES, Document, read_documents, text_files
from datamodules.files.rows import BadRows, OnBadRows, accepted, check_characters, kind_of, placed
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION, TextSplit
from datamodules.files.tables import Files
from datamodules.tokenizers.text import (
    TextTokenizer,
    TokenizerOptions,
    make_tokenizer,
    options_of_model,
)

log = logging.getLogger("lightning.pytorch.datamodules")  # Lightning shows its loggers' infos
STORE_VERSION = 4
STRETCH_CHARACTERS = 1 << 18  # the most of one text that is tokenised at once
BATCH_CHARACTERS = 1 << 20  # per call of the tokenizer, which spreads them over its threads
COLUMNS = ("columns", "text_column")  # options that demo data ignore
SAID_BYTES = 8 << 20  # tokenising more bytes takes so long that a message announces it
# Arrays of a part and their dtypes; that of `tokens` depends on the vocabulary size.
STREAM_ARRAYS: dict[str, Any] = {
    **{"tokens": None, "starts": np.int64, "num_positions": np.int64, "hashes": np.uint64},
    **{"is_trained": bool, "files": np.int32, "lines": np.int64, "questions": np.uint64},
    **{"texts": np.uint8, "text_ends": np.int64},
}
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class TokenStream:
    """The tokens of one part; an opened store is pickled by `place`, its folder and part."""

    tokens: np.ndarray  # [n] uint16 or uint32
    starts: np.ndarray  # [D] int64, first position of each document
    num_positions: np.ndarray  # [D] int64, positions of each document, its tokens - 1
    hashes: np.ndarray  # [D] uint64, equal for documents whose text in this part is equal
    # [n] bool; this and the following arrays exist for instructions only, each a document.
    is_trained: Any = None
    files: Any = None  # [D] int32, index into the store's `files`
    lines: Any = None  # [D] int64
    questions: Any = None  # [D] uint64, equal for documents that ask the same
    texts: Any = None  # [m] uint8, extra texts of all samples in UTF-8
    text_ends: Any = None  # [D] int64, where each sample's extra text ends
    place: tuple[Path, int] | None = None

    @classmethod
    def opened(cls, folder: Path, part: int) -> Self:
        """Return a part of a store with memory-mapped arrays."""
        paths = {name: folder / f"{PART_NAMES[part]}.{name}.npy" for name in STREAM_ARRAYS}
        arrays = {name: mapped_array(path) for name, path in paths.items() if path.exists()}
        return cls(**arrays, place=(folder, part))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self.place is None else (self.opened, self.place)

    def extra(self, sample: int) -> str:
        """Return the extra text of a sample."""
        start = self.text_ends[sample - 1] if sample else 0
        return self.texts[start : self.text_ends[sample]].tobytes().decode()


class TokenStore(ArrayFolder):
    """Folder of complete token streams, opened read-only."""

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that made the tokens."""
        text = (self.folder / "tokenizer.json").read_text("utf-8")
        return TextTokenizer.from_dict(json.loads(text))

    def stream(self, part: int) -> TokenStream:
        """Return the stream of one part: 0 train, 1 validation, 2 test."""
        return TokenStream.opened(self.folder, part)


@dataclass(frozen=True)
class CorpusRequest:
    """All inputs that determine a token store."""

    files: Mapping[int, Sequence[Path]]  # files of each part: train, validation, test
    tokenizer: TokenizerOptions  # which tokenizer to make if `given` is `None`
    split: TextSplit  # how training texts are divided
    given: TextTokenizer | None = None  # an existing tokenizer, such as a checkpoint's

    kind: ClassVar[str]  # the cache folder of this kind of store

    def folder(self) -> Path:
        """Return the store's cache folder, named by a digest of `facts`."""
        return cache_folder(self.kind, self.facts())

    @classmethod
    def options(cls) -> list[str]:
        """Return the names of the fields that a subclass adds."""
        return [one.name for one in fields(cls)[len(fields(CorpusRequest)) :]]

    def facts(self) -> dict[str, Any]:
        """Return plain JSON values that determine the store."""
        split, plain = self.split.beside(self.files), asdict(replace(self, files={}, given=None))
        return {
            **{name: plain[name] for name in self.options()},
            "version": STORE_VERSION,
            "files": {
                PART_NAMES[part]: [[kind_of(p), file_digest(p)] for p in paths]
                for part, paths in self.files.items()
            },
            "tokenizer": self.given.digest if self.given else self.tokenizer.facts(),
            "split": None if split is None else asdict(split),
        }

    def divided(self, parts: Sequence[int], hashes: np.ndarray) -> np.ndarray:
        """Return the part [N] int8 of each text after the split by its hash [N]; `parts` are the
        parts of the files."""
        split, of_files = self.split.beside(self.files), np.array(parts, np.int8)
        return of_files if split is None or split.by == "tail" else split.drawn(of_files, hashes)

    @abstractmethod
    def write(self, folder: Path, bad_rows: BadRows) -> tuple[TextTokenizer, dict[str, Any]]:
        """Fill the folder; return the tokenizer and the store's facts with its `fingerprint`.

        Raises:
            ValueError: there is no text, or a file or a text cannot be read.
        """

    def open(self, on_bad_rows: OnBadRows = "error") -> TokenStore:
        """Return the store, made at first use; see `accepted`.

        Raises:
            ValueError: see `write`.
            RuntimeError: a file changed while it was read.
        """
        folder = self.folder()

        def make(temporary: Path) -> None:
            tokenizer, facts = self.write(temporary, BadRows(on_bad_rows))
            (temporary / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()), "utf-8")
            (temporary / "facts.json").write_text(json.dumps(facts), "utf-8")
            if self.folder() != folder:
                raise RuntimeError("a file of the data changed while it was read; start again.")

        return TokenStore(accepted(made_once(folder, make), on_bad_rows))


@contextmanager
def part_files(
    folder: Path, vocab_size: int, names: Iterable[str] = STREAM_ARRAYS
) -> Iterator[list[dict[str, ArrayFile]]]:
    """Yield the array files to append to, by name for each part; see `TokenStream.opened`."""
    dtypes = STREAM_ARRAYS | {"tokens": token_dtype(vocab_size)}
    with ExitStack() as stack:
        yield [
            {
                name: stack.enter_context(ArrayFile(folder / f"{part}.{name}.npy", dtypes[name]))
                for name in names
            }
            for part in PART_NAMES
        ]


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the smallest dtype that holds these tokens."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


class _Stretch(NamedTuple):
    """A piece of text tokenised at once; `by: tail` divides one document among parts."""

    part: int
    place: str
    text: str
    continues: bool  # whether the document began before this stretch
    is_first: bool  # first stretch of the document in its part
    is_last: bool  # last stretch of the document in its part
    ends: bool  # whether the document ends here
    key: int  # hash of the document's text in this part


@dataclass(frozen=True)
class TokenRequest(CorpusRequest):
    """`CorpusRequest` for documents; `text_column` holds those of jsonl and parquet files."""

    text_column: str = "text"
    kind = "tokens"

    def _documents(self) -> Iterator[tuple[int, Document]]:
        """Yield the part of the file and the document, empty ones included."""
        for part, paths in self.files.items():
            for path in paths:
                yield from ((part, one) for one in read_documents(path, self.text_column))

    def write(self, folder: Path, bad_rows: BadRows) -> tuple[TextTokenizer, dict[str, Any]]:
        """Fill the folder, in up to three passes over the files: to split them, to make the
        vocabulary if it comes from the text, and to tokenise them."""
        started = time.monotonic()
        num_bytes = sum(path.stat().st_size for paths in self.files.values() for path in paths)
        if num_bytes > SAID_BYTES:
            log.info(f"Tokenising {num_bytes / 1e6:,.0f} MB of text, once.")
        of_files, keys, empty = array("b"), array("Q"), []
        for part, document in self._documents():
            if not document.text.strip():
                empty.append(document.place)
                continue
            placed(document.place, check_characters, document.text)
            of_files.append(part)
            keys.append(text_hash(document.text))
        if not of_files:
            held = f", but {len(empty)} documents without any ({empty[0]})" if empty else ""
            raise ValueError(f"the files hold no text{held}; give them at least one.")
        parts = self.divided(of_files, np.frombuffer(keys, np.uint64))
        tokenizer = self.given or make_tokenizer(
            self.tokenizer, (s.text for s in self._stretches(parts) if s.part == TRAIN)
        )
        _write_tokens(self._stretches(parts), tokenizer, folder)
        streams = [TokenStream.opened(folder, part) for part in range(len(PART_NAMES))]
        arrays = [values for s in streams for values in (s.tokens, s.starts, s.num_positions)]
        num_tokens = sum(len(stream.tokens) for stream in streams)
        num_files = sum(map(len, self.files.values()))
        line = f"Tokenised {len(parts):,} documents of {num_files:,} files, {num_tokens:,} tokens, "
        line += f"in {time.monotonic() - started:.1f} s"
        if empty:
            line += f"; {len(empty):,} documents without a text are left out, the first at "
            line += empty[0]
        log.info(line + ".")
        return tokenizer, {"fingerprint": array_digest(*arrays)[:32]}

    def _stretches(self, parts: np.ndarray) -> Iterator[_Stretch]:
        """Yield each part's text of the documents, in stretches cut at line ends if possible;
        `parts` [N] are the parts of the non-empty documents."""
        split = self.split.beside(self.files)
        with_text = (pair for pair in self._documents() if pair[1].text.strip())
        for drawn, (of_file, (place, text)) in zip(parts.tolist(), with_text, strict=False):
            ranges = [(drawn, 0, len(text))]
            if split is not None and split.by == "tail" and of_file == TRAIN:
                ranges = split.tails(len(text))
            for part, first, stop in ranges:
                start, key = first, text_hash(text[first:stop])
                while start < stop:
                    end = min(start + STRETCH_CHARACTERS, stop)
                    if end < stop:
                        end = text.rfind("\n", start + STRETCH_CHARACTERS // 2, end) + 1 or end
                    flags = (start > 0, start == first, end == stop, end == len(text))
                    yield _Stretch(part, place, text[start:end], *flags, key)
                    start = end


def _write_tokens(stretches: Iterator[_Stretch], tokenizer: TextTokenizer, folder: Path) -> None:
    """Write the stream of each part."""
    begin_id, end_id = tokenizer.begin_id, tokenizer.end_id
    starts, has_ended = [0] * len(PART_NAMES), [False] * len(PART_NAMES)

    def add(batch: list[_Stretch]) -> None:
        texts, places = [stretch.text for stretch in batch], [stretch.place for stretch in batch]
        encoded = tokenizer.encode_batch(texts, places, batch[0].continues)
        for stretch, tokens in zip(batch, encoded, strict=True):
            part, arrays = stretch.part, files[stretch.part]
            stream = arrays["tokens"]
            if stretch.is_first:
                begins = begin_id is not None and not stretch.continues
                # If one token is both begin and end of text, it stands once between documents, as
                # in GPT-2's data.
                is_shared = begins and begin_id == end_id and has_ended[part]
                starts[part] = stream.length - is_shared
                if begins and not is_shared:
                    stream.add(np.array([begin_id]))
                arrays["starts"].add(np.array([starts[part]]))
                arrays["hashes"].add(np.array([stretch.key], np.uint64))
            stream.add(tokens)
            if stretch.ends:
                stream.add(np.array([end_id]))
            if stretch.is_last:
                arrays["num_positions"].add(np.array([max(stream.length - 1 - starts[part], 0)]))
            has_ended[part] = stretch.ends

    names = ("tokens", "starts", "num_positions", "hashes")
    with part_files(folder, tokenizer.vocab_size, names) as files:
        batch, size = list[_Stretch](), 0
        for stretch in stretches:
            if batch and (size >= BATCH_CHARACTERS or batch[-1].continues != stretch.continues):
                add(batch)
                batch, size = [], 0
            batch.append(stretch)
            size += len(stretch.text)
        add(batch)


class CorpusDataModule(PlannedDataModule):
    """Splits and tokenises text files; base of the datamodules of language models and the lens.

    Args:
        train_files: a path, a pattern, a folder, or a list of them; `None` uses demo data.
        validation_files: `None` divides the training files, see `split`.
        test_files: as validation_files; `None` beside validation files means no test.
        tokenizer: how text becomes tokens; `None` takes the pretrained model's, else bytes. In
            evaluation a checkpoint's own tokenizer is used.
        context_length: maximum number of positions per row.
        split: how training files are divided into parts.
        planned: batch sizes, plan and loader, see `PlannedDataModule`.

    Raises:
        ValueError: context_length is below 1, or the split would cut documents that must stay
            whole.
    """

    store: Any = None  # a `TokenStore` after `setup`; language models predict without one
    noun = "documents"
    cuts_documents = False  # whether the split may divide a document among parts
    request_class: type[CorpusRequest] = TokenRequest  # how files are read
    suffixes: tuple[str, ...] = SUFFIXES
    text_column = "text"  # column of the documents in jsonl and parquet files
    demo_file: ClassVar[Callable[[], Path]]  # makes the demo data at first use

    def __init__(
        self,
        train_files: Files = None,
        validation_files: Files = None,
        test_files: Files = None,
        tokenizer: TokenizerOptions | None = None,
        context_length: int = 256,
        split: TextSplit = TextSplit(),  # noqa: B008 - frozen
        **planned: Any,
    ) -> None:
        super().__init__(**planned)
        self.files = {TRAIN: train_files, VALIDATION: validation_files, TEST: test_files}
        self.tokenizer_options = tokenizer
        self.context_length, self.split = context_length, split
        check_range("data", 1, context_length=context_length)
        if split.by != "documents" and not self.cuts_documents:
            raise ValueError(
                f'data.split.by "{split.by}" would cut {self.noun} apart; leave it at documents.'
            )

    def demo_files(self) -> dict[int, list[Path]]:
        """Return the demo files of each part."""
        return {TRAIN: [type(self).demo_file()], VALIDATION: [], TEST: []}

    def _options(self) -> TokenizerOptions:
        return options_of_model(self.model.tokenizer, self.tokenizer_options)

    def store_request(self, parts: Sequence[int] = (TRAIN, VALIDATION, TEST)) -> Any:
        """Return the request for the store of these parts; the demo data if no file is named.
        FileNotFoundError names a file that does not exist."""
        files = {
            part: text_files(self.files[part], f"data.{PART_NAMES[part]}_files", self.suffixes)
            for part in parts
        }
        own = {name: getattr(self, name) for name in self.request_class.options()}
        if not any(files.values()):
            files = self.demo_files()
            own = {name: value for name, value in own.items() if name not in COLUMNS}
        return self.request_class(files, self._options(), self.split, **own)
