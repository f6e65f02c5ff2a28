"""Puts the tokens that jobs made together into the streams of a store, begin and end included.

Shapes: F fragments of all documents, P pieces (the fragments that a part has something of), D
documents of a part.
"""

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datamodules.files.splitting import PART_NAMES
from datamodules.text.splitting import Fragments
from datamodules.text.token_jobs import TOKENS, Jobs
from datamodules.text.token_store import token_dtype


class _Pieces(NamedTuple):
    """Where the pieces of one part lie in its stream.

    fragment [P] int64; leads [P] bool, a begin token stands before; trails [P] bool, an end token
    behind; stops [P] int64, position behind the piece; starts, num_positions and hashes [D];
    texts [D, 2] int64, where the text of a document begins and ends, without begin and end token.
    """

    fragment: np.ndarray
    leads: np.ndarray
    trails: np.ndarray
    stops: np.ndarray
    starts: np.ndarray
    num_positions: np.ndarray
    hashes: np.ndarray
    texts: np.ndarray


def write_streams(jobs: Jobs, fragments: Fragments, folder: Path) -> dict[str, object]:
    """Write the arrays of every part into the folder.

    Returns:
        fingerprint, and per part its number of documents, tokens, characters and UTF-8 bytes.
    """
    cuts = np.load(jobs.folder / "cuts.npy")
    counts, num_bytes = [], np.zeros(len(PART_NAMES), np.int64)
    for job in range(len(jobs)):
        with np.load(jobs.path(TOKENS, job)) as made:
            counts.append(made["counts"])
            num_bytes += made["num_bytes"]
    all_counts, content = np.concatenate(counts), hashlib.sha256()
    bounds = np.column_stack([np.zeros(len(cuts), np.int64), cuts, fragments.characters])
    is_cut = _are_cut(fragments, bounds)
    parts = {}
    for part, name in enumerate(PART_NAMES):
        taken = bounds[:, part : part + 2]
        pieces = _laid_out(jobs, fragments, taken, all_counts[:, part])
        _write_tokens(jobs, part, pieces, folder / f"{name}.tokens.npy", content)
        if is_cut:  # parts share documents, and no text
            pieces = pieces._replace(hashes=_hashed(folder / f"{name}.tokens.npy", pieces.texts))
        for kind in ("starts", "num_positions", "hashes"):
            values = getattr(pieces, kind)
            np.save(folder / f"{name}.{kind}.npy", values)
            if kind != "hashes":  # they depend on where a long document is cut for reading
                content.update(values.tobytes())
        parts[name] = {
            "num_documents": len(pieces.starts),
            "num_tokens": int(pieces.stops[-1]) if len(pieces.stops) else 0,
            "num_characters": int((taken[:, 1] - taken[:, 0]).sum()),
            "num_bytes": int(num_bytes[part]),
        }
    return {"fingerprint": content.hexdigest()[:32], "parts": parts}


def _laid_out(jobs: Jobs, fragments: Fragments, taken: np.ndarray, counts: np.ndarray) -> _Pieces:
    """Return where everything goes.

    Args:
        jobs: for the tokenizer.
        fragments: all.
        taken: [F, 2] the characters of each fragment that belong to the part.
        counts: [F] their tokens.
    """
    begin_id, end_id = jobs.tokenizer.begin_id, jobs.tokenizer.end_id
    fragment = np.flatnonzero(taken[:, 1] > taken[:, 0])
    document = fragments.document[fragment]
    opens = np.diff(document, prepend=-1) != 0
    begins = fragments.begins[fragment] & (taken[fragment, 0] == 0) & (begin_id is not None)
    trails = fragments.ends[fragment] & (taken[fragment, 1] == fragments.characters[fragment])
    # One token that both begins and ends stands once between two documents, as in GPT-2's data.
    is_shared = begins & np.concatenate([[False], trails])[:-1] & (begin_id == end_id)
    leads = begins & ~is_shared
    stops = np.cumsum(leads + counts[fragment] + trails)
    firsts = np.concatenate([[0], stops])[:-1]
    is_last = np.append(opens[1:], True)[: len(opens)]
    starts = (firsts - is_shared)[opens]
    num_positions = np.maximum(stops[is_last] - 1 - starts, 0)
    hashes = fragments.document_hashes()[document[opens]]
    texts = np.column_stack([(firsts + leads)[opens], (stops - trails)[is_last]])
    return _Pieces(fragment, leads, trails, stops, starts, num_positions, hashes, texts)


def _are_cut(fragments: Fragments, bounds: np.ndarray) -> bool:
    """Return whether parts share documents, each having another stretch of them."""
    has = np.diff(bounds, axis=1) > 0  # [F, parts]
    held = [np.unique(fragments.document[has[:, part]]) for part in range(has.shape[1])]
    return sum(map(len, held)) > len(np.unique(np.concatenate(held)))


def _hashed(path: Path, texts: np.ndarray) -> np.ndarray:
    """Return [D] uint64, a hash of the tokens of each text."""
    tokens = np.load(path, mmap_mode="r")
    digests = (
        hashlib.blake2b(tokens[start:stop].tobytes(), digest_size=8).digest()
        for start, stop in texts.tolist()
    )
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def _write_tokens(
    jobs: Jobs, part: int, pieces: _Pieces, path: Path, content: "hashlib._Hash"
) -> None:
    tokenizer = jobs.tokenizer
    dtype = token_dtype(tokenizer.vocab_size)
    total = int(pieces.stops[-1]) if len(pieces.stops) else 0
    if not total:
        np.save(path, np.empty(0, dtype))  # an empty file cannot be mapped
        return
    stream = np.lib.format.open_memmap(path, "w+", dtype, (total,))
    bounds = np.searchsorted(pieces.fragment, np.load(jobs.folder / "bounds.npy"))
    for job, (first, last) in enumerate(pairwise(bounds)):
        if first == last:
            continue
        start = int(pieces.stops[first - 1]) if first else 0
        stops = pieces.stops[first:last] - start
        sizes = np.diff(stops, prepend=0)
        leads, trails = pieces.leads[first:last], pieces.trails[first:last]
        out, is_text = np.empty(stops[-1], dtype), np.ones(stops[-1], bool)
        for places, token in (
            ((stops - sizes)[leads], tokenizer.begin_id),
            ((stops - 1)[trails], tokenizer.end_id),
        ):
            out[places] = token or 0
            is_text[places] = False
        with np.load(jobs.path(TOKENS, job)) as made:
            out[is_text] = made[PART_NAMES[part]]
        stream[start : start + len(out)] = out
        content.update(out.tobytes())
    stream.flush()
