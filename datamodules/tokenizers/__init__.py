"""Texts and codes as integers and back: one file per kind of vocabulary."""
