"""Preference tuning of language models."""
