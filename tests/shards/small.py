"""Small shards in datatrove's format."""

import json

import numpy as np

from datamodules.tokenizers.text import byte_tokenizer


def write_shard(path, documents, dtype="<u2"):
    """Write documents, each an array of tokens; return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ends = np.cumsum([len(document) for document in documents], dtype="<u8")
    tokens = np.concatenate([np.empty(0, dtype), *documents]).astype(dtype)
    path.write_bytes(tokens.tobytes())
    path.with_name(f"{path.name}.index").write_bytes(ends.tobytes())
    path.with_name(f"{path.name}.metadata").write_text(f"bytes|{tokens.itemsize}\n{len(tokens)}\n")
    return path


def write_folder(folder, num_shards=3, num_documents=40, seed=0):
    """Write shards of made-up texts and their tokenizer; return the folder as a string."""
    rng, tokenizer = np.random.default_rng(seed), byte_tokenizer()
    folder.mkdir(exist_ok=True)
    for number in range(num_shards):
        documents = [
            np.append(rng.integers(97, 123, rng.integers(1, 90)), tokenizer.end_id)
            for _ in range(num_documents)
        ]
        write_shard(folder / f"part{number % 2}" / f"{number:05}.ds", documents)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.to_dict()))
    return str(folder)
