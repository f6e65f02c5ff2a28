"""Activations of a frozen language model: which, where they are kept, and their batches."""
