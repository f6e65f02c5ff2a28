"""Source texts to target texts with encoder-decoder models."""
