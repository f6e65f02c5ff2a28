"""Everything that turns files into batches; modules are imported on first use."""

import importlib
from typing import Any

_HOME = {
    "RankingDataModule": "datamodules.search.ranking",
    "RetrievalDataModule": "datamodules.search.retrieval",
    "ActivationDataModule": "datamodules.activations.datamodule",
    "ActivationDumpDataModule": "datamodules.activations.store",
    "Augmentation": "datamodules.occupations.datamodule",
    "CodeBookOptions": "datamodules.occupations.store",
    "CodeSystem": "datamodules.tokenizers.codes",
    "Columns": "datamodules.occupations.store",
    "InstructionDataModule": "datamodules.text.instructions",
    "LoaderOptions": "datamodules.core.planned",
    "OccupationDataModule": "datamodules.occupations.datamodule",
    "PagesDataModule": "datamodules.text.pages",
    "PreferenceDataModule": "datamodules.text.preferences",
    "PlanOptions": "datamodules.core.plan",
    "PlannedDataModule": "datamodules.core.planned",
    "PlannedDataset": "datamodules.core.planned",
    "Seq2SeqDataModule": "datamodules.text.pairs",
    "ScoredTextDataModule": "datamodules.scored.datamodule",
    "ShardDataModule": "datamodules.shards.datamodule",
    "SplitOptions": "datamodules.files.splitting",
    "TextDataModule": "datamodules.text.texts",
    "TextOptions": "datamodules.tokenizers.codes",
    "TextSplit": "datamodules.files.splitting",
    "TokenizerOptions": "datamodules.tokenizers.text",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
