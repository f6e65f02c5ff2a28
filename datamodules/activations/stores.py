"""Stores of several layers of one subject, read as one.

Sample i is place i // L at layer i % L, of L layers that ascend: whatever part of a test is read,
all layers are in it. Shapes: N places, L layers, D features.
"""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.activations.store import ActivationStore

OF_ONE_STORE = ("fingerprint", "files", "norms")  # of a schema, and the layer


def open_stores(folders: Sequence[Path]) -> list[ActivationStore]:
    """Return the stores by rising layer.

    Raises:
        FileNotFoundError, ValueError: one is no store, or damaged.
        ValueError: two are of the same layer, or differ in more than the layer.
    """
    stores = sorted((ActivationStore(one) for one in folders), key=lambda one: one.subject.layer)
    way_out = "dump all layers in one reading with unisono predict … --model.layers=[…]"
    for one, other in pairwise(stores):
        if one.subject.layer == other.subject.layer:
            raise ValueError(
                f"{one.folder} and {other.folder} both hold layer {one.subject.layer}; name each "
                f"layer's store once in data.activations, or {way_out}."
            )
        facts = [_shared_facts(store) for store in (one, other)]
        if changed := [name for name in facts[0] if facts[0][name] != facts[1][name]]:
            raise ValueError(
                f"{one.folder} and {other.folder} differ in {', '.join(changed)}, and the stores "
                f"of a lens over several layers may differ in the layer alone; {way_out}."
            )
    return stores


def _shared_facts(store: ActivationStore) -> dict[str, Any]:
    subject = {f"subject.{n}": v for n, v in asdict(store.subject).items() if n != "layer"}
    known = {n: v for n, v in store.schema.items() if n not in (*OF_ONE_STORE, "subject")}
    return {**subject, **known}


class LayeredActivations:
    """Memory-mapped activations of several layers, [N, D] each, as samples of one [N * L, D]."""

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = arrays

    def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
        """Return [..., D] of samples [...]."""
        place, layer = np.divmod(numbers, len(self.arrays))
        found = np.empty((*numbers.shape, self.arrays[0].shape[1]), self.arrays[0].dtype)
        for index, one in enumerate(self.arrays):
            found[layer == index] = one[place[layer == index]]
        return found
