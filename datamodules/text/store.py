"""Stores of tokens in memory-mapped files: documents read, divided and tokenised once.

Each part is one stream of tokens; document d of it owns the positions starts[d] … starts[d] +
num_positions[d] - 1, and the token after a position is what the position predicts.

Shapes: F fragments of all documents, P pieces (the fragments that a part has something of), D
documents of a part.
"""

import hashlib
import json
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from datamodules.core.store import (
    ArrayFile,
    cache_root,
    digest_of,
    file_digest,
    made_once,
    mapped,
    mapped_array,
)
from datamodules.files.documents import Fragment, Reading, read_section, sections_of
from datamodules.files.splitting import PART_NAMES, TRAIN
from datamodules.text.splitting import Fragments, TextSplit, cuts_of
from datamodules.tokenizers.text import TextTokenizer, TokenizerOptions, make_tokenizer

log = logging.getLogger("lightning.pytorch.datamodules")  # Lightning shows its own at this level
STORE_VERSION = 3
STRETCH_CHARACTERS = 1 << 18  # of a text that is tokenised at once
BATCH_CHARACTERS = 1 << 20  # of the texts that the threads of the tokenizer share
SAID_BYTES = 8 << 20  # of text whose preparation takes long enough to be announced


class PartFacts(NamedTuple):
    """What a part holds; bytes are those of the text in UTF-8."""

    num_documents: int
    num_tokens: int
    num_characters: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class TokenStream:
    """The tokens of one part.

    Args:
        tokens: [n] uint16 or uint32.
        starts: [D] int64, first position of each document.
        num_positions: [D] int64, positions that predict a token.
        place: store and part whose files these arrays map; pickled is then the place alone.
    """

    tokens: np.ndarray
    starts: np.ndarray
    num_positions: np.ndarray
    place: tuple[Path, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.place is None:
            return TokenStream, (self.tokens, self.starts, self.num_positions)
        return _stream, self.place


class TokenisedFolder:
    """What every store of tokens knows, opened read-only.

    Args:
        folder: complete, as the function made it that opens the store.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = json.loads((folder / "facts.json").read_text("utf-8"))

    @property
    def fingerprint(self) -> str:
        """Hex digest of the tokens, of what is trained on and of how they are divided."""
        return self.facts["fingerprint"]

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that made the tokens."""
        text = (self.folder / "tokenizer.json").read_text("utf-8")
        return TextTokenizer.from_dict(json.loads(text))


class TokenStore(TokenisedFolder):
    """A folder of token streams, as `open_token_store` makes it."""

    def stream(self, part: int) -> TokenStream:
        """Return the stream of one part: 0 train, 1 validation, 2 test."""
        return _stream(self.folder, part)

    def hashes(self, part: int) -> np.ndarray:
        """Return [D] uint64, equal for documents whose text in this part is equal."""
        return _opened(self.folder, part, "hashes")

    def part_facts(self, part: int) -> PartFacts:
        """Return what one part holds."""
        return PartFacts(**self.facts["parts"][PART_NAMES[part]])


def _stream(folder: Path, part: int) -> TokenStream:
    tokens, starts, sizes = (
        _opened(folder, part, kind) for kind in ("tokens", "starts", "num_positions")
    )
    return TokenStream(tokens, starts, sizes, (folder, part))


def _opened(folder: Path, part: int, kind: str) -> np.ndarray:
    return mapped_array(folder / f"{PART_NAMES[part]}.{kind}.npy")


def token_dtype(vocab_size: int) -> type[np.unsignedinteger]:
    """Return the type in which tokens are kept."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


class Tokens(Protocol):
    """Token ids of texts, by the number of the text."""

    def __getitem__(self, number: int) -> np.ndarray:
        """Return the token ids of one text, [n] integers, without marks."""
        ...


class TokenRows:
    """The tokens of N texts; pickled is their place alone.

    Attributes:
        tokens: [n] uint16 or uint32, those of all texts.
        starts: [N + 1] int64, the first token of each text, and the end of the last.

    Args:
        folder: in which `TokenRowsWriter` wrote them.
        name: of these rows in it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.place = folder, name
        (tokens,) = folder.glob(f"{name}.tokens.*")
        self.tokens = mapped(tokens, np.dtype(tokens.suffix.removeprefix(".")))
        self.starts = mapped(folder / f"{name}.starts", np.int64)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenRows, self.place

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: int) -> np.ndarray:
        return self.tokens[self.starts[number] : self.starts[number + 1]]


