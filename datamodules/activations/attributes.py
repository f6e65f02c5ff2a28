"""What a user knows of each document: attribute words, and the file that it stands in.

Rows of jsonl and parquet files may hold attributes, a mapping of names to words of the text. They
are found again by the text's hash. Shapes: D documents of a part, A attributes.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datamodules.documents import TEXT_SUFFIXES, Reading
from datamodules.json_rows import read_json_rows
from datamodules.tokenizers.text_tokenizer import TextTokenizer

NONE = -1


class DocumentFacts(NamedTuple):
    """What is known of the documents of a part.

    names: of the attributes. attributes [D, A] int64: first token of the word, -1 = unknown.
    group [D] int64: index in group_names. group_names: stems of the part's files.
    """

    names: list[str]
    attributes: np.ndarray
    group: np.ndarray
    group_names: list[str]


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
    group = np.zeros(len(hashes), np.int64)
    names: list[str] = []
    known: dict[int, tuple[int, dict[str, str]]] = {}
    for number, path in enumerate(files if column is not None else []):
        if path.suffix.lower() in TEXT_SUFFIXES:
            continue
        for row in read_json_rows(path, columns=(reading.text_column, column)):
            given = row.values.get(column) or {}
            if not isinstance(given, dict):
                raise ValueError(
                    f'{row.place}: "{column}" must map names to words, such as {{"pet": "owl"}}, '
                    f"got {str(given)[:60]}; mend it, or set data.attributes_column to null."
                )
            names += [name for name in given if name not in names]
            known[_hash_of(str(row.values.get(reading.text_column, "")))] = (number, given)
    words = sorted({str(word) for _, given in known.values() for word in given.values()})
    tokens = [ids[0] if len(ids) else NONE for ids in tokenizer.encode_batch(_spaced(words))]
    token_of = dict(zip(words, tokens, strict=True))
    attributes = np.full((len(hashes), len(names)), NONE, np.int64)
    for document, key in enumerate(hashes.tolist()):
        number, given = known.get(key, (0, {}))
        group[document] = number
        for place, name in enumerate(names):
            if name in given:
                attributes[document, place] = token_of[str(given[name])]
    return DocumentFacts(names, attributes, group, [path.stem for path in files])


def _spaced(words: list[str]) -> list[str]:
    return [f" {word}" for word in words]


def _hash_of(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
