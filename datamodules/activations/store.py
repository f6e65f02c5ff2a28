"""Activations in memory-mapped files beside the tokens that they come from, with a schema.

Shapes: N activations of a part, D features.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.activations.positions import PositionRule
from datamodules.activations.statistics import ActivationStatistics
from datamodules.core.store import content_digest
from datamodules.files.splitting import PART_NAMES
from datamodules.text.store import TokenStore

SCHEMA, STATISTICS = "schema.json", "statistics.npz"
STORE_VERSION = 2


@dataclass(frozen=True)
class SubjectFacts:
    """Which numbers of which model the activations are.

    Args:
        digest: hex, of the subject's configuration and weights.
        layer: index of the block whose output is read, from 0.
        site: where in the block.
        hidden_size: D.
        num_layers: blocks of the subject.
    """

    digest: str
    layer: int
    site: str
    hidden_size: int
    num_layers: int


class ActivationStore(TokenStore):
    """A folder of activations, opened read-only.

    Args:
        folder: as `write_store` makes it.

    Raises:
        FileNotFoundError: there is no such folder, or no schema in it.
        ValueError: it is of another version, or a file has not the size that the schema says.
    """

    def __init__(self, folder: Path) -> None:
        self.schema = read_schema(folder)
        super().__init__(folder)
        self.subject = SubjectFacts(**self.schema["subject"])
        self.positions = PositionRule(**self.schema["positions"])
        self.context_length: int = self.schema["context_length"]
        self.attribute_names: list[str] = self.schema["attributes"]

    def damaged(self) -> list[Path]:
        """Return the files whose content is not the one that was written; reads all of them."""
        files = self.schema["files"].items()
        paths = [(self.folder / name, facts["digest"]) for name, facts in files]
        return [path for path, digest in paths if content_digest(path) != digest]

    @property
    def fingerprint(self) -> str:
        """Hex digest of the tokens, the subject and the positions."""
        return self.schema["fingerprint"]

    @cached_property
    def statistics(self) -> ActivationStatistics:
        """Of the training part."""
        return ActivationStatistics.load(self.folder / STATISTICS)

    @property
    def has_activations(self) -> bool:
        """Whether the activations themselves are kept, and not computed in every run."""
        return self.schema["keeps_activations"]

    def activations(self, part: int) -> np.ndarray:
        """Return [N, D] of one part."""
        return self.array(part, "activations")

    def array(self, part: int, kind: str) -> np.ndarray:
        """Return one array of a part, memory-mapped."""
        return np.load(self.folder / f"{PART_NAMES[part]}.{kind}.npy", mmap_mode="r")


def read_schema(folder: Path) -> dict[str, Any]:
    """Return the schema of a store whose files are all there.

    Raises:
        FileNotFoundError: there is no such folder, or no schema in it.
        ValueError: it is of another version, or a file has not the size that the schema says.
    """
    path = folder / SCHEMA
    if not folder.is_dir():
        raise FileNotFoundError(
            f"the store {folder} does not exist; make it with: unisono predict --config "
            f"consistency_lens/dump.yaml --data.predict_output={folder}"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no {SCHEMA}, so it is no complete store of activations; make it "
            "again with unisono predict, which goes on where it was interrupted."
        )
    try:
        schema = json.loads(path.read_text("utf-8"))
        version, files = schema["version"], schema["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); copy it again, or dump the activations again."
        ) from error
    if version != STORE_VERSION:
        raise ValueError(
            f"{path} has version {version}, and this program reads version {STORE_VERSION}; dump "
            "the activations again."
        )
    for name, facts in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != facts["bytes"]:
            state = "is missing" if found is None else f"has {found:,} bytes"
            raise ValueError(
                f"{folder / name} {state}, and the schema says {facts['bytes']:,} bytes: half of "
                "the store is lost; copy it again, or dump the activations again."
            )
    return schema