class TokenRowsWriter:
    """Writes rows of tokens, in a `with` block.

    Args:
        folder: in which they come.
        name: of these rows in it.
        vocab_size: of the tokenizer.
    """

    def __init__(self, folder: Path, name: str, vocab_size: int) -> None:
        self._dtype = np.dtype(token_dtype(vocab_size))
        self._file = (folder / f"{name}.tokens.{self._dtype.name}").open("wb")
        self._starts_path, self._starts = folder / f"{name}.starts", array("q", [0])

    def __enter__(self) -> "TokenRowsWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
        np.array(self._starts, np.int64).tofile(self._starts_path)

    def add(self, rows: Iterable[np.ndarray]) -> None:
        """Take the tokens of the next texts."""
        for row in rows:
            self._file.write(row.astype(self._dtype).tobytes())
            self._starts.append(self._starts[-1] + len(row))


class ReadTokens:
    """Tokens that are made when they are asked for, where a text does not come again.

    Args:
        encode: a text -> its token ids.
        text: a number -> the text.
    """

    def __init__(self, encode: Callable[[str], np.ndarray], text: Callable[[int], str]) -> None:
        self.encode, self.text = encode, text

    def __getitem__(self, number: int) -> np.ndarray:
        return self.encode(self.text(number))


@dataclass
class TokenRequest:
    """All that a token store depends on.

    Args:
        files: per part (train, validation, test) the files.
        tokenizer: which tokenizer, where none is given.
        split: how training documents are divided.
        given: a tokenizer that is there already, such as a checkpoint's.
        reading: where documents stand in files.
    """

    files: dict[int, list[Path]]
    tokenizer: TokenizerOptions
    split: TextSplit
    given: TextTokenizer | None = None
    reading: Reading = field(default_factory=Reading)

    def folder(self) -> Path:
        """Return the store's place in the cache, a digest of all that it depends on."""
        root, split = cache_root(), self.split.beside(self.files)
        facts = {
            "version": STORE_VERSION,
            "files": {
                PART_NAMES[part]: [[p.suffix.lower(), file_digest(p, root)] for p in paths]
                for part, paths in self.files.items()
            },
            "tokenizer": self.given.digest if self.given else self.tokenizer.facts(),
            "split": None if split is None else asdict(split),
            "reading": asdict(self.reading),
        }
        return root / "tokens" / digest_of(facts)


def open_token_store(request: TokenRequest) -> TokenStore:
    """Return the store of a request, made at first use.

    Raises:
        ValueError: there is no text, or a file cannot be read as text.
    """
    return TokenStore(made_once(request.folder(), lambda folder: _write(request, folder)))


def _write(request: TokenRequest, folder: Path) -> None:
    """Fill the folder of a store: files are read to divide them, to take a vocabulary from them
    where that is wanted, and to tokenise them."""
    started = time.monotonic()
    num_bytes = sum(path.stat().st_size for paths in request.files.values() for path in paths)
    if num_bytes > SAID_BYTES:
        log.info(f"Tokenising {num_bytes / 1e6:,.0f} MB of text, once.")
    fragments, empty = _scanned(request)
    cuts, size = cuts_of(fragments, request.split.beside(request.files)), fragments.characters
    bounds = np.column_stack([np.zeros_like(size), cuts, size])  # [F, parts + 1] characters
    tokenizer = request.given or make_tokenizer(
        request.tokenizer, (s.text for s in _stretches(request, bounds) if s.part == TRAIN)
    )
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()), "utf-8")
    layouts = [
        _Layout.of(fragments, bounds[:, part : part + 2], tokenizer)
        for part in range(len(PART_NAMES))
    ]
    counts, utf8 = _write_tokens(request, bounds, layouts, tokenizer, folder)
    is_cut, content = _are_cut(fragments, bounds), hashlib.sha256()
    parts: dict[str, dict[str, int]] = {}
    for part, name in enumerate(PART_NAMES):
        tokens = mapped_array(folder / f"{name}.tokens.npy")
        content.update(tokens.data)
        starts, num_positions, texts = layouts[part].placed(counts[:, part])
        hashes = layouts[part].hashes
        if is_cut:  # parts share documents, and no text
            hashes = _hashed(tokens, texts)
        # Hashes depend on where a long document is cut for reading: they are no content.
        content.update(starts.tobytes())
        content.update(num_positions.tobytes())
        for kind, values in (("starts", starts), ("num_positions", num_positions)):
            np.save(folder / f"{name}.{kind}.npy", values)
        np.save(folder / f"{name}.hashes.npy", hashes)
        num_characters = int((bounds[:, part + 1] - bounds[:, part]).sum())
        held = PartFacts(len(starts), len(tokens), num_characters, int(utf8[part]))
        parts[name] = held._asdict()
    first = empty[0] if empty else None
    facts: dict[str, Any] = {"fingerprint": content.hexdigest()[:32], "parts": parts}
    facts.update(num_empty=len(empty), first_empty=first)
    (folder / "facts.json").write_text(json.dumps(facts), "utf-8")
    num_documents, num_tokens = (
        sum(part[kind] for part in parts.values()) for kind in ("num_documents", "num_tokens")
    )
    said = f"Tokenised {num_documents:,} documents, {num_tokens:,} tokens, in "
    said += f"{time.monotonic() - started:.1f} s"
    if empty:
        said += f"; {len(empty):,} documents without a text are left out, the first at {first}"
    log.info(said + ".")


