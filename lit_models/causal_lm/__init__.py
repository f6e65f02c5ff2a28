"""Language models: from scratch, fine-tuned, with adapters."""

from lit_models import late_names

__getattr__ = late_names(__name__)
