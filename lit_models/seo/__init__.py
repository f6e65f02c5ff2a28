"""Search text: score it, rank it, find it, write its title and description."""

from lit_models import late_names

__getattr__ = late_names(__name__)