def _read(request: TokenRequest, empty: list[str] | None = None) -> Iterator[tuple[int, Fragment]]:
    """Yield (part, fragment) of all documents with a text; places of the others are noted."""
    for part, paths in request.files.items():
        for path in paths:
            for section in sections_of(path, request.reading):
                for fragment in read_section(section, request.reading):
                    if not (fragment.begins and fragment.ends) or fragment.text.strip():
                        yield part, fragment
                    elif empty is not None:
                        empty.append(fragment.place)


def _scanned(request: TokenRequest) -> tuple[Fragments, list[str]]:
    """Return what is known of all fragments, and the places of documents without a text.

    Raises:
        ValueError: there is no text at all, or one that UTF-8 cannot hold.
    """
    empty: list[str] = []
    part, characters, begins, ends = array("b"), array("q"), array("b"), array("b")
    hashes = bytearray()
    for number, fragment in _read(request, empty):
        try:
            content = fragment.text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{fragment.place}: character {error.start + 1} is half of a surrogate pair "
                f"({fragment.text[error.start]!r}), which no text in UTF-8 can hold; write the "
                "whole character."
            ) from error
        part.append(number)
        characters.append(len(fragment.text))
        hashes += hashlib.blake2b(content, digest_size=8).digest()
        begins.append(fragment.begins)
        ends.append(fragment.ends)
    if not part:
        held = "no document"
        if empty:
            held = f"{len(empty)} documents, all without a text, the first at {empty[0]}"
        raise ValueError(f"the files hold {held}; give them at least one text.")
    hashed = np.frombuffer(hashes, "<u8").astype(np.uint64)
    flags = (np.array(values, bool) for values in (begins, ends))
    return Fragments(np.array(part), np.array(characters), hashed, *flags), empty


class _Stretch(NamedTuple):
    """A text that is tokenised at once: a piece, or a stretch of a longer one."""

    row: int  # of the fragment
    part: int
    place: str
    text: str
    continues: bool  # a document that began before
    is_first: bool  # of its piece
    is_last: bool


