"""Small text corpora and their token stores, for tests."""

import csv
import json
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from datamodules.files.splitting import TEST, TRAIN, VALIDATION, TextSplit
from datamodules.text.store import TokenRequest, TokenStream
from datamodules.tokenizers.text import TextTokenizer, TokenizerOptions

NO_SPLIT = TextSplit(0.0)


def text_file(path, text):
    path.write_text(text, "utf-8")
    return path


def table(path, rows, names=("source", "target")):
    """Write a csv; return its path as a string."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    return str(path)


def rows_file(path, rows):
    """Write rows, or texts as rows, as JSON lines; return the file's path as a string."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    return str(text_file(path, "".join(f"{line}\n" for line in lines)))


def request(files, split=NO_SPLIT, options=TokenizerOptions(), **more):  # noqa: B008 - frozen
    parts = {TRAIN: files} if isinstance(files, list) else files
    return TokenRequest(parts, options, split, **more)


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
        for x, y in ((a.stream(part), b.stream(part)) for part in (TRAIN, VALIDATION, TEST))
        for name in ("tokens", "starts", "num_positions")
    )


TEXTS = [f"Document {i} has {'some ' * (i % 5)}words.\n" for i in range(20)]


def text_rows(folder):
    """Write the texts to a jsonl file with a second column; return its path."""
    return rows_file(folder / "corpus.jsonl", [{"text": text, "body": [1]} for text in TEXTS])


def text_module(files, **options):
    """Return a TextDataModule of small batches."""
    from datamodules import TextDataModule  # needs Lightning, which subprocesses of tests lack

    return TextDataModule(files, **{"global_batch_size": 4, "context_length": 32, **options})


def saved_tokenizer(tokenizer, folder):
    """Write the files of a tokenizer as an export does; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer.hugging_face_files().items():
        text_file(folder / name, content)
    return folder


END_ID, WORD, TAIL, LETTER, SPACE = 1, 258, 259, 260, 262  # ids of `sentence_piece`


def sentence_piece(kind="never"):
    """Return a tokenizer in the form of Llama's, with byte pieces for text that no piece covers: an
    old scheme (`prepend`), or a newer one (`always`, `first`, `never`)."""
    pieces = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁he", "n", "he", "\n", "▁"]
    model = models.BPE(
        {piece: i for i, piece in enumerate([*pieces, "h", "e"])},
        [("h", "e"), ("▁", "he")],
        unk_token="<unk>",
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    if kind == "prepend":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        backend.normalizer = normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", kind, split=False)
    ends = [decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), *ends])
    backend.add_special_tokens(["<unk>", "</s>"])
    return TextTokenizer(backend, END_ID)


@dataclass
class StreamStore:
    """One stream of tokens in place of a dataset's store, the same for every part."""

    only: TokenStream
    tokenizer: TextTokenizer
    fingerprint: str = "x"

    def stream(self, part: int) -> TokenStream:
        return self.only
