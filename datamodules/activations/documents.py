"""Documents that a subject reads: their pieces, drawn positions and attributes.

Rows of jsonl and parquet files may hold `attributes`, a mapping of names to words of the text. They
are looked up by the text's hash. Shapes: D documents of a part, A attributes, N activations.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules import demo
from datamodules.core.batches import ALL
from datamodules.core.plan import check_range, hash_ids
from datamodules.core.store import text_hash
from datamodules.files.audit import Audit, AuditPart
from datamodules.files.documents import TEXT_SUFFIXES, read_documents
from datamodules.files.rows import kind_of, read_json_rows
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, TextSplit
from datamodules.files.tables import paths
from datamodules.text.packing import cut_into_pieces
from datamodules.text.store import CorpusDataModule, TokenStore
from datamodules.tokenizers.text import TextTokenizer

SEEDS_APART = 1_000_003  # distance of the keys of two seeds; more than a document's positions
ATTRIBUTES = "attributes"  # name of the column
NONE = -1


@dataclass(frozen=True)
class PositionRule:
    """How positions in a document are drawn.

    Args:
        min_position: first position that may be drawn, from 0; earlier ones have too little context
            to explain.
        per_document: positions per document; a shorter document gives as many as it has.
        seed: seed of the draws.
    """

    min_position: int = 6
    per_document: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("positions", 0, min_position=self.min_position)
        check_range("positions", 1, per_document=self.per_document)


def drawn_positions(
    sizes: np.ndarray, hashes: np.ndarray, rule: PositionRule
) -> tuple[np.ndarray, np.ndarray]:
    """Return the document [N] and the position [N] of each activation, int64, both ascending.

    Draws are keyed by the document's text, so that they depend neither on its place nor on other
    documents. Every set of positions of a document is equally likely.

    Args:
        sizes: [D] positions of each document.
        hashes: [D] uint64, of their texts.

    Source: Floyd's algorithm (Bentley and Floyd, Programming pearls, CACM 30, 1987), for all
    documents at once.
    """
    open_places = np.maximum(sizes.astype(np.int64) - rule.min_position, 0)
    counts = np.minimum(open_places, rule.per_document)
    drawn = np.full((len(sizes), int(counts.max(initial=0))), np.iinfo(np.int64).max)
    for turn in range(drawn.shape[1]):
        last = np.maximum(open_places - counts + turn, 0)
        keyed = hash_ids(hashes, rule.seed * SEEDS_APART + turn)
        choice = (keyed % (last + 1).astype(np.uint64)).astype(np.int64)
        is_taken = (drawn[:, :turn] == choice[:, None]).any(1)
        is_drawn = turn < counts
        drawn[is_drawn, turn] = np.where(is_taken, last, choice)[is_drawn]
    drawn.sort(1)
    is_place = np.arange(drawn.shape[1]) < counts[:, None]
    return np.repeat(np.arange(len(sizes)), counts), drawn[is_place] + rule.min_position


class Pieces:
    """The documents of one part, in pieces of at most `context_length` tokens.

    The last token of a piece is not a position (it is only predicted); the document's next piece
    begins with it.
    """

    def __init__(self, store: TokenStore, part: int, context_length: int) -> None:
        self.store, self.part, self.context_length = store, part, context_length
        self.stream = store.stream(part)
        documents = self.stream.starts, self.stream.num_positions
        self.starts, self.sizes, self.document = cut_into_pieces(*documents, context_length - 1)

    @cached_property
    def document_hashes(self) -> np.ndarray:
        """[pieces] uint64, hash of the whole text of a piece's document."""
        return self.stream.hashes[self.document]

    @cached_property
    def hashes(self) -> np.ndarray:
        """[pieces] uint64, hash of the document's text plus the piece's offset in it."""
        place = self.starts - self.stream.starts[self.document]
        return self.document_hashes + place.astype(np.uint64)

    def tokens(self, piece: int) -> np.ndarray:
        """Return [size + 1] int64: a piece's tokens at its positions, and the one after them."""
        start = int(self.starts[piece])
        return self.stream.tokens[start : start + int(self.sizes[piece]) + 1].astype(np.int64)

    def rows(self, pieces: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return [B, T] int64: the first `lengths` [B] tokens of `pieces` [B], padded with 0."""
        places = np.arange(int(lengths.max()))
        is_token = places < lengths[:, None]
        indices = np.where(is_token, self.starts[pieces, None] + places, 0)
        return np.where(is_token, self.stream.tokens[indices], 0).astype(np.int64)


class DocumentFacts(NamedTuple):
    """Attributes and files of a part's documents.

    names: of the attributes. attributes [D, A] int64: `first_tokens` of the words, -1 = unknown.
    group [D] int64: index in group_names. group_names: unique names of the part's files, or `ALL`.
    """

    names: list[str]
    attributes: np.ndarray
    group: np.ndarray
    group_names: list[str]


def group_names(files: Sequence[Path]) -> list[str]:
    """Return a name for each file: its stem, or its whole path if two stems are equal or one is
    `ALL`."""
    stems = [path.stem for path in files]
    return stems if len({ALL, *stems}) > len(stems) else [str(path) for path in files]


def first_tokens(words: Sequence[str], tokenizer: TextTokenizer) -> dict[str, int]:
    """Return word -> its first token after a space, ignoring a token of the space alone; -1 for
    words without such a token."""
    tokens = tokenizer.encode_batch([f" {word}" for word in words])
    return {
        word: next((i for i in ids.tolist() if tokenizer.decode([i]).strip()), NONE)
        for word, ids in zip(words, tokens, strict=True)
    }


def _rows_of(path: Path, text_column: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each document and its words by attribute; txt files have no attributes."""
    if kind_of(path) in TEXT_SUFFIXES:
        yield from ((document.text, {}) for document in read_documents(path))
        return
    for row in read_json_rows(path, columns=(text_column, ATTRIBUTES)):
        value: Any = row.values.get(ATTRIBUTES)
        if isinstance(value, list) and all(isinstance(pair, tuple) for pair in value):
            value = dict(value)  # a parquet map
        words = {} if value is None else value
        if not isinstance(words, dict) or any(isinstance(w, dict | list) for w in words.values()):
            raise ValueError(
                f'{row.place}: "{ATTRIBUTES}" must map names to words, such as {{"pet": "owl"}}, '
                f"got {str(value)[:60]}; mend it, or give the column another name."
            )
        known = {str(name): str(word) for name, word in words.items() if word is not None}
        yield str(row.values.get(text_column) or ""), known


class DocumentsDataModule(CorpusDataModule):
    """Reads documents with the subject's tokenizer and draws positions in them.

    Args:
        context_length: maximum number of tokens that the subject reads at once, with the one after
            the last position; longer documents are cut into pieces.
        positions: how the positions of activations are drawn.
        split: how training files are divided into parts, by documents.
        text_column: column of the documents in jsonl and parquet files.
        corpus: files (txt, jsonl or parquet; without any, demo stories) and, for a subject with
            random weights, the tokenizer, see `CorpusDataModule`; a subject folder has its own.
    """

    def __init__(
        self,
        context_length: int = 64,
        positions: PositionRule = PositionRule(),
        split: TextSplit = TextSplit(test_share=0.1),  # noqa: B008 - frozen
        text_column: str = "text",
        **corpus: Any,
    ) -> None:
        super().__init__(context_length=context_length, split=split, **corpus)
        self.positions, self.text_column = positions, text_column

    def prepare_data(self) -> None:
        self.open_store()

    def setup(self, stage: str) -> None:
        if self.store is None:
            self.store = self.open_store()
        super().setup(stage)

    def open_store(self) -> TokenStore:
        """Return the token store of the documents, made at first use; ValueError if there is no
        text or two parts share a document."""
        store = self.store_request().open()
        check_parts(store)
        return store

    def demo_files(self) -> dict[int, list[Path]]:
        folder = demo.demo_stories()
        files = {part: [folder / f"{name}.jsonl"] for part, name in enumerate(PART_NAMES)}
        files[TEST].append(folder / "combinations.jsonl")
        return files

    def places(self, part: int) -> tuple[Pieces, np.ndarray, np.ndarray]:
        """Return a part's documents, and the piece [N] and position [N] of each activation."""
        pieces = Pieces(self.store, part, self.context_length)
        return pieces, *drawn_positions(pieces.sizes, pieces.hashes, self.positions)

    def facts(self, part: int) -> DocumentFacts:
        """Return the attributes and files of a part's documents; ValueError if a row's attributes
        do not map names to words."""
        request, hashes = self.store_request(), self.store.stream(part).hashes
        files, named = request.files[part], paths(self.files[part])
        # A part drawn from the training files, or read from a folder, is a single group.
        is_whole = not files or any(Path(one).expanduser().is_dir() for one in named)
        groups, files = [ALL] if is_whole else group_names(files), files or request.files[TRAIN]
        known: dict[int, tuple[int, dict[str, str]]] = {}
        for number, path in enumerate(files):
            for text, words in _rows_of(path, request.text_column):
                known.setdefault(text_hash(text), (0 if is_whole else number, words))
        names = list(dict.fromkeys(name for _, words in known.values() for name in words))
        every = {word for _, words in known.values() for word in words.values()}
        token_of = first_tokens(sorted(every), self.store.tokenizer)
        group = np.zeros(len(hashes), np.int64)
        attributes = np.full((len(hashes), len(names)), NONE, np.int64)
        for document, key in enumerate(hashes.tolist()):
            group[document], words = known.get(key, (0, {}))
            for name, word in words.items():
                attributes[document, names.index(name)] = token_of[word]
        return DocumentFacts(names, attributes, group, groups)

    def audit(self) -> Audit:
        self.store, rule = self.open_store(), self.positions
        audit, shares = Audit("documents", "tokens"), []
        names: dict[str, None] = {}
        for number, name in enumerate(PART_NAMES):
            (pieces, piece, _), facts = self.places(number), self.facts(number)
            audit.limit, count = pieces.context_length, len(facts.group)
            if not count:
                continue
            names |= dict.fromkeys(facts.names)
            shares.append(f"{name} {100 * (facts.attributes != NONE).any(1).mean():.1f} %")
            columns: dict[str, int | str] = {
                "tokens": len(pieces.stream.tokens),
                "too short": count - len(np.unique(pieces.document[piece])),
                "cut": int((np.bincount(pieces.document, minlength=count) > 1).sum()),
                "activations": len(piece),
            }
            lengths = pieces.stream.num_positions + 1
            audit.parts.append(AuditPart(name, lengths, pieces.stream.hashes, columns))
        known = "none; recall of known attributes is not reported"
        if names:
            listed = ", ".join([*names][:12]) + (" …" if len(names) > 12 else "")
            known = f"{len(names)} ({listed}); documents with any: {', '.join(shares)}"
        drawn = f"up to {rule.per_document} of each document, from {rule.min_position} on, seed "
        cut = f"documents of more than {audit.limit:,} tokens are cut into pieces"
        audit.notes += [("positions", f"{drawn}{rule.seed}; {cut}"), ("attributes", known)]
        return audit


def check_activations(number: int, name: str) -> None:
    """Raise ValueError for a part without activations."""
    if not number:
        raise ValueError(
            f"the part {name} has no activations: it has no documents, or they or "
            "data.context_length are too short for data.positions.min_position; lower it, raise "
            f"data.context_length, or give data.{name}_files or a share of data.split (and dump "
            "again)."
        )


def check_parts(store: TokenStore) -> None:
    """Raise ValueError if two parts share documents, which would leak training into the test."""
    hashes = {name: store.stream(part).hashes for part, name in enumerate(PART_NAMES)}
    for one, other in combinations(PART_NAMES, 2):
        shared = np.intersect1d(hashes[one], hashes[other])
        if len(shared):
            raise ValueError(
                f"{len(shared)} documents are both in {one} and in {other}; take them out of one "
                "of the two, or name the training files alone and let data.split divide them."
            )
