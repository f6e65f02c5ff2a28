"""Everything that turns files into batches. Modules are imported when first named."""

import importlib
from typing import Any

_HOME = {
    "HISCO": "datamodules.tokenizers.code_systems",
    "OCC1950": "datamodules.tokenizers.code_systems",
    "CodeSystem": "datamodules.tokenizers.code_systems",
    "LoaderOptions": "datamodules.planned",
    "OccupationDataModule": "datamodules.occupations",
    "PlanOptions": "datamodules.plan",
    "PlannedDataModule": "datamodules.planned",
    "PlannedDataset": "datamodules.planned",
}

__all__ = [
    "HISCO",
    "OCC1950",
    "CodeSystem",
    "LoaderOptions",
    "OccupationDataModule",
    "PlanOptions",
    "PlannedDataModule",
    "PlannedDataset",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
