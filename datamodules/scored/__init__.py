"""Texts with labels: numbers, ordered levels, classes, or several labels at once."""
