"""Models, training and commands. Names are imported when first used: `unisono` starts fast."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HOME = {
    "LitRanker": "lit_models.seo.ranker",
    "LitSeq2Seq": "lit_models.seq2seq.module",
    "LitRetriever": "lit_models.seo.retriever",
    "LitCausalLM": "lit_models.causal_lm.module",
    "LitPreference": "lit_models.causal_lm.preference",
    "LitConsistencyLens": "lit_models.consistency_lens.module",
    "LitOccupationCoder": "lit_models.occupation_coder.module",
    "LitSparseRetriever": "lit_models.seo.sparse",
    "LitSnippetWriter": "lit_models.seo.writer",
    "LitSubject": "lit_models.consistency_lens.module",
    "LitTextScorer": "lit_models.seo.scorer",
}
_READERS = ("lit_models.occupation_coder.occcanine",)

__all__ = sorted(_HOME)


def late_names(package: str, homes: dict[str, str] = _HOME) -> Callable[[str], Any]:
    """Returns a package's `__getattr__`, which imports a name of the package when it is first used;
    `homes` maps names to the modules that define them."""

    def find(name: str) -> Any:
        if not homes.get(name, "").startswith(f"{package}."):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return find


def read_other(path: Path) -> dict[str, Any] | None:
    """Returns another program's checkpoint in our layout, or `None` if its layout is unknown."""
    found = (importlib.import_module(reader).read_other(path) for reader in _READERS)
    return next((content for content in found if content is not None), None)


__getattr__: Callable[[str], Any] = late_names(__name__)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
