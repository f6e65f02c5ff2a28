"""Small text corpora and their token stores, for tests."""

import numpy as np

from datamodules.splitting import TEST, TRAIN, VALIDATION
from datamodules.text_split import TextSplit
from datamodules.token_writer import TokenRequest
from datamodules.tokenizers.text_tokenizer import TokenizerOptions

NO_SPLIT = TextSplit(0.0)


def text_file(path, text):
    path.write_text(text, "utf-8")
    return path


def request(files, split=NO_SPLIT, options=TokenizerOptions(), **more):  # noqa: B008 - frozen
    parts = {TRAIN: files} if isinstance(files, list) else files
    return TokenRequest(parts, options, split, **more)


def streams(store):
    return [store.stream(part) for part in (TRAIN, VALIDATION, TEST)]


def texts_of(store, part=TRAIN):
    """Return the text of each document, special tokens included."""
    s = store.stream(part)
    return [
        store.tokenizer.decode(s.tokens[a : a + n + 1], skip_special_tokens=False)
        for a, n in zip(s.starts.tolist(), s.num_positions.tolist(), strict=True)
    ]


def same(a, b):
    return a.fingerprint == b.fingerprint and all(
        np.array_equal(getattr(x, name), getattr(y, name))
        for x, y in zip(streams(a), streams(b), strict=True)
        for name in ("tokens", "starts", "num_positions")
    )
