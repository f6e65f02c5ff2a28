"""What documents teach a retriever, as tokens: titles, texts and sentences, tokenised once.

A document without one of its sentences is put together from tokens: those of its beginning, and of
each further sentence with the blank before it. Shapes: D documents, S sentences of all.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.core.store import cache_root, digest_of, made_once, mapped_array
from datamodules.search.collection import Collection, Document
from datamodules.text.encoding import TextEncoding
from datamodules.text.store import TokenRows, TokenRowsWriter
from datamodules.text.terms import sentences_of
from datamodules.tokenizers.spelling import cuts_at_blanks

PARTS_VERSION = 2
FEWEST_WORDS = 4  # of a sentence that can stand for a query
DOCUMENTS_AT_ONCE = 256
ROWS = ("titles", "bodies", "sentences", "pieces")
ARRAYS = ("firsts", "is_long", "has_title", "is_divisible")


@dataclass(frozen=True)
class PartsOptions:
    """Which parts of documents are kept; the rows of others are empty.

    Args:
        titles: keep titles and bodies.
        pieces: keep what documents without one of their sentences are put together from.
        most: tokens of a text that are kept, its first; none keeps all.
        of_queries: the same of titles and sentences.
    """

    titles: bool
    pieces: bool
    most: int | None
    of_queries: int | None


class Drawn(NamedTuple):
    """A sentence of a document by its number, and whether it is taken out of it."""

    sentence: int
    is_removed: bool


def drawn_sentence(is_long: np.ndarray, shares: Sequence[float], removal: float) -> Drawn:
    """Return one sentence of a document; a single one stays in it.

    Args:
        is_long: [n] bool, of each sentence; others are drawn only where none is.
        shares: two in [0, 1), drawn for the sample: of the sentence, and of its removal.
        removal: probability that it is taken out.
    """
    long = is_long.nonzero()[0]
    count = len(long) or len(is_long)
    place = int(shares[0] * count)
    is_removed = shares[1] < removal and len(is_long) > 1
    return Drawn(int(long[place]) if len(long) else place, is_removed)


def document_sentences(document: Document) -> list[str]:
    """Return the sentences of a document's text, at least one; it may have no word.

    The ends of lines mean nothing, as texts may be wrapped.
    """
    text = " ".join(document.text.split())
    return sentences_of([text]) or [text]


def are_long(sentences: Sequence[str]) -> np.ndarray:
    """Return which sentences, [n] bool, have at least `FEWEST_WORDS` words."""
    return np.array([len(sentence.split()) >= FEWEST_WORDS for sentence in sentences])


def body_of(document: Document) -> str:
    """Return the text that a title asks for. Some texts begin with their title, by which they
    would be found without any learning."""
    return document.text.removeprefix(document.title)


def without(document: Document, sentences: Sequence[str], number: int) -> Document:
    """Return a document without one of its sentences."""
    rest = " ".join(text for n, text in enumerate(sentences) if n != number)
    return Document(document.title, rest)


class DocumentParts:
    """A folder of tokens, as `kept_parts` makes it.

    Attributes:
        titles: [D] rows of the titles.
        bodies: [D] rows of the texts that they ask for.
        sentences: [S] rows of the sentences.
        firsts: [D + 1] int64, first sentence of each document, and the end of the last.
        is_long: [S] bool, which have enough words to be drawn before others.
        has_title: [D] bool.
        is_divisible: [D] bool, whether the tokens of its pieces, one after the other, are those of
            a document. Not so where a tokenizer's words go over blanks.

    Args:
        folder: complete.
        collection: of the documents.
        encoding: that made the tokens.
    """

    firsts: np.ndarray
    is_long: np.ndarray
    has_title: np.ndarray
    is_divisible: np.ndarray

    def __init__(self, folder: Path, collection: Collection, encoding: TextEncoding) -> None:
        self.folder, self.collection, self.encoding = folder, collection, encoding
        self.titles, self.bodies, self.sentences, self._pieces = (
            TokenRows(folder, name) for name in ROWS
        )
        for name in ARRAYS:
            setattr(self, name, mapped_array(folder / f"{name}.npy"))

    def __reduce__(self) -> tuple[object, ...]:
        return DocumentParts, (self.folder, self.collection, self.encoding)

    def long_ones(self, document: int) -> np.ndarray:
        """Return which sentences of a document, [n] bool, are long."""
        return self.is_long[self.firsts[document] : self.firsts[document + 1]]

    def sentence(self, document: int, number: int) -> np.ndarray:
        """Return the token ids of a sentence."""
        return self.sentences[int(self.firsts[document]) + number]

    def without(self, document: int, number: int) -> np.ndarray:
        """Return the token ids of a document of several sentences, without one of them."""
        if not self.is_divisible[document]:
            whole = self.collection.document(document)
            return self.encoding.ids_once(without(whole, document_sentences(whole), number).whole)
        # Pieces: the beginning without the first sentence, that with it, the further sentences.
        first, last = (int(n) + document for n in self.firsts[document : document + 2])
        if number == 0:
            before, behind = self._pieces[first], first + 3
        else:
            before = self._pieces.between(first + 1, first + 1 + number)
            behind = first + 2 + number
        return np.concatenate([before, self._pieces.between(behind, last + 1)])


def kept_parts(
    collection: Collection, encoding: TextEncoding, options: PartsOptions
) -> DocumentParts:
    """Return the parts of all documents, tokenised once into the cache.

    Args:
        collection: of the documents.
        encoding: of the texts.
        options: which parts.
    """
    facts = [collection.fingerprint, encoding.digest, asdict(options)]

    def make(folder: Path) -> None:
        _write(folder, collection, encoding, options)

    folder = cache_root() / "document_parts" / digest_of([PARTS_VERSION, *facts])
    return DocumentParts(made_once(folder, make), collection, encoding)


def _write(
    folder: Path, collection: Collection, encoding: TextEncoding, options: PartsOptions
) -> None:
    most, of_queries = options.most, options.of_queries
    vocab_size, cuts = encoding.tokenizer.vocab_size, cuts_at_blanks(encoding.tokenizer.backend)
    lists: dict[str, list[Any]] = {name: [] for name in ARRAYS}
    with ExitStack() as stack:
        titles, bodies, sentences, pieces = (
            stack.enter_context(TokenRowsWriter(folder, name, vocab_size)) for name in ROWS
        )
        for documents in _some_at_a_time(collection):
            of_each = [document_sentences(document) for document in documents]
            flat = [sentence for own in of_each for sentence in own]
            alone, is_divisible = encoding.ids_of(flat), [False] * len(documents)
            sentences.add(ids[:of_queries] for ids in alone)
            divided: list[list[np.ndarray]] = [[]] * len(documents)
            if options.pieces:
                divided, is_divisible = _divided(documents, of_each, encoding, cuts)
                pieces.add(piece for own in divided for piece in needed_pieces(own, most))
            if options.titles:
                named = encoding.ids_of([document.title for document in documents])
                titles.add(ids[:of_queries] for ids in named)
                joinable = [d if is_divisible[n] else [] for n, d in enumerate(divided)]
                found = _bodies(documents, of_each, alone, joinable, encoding)
                bodies.add(ids[:most] for ids in found)
            lists["firsts"] += map(len, of_each)
            lists["is_long"].append(are_long(flat))
            lists["has_title"] += [bool(document.title) for document in documents]
            lists["is_divisible"] += is_divisible
    np.save(folder / "firsts.npy", np.cumsum([0, *lists["firsts"]], dtype=np.int64))
    np.save(folder / "is_long.npy", np.concatenate([np.zeros(0, bool), *lists["is_long"]]))
    for name in ("has_title", "is_divisible"):
        np.save(folder / f"{name}.npy", np.array(lists[name], bool))


def _some_at_a_time(collection: Collection) -> Iterator[list[Document]]:
    for first in range(0, collection.num_documents, DOCUMENTS_AT_ONCE):
        end = min(first + DOCUMENTS_AT_ONCE, collection.num_documents)
        yield [collection.document(number) for number in range(first, end)]


def _divided(
    documents: Sequence[Document],
    of_each: Sequence[list[str]],
    encoding: TextEncoding,
    cuts: bool,
) -> tuple[list[list[np.ndarray]], list[bool]]:
    """Return the pieces of each document, one more than its sentences, and which are divisible.

    That is so where the tokenizer cuts at blanks, and the tokens of the pieces are those of the
    whole text: a special token may take the blank before or behind it.
    """
    beginnings, further, wholes = [], [], []
    for (title, _), own in zip(documents, of_each, strict=True):
        several = len(own) > 1
        starts = (own[1], own[0], " ".join(own)) if several else ("",) * 3
        texts = [Document(title if several else "", start).whole for start in starts]
        beginnings += texts[:2]
        wholes.append(texts[2])
        further += own[1:]
    begun, whole = encoding.ids_of(beginnings), encoding.ids_of(wholes)
    following = encoding.ids_of(further, continues=True)
    ends = np.cumsum([0, *(len(own) - 1 for own in of_each)])
    pieces, is_divisible = [], []
    for n, (start, end) in enumerate(pairwise(ends.tolist())):
        own_pieces = [*begun[2 * n : 2 * n + 2], *following[start:end]]
        pieces.append(own_pieces)
        is_divisible.append(cuts and np.array_equal(np.concatenate(own_pieces[1:]), whole[n]))
    return pieces, is_divisible


def _bodies(
    documents: Sequence[Document],
    of_each: Sequence[list[str]],
    alone: Sequence[np.ndarray],
    divided: Sequence[list[np.ndarray]],
    encoding: TextEncoding,
) -> list[np.ndarray]:
    """Return the tokens of the texts that titles ask for.

    Those that are their sentences with blanks between them are not tokenised again.

    Args:
        documents: some.
        of_each: their sentences.
        alone: tokens of all these sentences by themselves.
        divided: pieces of each document, none where they are not to be joined.
        encoding: of the texts.
    """
    firsts = np.cumsum([0, *map(len, of_each)]).tolist()
    bodies = [body_of(document) for document in documents]
    known: dict[int, np.ndarray] = {}
    for n, (body, own, pieces) in enumerate(zip(bodies, of_each, divided, strict=True)):
        if (len(own) == 1 or pieces) and body == " ".join(own):
            known[n] = np.concatenate([alone[firsts[n]], *pieces[2:]])
    left = iter(encoding.ids_of([body for n, body in enumerate(bodies) if n not in known]))
    return [known[n] if n in known else next(left) for n in range(len(bodies))]


def needed_pieces(pieces: list[np.ndarray], most: int | None) -> list[np.ndarray]:
    """Return the pieces of a document, empty ones for those that are behind the first `most`
    tokens whichever sentence is missing.

    Args:
        pieces: the beginning without the first sentence, that with it, the further sentences.
        most: tokens that are read; none reads all.
    """
    if most is None or len(pieces) < 3:
        return pieces
    cut = [piece[:most] for piece in pieces]
    lengths = np.array([len(piece) for piece in cut])
    # What there is up to each piece without the first sentence, or without the longest other one.
    without_first = lengths[0] + np.cumsum(lengths[2:]) - lengths[2]
    longest = np.maximum.accumulate(lengths[2:])
    without_other = lengths[1] + np.cumsum(lengths[2:]) - longest
    is_enough = np.minimum(without_first, without_other) >= most
    needed = 3 + int(is_enough.argmax()) if is_enough.any() else len(cut)
    return [*cut[:needed], *[cut[0][:0]] * (len(cut) - needed)]
