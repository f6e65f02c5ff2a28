"""Language models: from scratch, fine-tuned, with adapters."""

from collections.abc import Callable
from typing import Any

from lit_models import late_names

__all__ = ["LitCausalLM"]

__getattr__: Callable[[str], Any] = late_names(__name__)