def _stretches(request: TokenRequest, bounds: np.ndarray) -> Iterator[_Stretch]:
    """Yield all pieces in stretches that need little memory, cut at line ends where there are
    some.

    Raises:
        RuntimeError: a file has changed since it was scanned.
    """
    row = -1
    for row, (_, fragment) in enumerate(_read(request)):
        if row == len(bounds) or len(fragment.text) != bounds[row, -1]:
            raise RuntimeError(
                f"{fragment.place}: the file changed while it was read; start again."
            )
        ends = bounds[row].tolist()
        for part in range(len(PART_NAMES)):
            start, stop = ends[part : part + 2]
            place = start
            while place < stop:
                end = stop
                if stop - place > STRETCH_CHARACTERS:
                    end = place + STRETCH_CHARACTERS
                    line = fragment.text.rfind("\n", place + STRETCH_CHARACTERS // 2, end)
                    end = line + 1 or end
                text = fragment.text[place:end]
                continues = not fragment.begins or place > 0
                flags = (continues, place == start, end == stop)
                yield _Stretch(row, part, fragment.place, text, *flags)
                place = end
    if row + 1 < len(bounds):
        raise RuntimeError("a file became shorter while it was read; start again.")


@dataclass(frozen=True)
class _Layout:
    """What stands in the stream of one part.

    leads [F] bool, a begin token stands before the text of a fragment; trails [F] bool, an end
    token behind; is_shared [F] bool, one token ends a document and begins the next; pieces [P]
    int64, fragments; opens [P] bool, a document begins with the piece; hashes [D] uint64.
    """

    leads: np.ndarray
    trails: np.ndarray
    is_shared: np.ndarray
    pieces: np.ndarray
    opens: np.ndarray
    hashes: np.ndarray

    @classmethod
    def of(cls, fragments: Fragments, taken: np.ndarray, tokenizer: TextTokenizer) -> "_Layout":
        """Return the layout of a part.

        Args:
            fragments: all.
            taken: [F, 2] the characters of each fragment that belong to the part.
            tokenizer: whose begin and end tokens stand around documents.
        """
        begin_id, end_id = tokenizer.begin_id, tokenizer.end_id
        has = taken[:, 1] > taken[:, 0]
        pieces = np.flatnonzero(has)
        document = fragments.document[pieces]
        opens = np.diff(document, prepend=-1) != 0
        leads = has & fragments.begins & (taken[:, 0] == 0) & (begin_id is not None)
        trails = has & fragments.ends & (taken[:, 1] == fragments.characters)
        # One token that both begins and ends stands once between two documents, as in GPT-2's data.
        is_shared = np.zeros_like(leads)
        behind = np.concatenate([[False], trails[pieces]])[:-1]
        is_shared[pieces] = leads[pieces] & behind & (begin_id == end_id)
        hashes = fragments.document_hashes()[document[opens]]
        return cls(leads & ~is_shared, trails, is_shared, pieces, opens, hashes)

    def placed(self, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return starts [D], num_positions [D], and where the text of each document begins and
        ends, without begin and end token, [D, 2].

        Args:
            counts: [F] tokens of each fragment's text.
        """
        pieces, opens = self.pieces, self.opens
        leads, trails = self.leads[pieces], self.trails[pieces]
        stops = np.cumsum(leads + counts[pieces] + trails)
        firsts = np.concatenate([[0], stops])[:-1]
        is_last = np.append(opens[1:], True)[: len(opens)]
        starts = (firsts - self.is_shared[pieces])[opens]
        num_positions = np.maximum(stops[is_last] - 1 - starts, 0)
        texts = np.column_stack([(firsts + leads)[opens], (stops - trails)[is_last]])
        return starts, num_positions, texts


def _write_tokens(
    request: TokenRequest,
    bounds: np.ndarray,
    layouts: list[_Layout],
    tokenizer: TextTokenizer,
    folder: Path,
) -> tuple[np.ndarray, np.ndarray]:
    """Write the stream of each part; return the tokens of each text, [F, parts], and the bytes of
    each part's texts in UTF-8, [parts]."""
    dtype = token_dtype(tokenizer.vocab_size)
    counts = np.zeros((len(bounds), len(PART_NAMES)), np.int64)
    num_bytes = np.zeros(len(PART_NAMES), np.int64)
    begin, end = np.array([[tokenizer.begin_id or 0], [tokenizer.end_id]])

    def add(batch: list[_Stretch]) -> None:
        for stretch, ids in zip(batch, _encoded(tokenizer, batch), strict=True):
            row, part = stretch.row, stretch.part
            if ids.size and ids.max() >= tokenizer.vocab_size:
                raise ValueError(
                    f"{stretch.place}: the tokenizer gave the token {ids.max()}, and its "
                    f"vocabulary has {tokenizer.vocab_size}; its folder mixes files of two "
                    "tokenizers."
                )
            if stretch.is_first and layouts[part].leads[row]:
                streams[part].add(begin)
            streams[part].add(ids)
            if stretch.is_last and layouts[part].trails[row]:
                streams[part].add(end)
            counts[row, part] += len(ids)
            num_bytes[part] += len(stretch.text.encode())

    with ExitStack() as stack:
        streams = [
            stack.enter_context(ArrayFile(folder / f"{name}.tokens.npy", dtype))
            for name in PART_NAMES
        ]
        batch: list[_Stretch] = []
        size = 0
        for stretch in _stretches(request, bounds):
            batch.append(stretch)
            size += len(stretch.text)
            if size >= BATCH_CHARACTERS:
                add(batch)
                batch, size = [], 0
        add(batch)
    return counts, num_bytes


def _encoded(tokenizer: TextTokenizer, batch: list[_Stretch]) -> list[np.ndarray]:
    """Return the tokens of each text; an error names the place."""
    ids: list[np.ndarray] = [np.empty(0, np.int64)] * len(batch)
    try:
        for continues in (False, True):
            rows = [row for row, stretch in enumerate(batch) if stretch.continues == continues]
            texts = [batch[row].text for row in rows]
            for row, tokens in zip(rows, tokenizer.encode_batch(texts, continues), strict=True):
                ids[row] = tokens
    except ValueError:
        for stretch in batch:
            try:
                tokenizer.encode(stretch.text)
            except ValueError as error:
                raise ValueError(f"{stretch.place}: {error}") from error
        raise
    return ids


def _are_cut(fragments: Fragments, bounds: np.ndarray) -> bool:
    """Return whether parts share documents, each having another stretch of them."""
    has = np.diff(bounds, axis=1) > 0  # [F, parts]
    held = [np.unique(fragments.document[has[:, part]]) for part in range(has.shape[1])]
    return sum(map(len, held)) > len(np.unique(np.concatenate(held)))


def _hashed(tokens: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Return [D] uint64, a hash of the tokens of each text."""
    digests = (
        hashlib.blake2b(tokens[start:stop].tobytes(), digest_size=8).digest()
        for start, stop in texts.tolist()
    )
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
