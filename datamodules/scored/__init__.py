"""Texts with what people said of them: numbers, levels, classes, labels."""
