"""Makes token stores: reads documents, divides them, tokenises them once into the cache."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from datamodules.cache import cache_root, digest_of, file_digest, made_once
from datamodules.documents import read_documents
from datamodules.splitting import PART_NAMES, TEST, TRAIN, VALIDATION
from datamodules.token_store import TokenStore
from datamodules.tokenizers.text_tokenizer import (
    TextTokenizer,
    TokenizerOptions,
    make_tokenizer,
)

STORE_VERSION = 1


@dataclass(frozen=True)
class TextSplit:
    """How the training files are divided where the other parts have no files.

    Args:
        validation_share: share of the text for validation.
        test_share: share for the test.
        by: `tail` takes the last characters of every document, validation before test;
            `documents` draws whole documents by a hash of their text.
        seed: another seed draws other documents.
    """

    validation_share: float = 0.1
    test_share: float = 0.0
    by: str = "documents"
    seed: int = 0


@dataclass
class TokenRequest:
    """All that a token store depends on.

    Args:
        files: per part (train, validation, test) the files.
        tokenizer: which tokenizer, where none is given.
        split: how training documents are divided.
        given: a tokenizer that is there already, such as a checkpoint's.
    """

    files: dict[int, list[Path]]
    tokenizer: TokenizerOptions
    split: TextSplit
    given: TextTokenizer | None = field(default=None)

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
        }
        return root / "tokens" / digest_of(facts)


def open_token_store(request: TokenRequest) -> TokenStore:
    """Return the store of a request, made at first use."""
    return TokenStore(made_once(request.folder(), lambda folder: _write(request, folder)))


def _write(request: TokenRequest, folder: Path) -> None:
    texts: dict[int, list[tuple[str, bool, bool]]] = {TRAIN: [], VALIDATION: [], TEST: []}
    for part, paths in request.files.items():
        for path in paths:
            for document in read_documents(path):
                if part != TRAIN or request.files.get(VALIDATION):
                    texts[part].append((document.text, True, True))
                    continue
                text, split = document.text, request.split
                kept = int(len(text) * (1 - split.validation_share - split.test_share))
                middle = int(len(text) * (1 - split.test_share))
                texts[TRAIN].append((text[:kept], True, kept == len(text)))
                texts[VALIDATION].append((text[kept:middle], False, middle == len(text)))
                texts[TEST].append((text[middle:], False, True))
    tokenizer = request.given or make_tokenizer(
        request.tokenizer, (text for text, _, _ in texts[TRAIN])
    )
    content = hashlib.sha256()
    for part, name in enumerate(PART_NAMES):
        tokens, starts, sizes = [], [], []
        for text, begins, ends in texts.get(part, []):
            if not text:
                continue
            starts.append(len(tokens))
            begin = [tokenizer.begin_id] if begins and tokenizer.begin_id is not None else []
            ids = begin + tokenizer.encode(text).tolist() + ([tokenizer.end_id] if ends else [])
            tokens += ids
            sizes.append(len(ids) - 1)
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
        arrays = {
            "tokens": np.array(tokens, dtype),
            "starts": np.array(starts, np.int64),
            "num_positions": np.array(sizes, np.int64),
        }
        for kind, values in arrays.items():
            np.save(folder / f"{name}.{kind}.npy", values)
            content.update(values.tobytes())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()), "utf-8")
    facts = {"fingerprint": content.hexdigest()[:32]}
    (folder / "facts.json").write_text(json.dumps(facts), "utf-8")
