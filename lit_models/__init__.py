"""Everything that learns. Modules are imported when first named, so that `unisono` starts fast."""

import importlib
from typing import Any

_HOME = {
    "LitRanker": "lit_models.seo.ranker",
    "LitCausalLM": "lit_models.causal_lm.module",
    "LitConsistencyLens": "lit_models.consistency_lens.module",
    "LitOccupationCoder": "lit_models.occupation_coder.module",
    "LitSubject": "lit_models.consistency_lens.dump",
    "LitTextScorer": "lit_models.seo.scorer",
}

__all__ = [
    "LitCausalLM",
    "LitConsistencyLens",
    "LitOccupationCoder",
    "LitRanker",
    "LitSubject",
    "LitTextScorer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
