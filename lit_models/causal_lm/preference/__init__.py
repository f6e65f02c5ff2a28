"""Language models that learn which of two answers people prefer."""
