"""Activations of a frozen language model: their documents, stores and batches."""
