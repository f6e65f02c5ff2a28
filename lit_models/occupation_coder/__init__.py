"""Job descriptions to occupation codes."""

from collections.abc import Callable
from typing import Any

from lit_models import late_names

__all__ = ["LitOccupationCoder"]

__getattr__: Callable[[str], Any] = late_names(__name__)
