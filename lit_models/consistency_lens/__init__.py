"""Consistency lens: explains activations in words, and rebuilds them from the words."""

from lit_models import late_names

__getattr__ = late_names(__name__)
