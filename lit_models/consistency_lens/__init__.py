"""The consistency lens: an activation in words, and the activation rebuilt from the words."""

from collections.abc import Callable
from typing import Any

from lit_models import late_names

__all__ = ["LitConsistencyLens", "LitSubject"]

__getattr__: Callable[[str], Any] = late_names(__name__)
