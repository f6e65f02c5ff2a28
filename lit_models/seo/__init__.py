"""Search text: score it, rank it, find it, write its title and description."""

from collections.abc import Callable
from typing import Any

from lit_models import late_names

__all__ = ["LitRanker", "LitRetriever", "LitSnippetWriter", "LitTextScorer"]

__getattr__: Callable[[str], Any] = late_names(__name__)
