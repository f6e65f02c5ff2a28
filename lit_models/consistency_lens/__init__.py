"""The consistency lens: an activation in words, and the activation rebuilt from the words."""

from lit_models import late_names

__getattr__ = late_names(__name__)
