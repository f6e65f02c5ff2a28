"""What a user knows of each document: attribute words, and the file that it stands in.

Rows of jsonl and parquet files may hold attributes, a mapping of names to words of the text. They
are found again by the text's hash. Shapes: D documents of a part, A attributes.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.core.plan import hash_ids
from datamodules.files.documents import TEXT_SUFFIXES, Reading, read_section, sections_of
from datamodules.files.rows import JsonRow, read_json_rows
from datamodules.tokenizers.text_tokenizer import TextTokenizer

NONE = -1
ALL = "all"  # the group of all files
Given = dict[str, str]


class DocumentFacts(NamedTuple):
    """What is known of the documents of a part.

    names: of the attributes. attributes [D, A] int64: `first_tokens` of the words, -1 = unknown.
    group [D] int64: index in group_names. group_names: of the part's files, none twice.
    """

    names: list[str]
    attributes: np.ndarray
    group: np.ndarray
    group_names: list[str]

    def named(self, names: list[str]) -> "DocumentFacts":
        """Return the facts with a column for each of these names, in this order."""
        attributes = np.full((len(self.group), len(names)), NONE, np.int64)
        for column, name in enumerate(self.names):
            attributes[:, names.index(name)] = self.attributes[:, column]
        return self._replace(names=names, attributes=attributes)


def document_facts(
    files: Sequence[Path],
    hashes: np.ndarray,
    reading: Reading,
    column: str | None,
    tokenizer: TextTokenizer,
) -> DocumentFacts:
    """Return the attributes and the file of each document of a part.

    Args:
        files: of the part.
        hashes: [D] uint64 of the documents' texts.
        reading: where the texts stand.
        column: of the attributes; none reads no attributes.
        tokenizer: turns a word, after a space, into tokens.

    Raises:
        ValueError: a row's attributes are no mapping of names to words.
    """
    known: dict[int, tuple[int, Given]] = {}
    for number, path in enumerate(files):
        for key, given in _known_of(path, reading, column, len(files) > 1):
            known.setdefault(key, (number, given))
    names = list(dict.fromkeys(name for _, given in known.values() for name in given))
    words = sorted({word for _, given in known.values() for word in given.values()})
    token_of = first_tokens(words, tokenizer)
    place = {name: column for column, name in enumerate(names)}
    group = np.zeros(len(hashes), np.int64)
    attributes = np.full((len(hashes), len(names)), NONE, np.int64)
    for document, key in enumerate(hashes.tolist()):
        group[document], given = known.get(key, (0, {}))
        for name, word in given.items():
            attributes[document, place[name]] = token_of[word]
    return DocumentFacts(names, attributes, group, group_names(files))


def group_names(files: Sequence[Path]) -> list[str]:
    """Return a name for each of several files: stems, with the folder or the whole path where
    those are not different, or mean all files."""
    paths = [path.absolute() for path in files]
    stems = [path.stem for path in paths]
    for names in (stems, [f"{path.parent.name}/{path.stem}" for path in paths]):
        if len({ALL, *names}) > len(names):
            return names
    return [str(path) for path in paths]


def first_tokens(words: Sequence[str], tokenizer: TextTokenizer) -> dict[str, int]:
    """Return word -> the first of its tokens, after a space, that is more than white space.

    Tokenizers of the SentencePiece kind may give the space a token of its own. -1 stands for words
    without such a token.
    """
    tokens = tokenizer.encode_batch([f" {word}" for word in words])
    return {
        word: next((i for i in ids.tolist() if tokenizer.decode([i]).strip()), NONE)
        for word, ids in zip(words, tokens, strict=True)
    }


def _known_of(
    path: Path, reading: Reading, column: str | None, is_one_of_several: bool
) -> Iterator[tuple[int, Given]]:
    """Yield the hash and the attributes of each document of a file that is worth reading."""
    if path.suffix.lower() in TEXT_SUFFIXES:
        if is_one_of_several:
            yield from ((key, {}) for key in _hashes_of(path, reading))
        return
    if column is None and not is_one_of_several:
        return
    columns = (reading.text_column, *([] if column is None else [column]))
    for row in read_json_rows(path, columns=columns):
        given = {} if column is None else _given_in(row, column)
        yield _hash_of(str(row.values.get(reading.text_column) or "")), given


def _given_in(row: JsonRow, column: str) -> Given:
    found: Any = row.values.get(column)
    if found is None:
        return {}
    if isinstance(found, list) and all(isinstance(pair, tuple) for pair in found):
        found = dict(found)  # a parquet map
    is_sound = isinstance(found, dict) and not any(
        isinstance(word, dict | list) for word in found.values()
    )
    if not is_sound:
        raise ValueError(
            f'{row.place}: "{column}" must map names to words, such as {{"pet": "owl"}}, got '
            f"{str(found)[:60]}; mend it, or set data.attributes_column to null."
        )
    return {str(name): str(word) for name, word in found.items() if word is not None}


def _hashes_of(path: Path, reading: Reading) -> Iterator[int]:
    """Yield the hash of each document of a txt file, as a token store has it."""
    key = None
    for section in sections_of(path, reading):
        for fragment in read_section(section, reading):
            own = _hash_of(fragment.text)
            if fragment.begins or key is None:
                key = own
            else:
                key = int(hash_ids(np.array([key], np.uint64), own)[0])
            if fragment.ends:
                yield key


def _hash_of(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
