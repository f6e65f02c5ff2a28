"""Job descriptions to occupation codes."""

from lit_models import late_names

__getattr__ = late_names(__name__)
