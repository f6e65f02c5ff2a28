"""Search text: scoring, ranking, retrieval, titles and descriptions."""

from lit_models import late_names

__getattr__ = late_names(__name__)
