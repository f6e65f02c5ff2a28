"""Answers beside codes: scores of a test with intervals, similar training texts."""
