"""Pairs of answers, of which people prefer one, as planned batches."""
