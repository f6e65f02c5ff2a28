"""Explanations beside their activations, as a parquet file."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.activations.interchange.vectors import COLUMN, ROWS, write_vectors
from datamodules.activations.store import ActivationStore

COPIED = ("document", "position", "before", "token", "after", "explanation", "error")


def write_explained(
    path: Path,
    store: Any,
    activations: np.ndarray | None,
    line: Callable[[int], dict[str, Any]],
    way_out: str,
) -> None:
    """Write the activations of a store [N, D], which stay on the disk, with the values of the lines
    that a prediction has for each.

    Raises:
        FileExistsError: the file is there.
        ValueError: the activations are of no store.
    """
    if activations is None or not isinstance(store, ActivationStore):
        raise ValueError(
            f"{path.name} would hold activations, which are computed in each step here and not "
            "kept; dump them and name the store with data.activations, or write jsonl."
        )
    vectors = activations

    def pieces() -> Iterator[dict[str, Any]]:
        for first in range(0, len(vectors), ROWS):
            last = min(first + ROWS, len(vectors))
            lines = [line(number) for number in range(first, last)]
            columns = {name: [one[name] for one in lines] for name in COPIED}
            yield {COLUMN: vectors[first:last], **columns}

    subject = store.subject
    more = {"subject": subject.digest, "site": subject.site, "store": store.fingerprint}
    facts = {"d_model": subject.hidden_size, "layer_index": subject.layer, "unisono": more}
    write_vectors(path, facts, pieces(), way_out)
