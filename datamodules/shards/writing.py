"""Writer of token shards in the format of datatrove's tokeniser, and their manifest entries."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.store import content_digest
from datamodules.tokenizers.text import TextTokenizer

BATCH_DOCUMENTS, BATCH_CHARACTERS = 1000, 1 << 22
MOST_SHARDS = 1000  # per folder


def write_shards(
    documents: Iterable[tuple[str, str]],
    tokenizer: TextTokenizer,
    root: Path,
    folder: str,
    tokens_per_shard: int,
) -> tuple[list[dict[str, Any]], int]:
    """Write documents to `000.ds`, `001.ds`, … in a folder, each with index and metadata.

    A document is its tokens and the end token, after the begin token if that is a different one.

    Args:
        documents: place and text of each document.
        root: folder of all shards, to which names in the manifest are relative.
        folder: new folder below `root`.
        tokens_per_shard: a shard is closed when it has this many tokens.

    Returns:
        The manifest entry of each shard, and the UTF-8 bytes of all texts.

    Raises:
        ValueError: the tokenizer cannot encode a text, or the folder would get too many shards.
    """
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    size = 2 if tokenizer.vocab_size <= 1 << 16 else 4
    begin_id, end = tokenizer.begin_id, np.array([tokenizer.end_id])
    begin = [] if begin_id in (None, tokenizer.end_id) else [np.array([begin_id])]
    named = {"tokenizer_name_or_path": tokenizer.digest, "save_final_metadata": True}
    entries: list[dict[str, Any]] = []
    num_bytes, file = 0, None
    for batch in _batches(documents):
        if len(entries) == MOST_SHARDS:
            raise ValueError(
                f"{root / folder} has {MOST_SHARDS:,} shards of {tokens_per_shard:,} tokens and "
                "would get more; raise tokens_per_shard, or divide the texts into more tasks."
            )
        if file is None:
            name = f"{folder}/{len(entries):03d}.ds"
            file = TokenizedFile(str(root), name, token_size=size, **named)
        encoded = tokenizer.encode_batch([text for _, text in batch], [place for place, _ in batch])
        tokens = np.concatenate([part for ids in encoded for part in (*begin, ids, end)])
        ends = np.cumsum([len(begin) + len(ids) + 1 for ids in encoded])
        file.write_bytes(tokens.astype(f"<u{size}").tobytes(), ends.tolist())
        num_bytes += sum(len(text.encode()) for _, text in batch)
        if len(file) >= tokens_per_shard:
            entries.append(_closed(file, root))
            file = None
    if file is not None:
        entries.append(_closed(file, root))
    return entries, num_bytes


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch, size = list[tuple[str, str]](), 0
    for document in documents:
        batch.append(document)
        size += len(document[1])
        if len(batch) == BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _closed(file: Any, root: Path) -> dict[str, Any]:
    """Close a shard; return its manifest entry."""
    file.close()
    path = root / file.filename
    sizes = {"tokens": len(file), "documents": len(file.doc_ends), "bytes": path.stat().st_size}
    digest, of_index = map(content_digest, (path, Path(f"{path}.index")))
    return {"name": file.filename, **sizes, "digest": digest, "index_digest": of_index}
