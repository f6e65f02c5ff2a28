"""Readings: what a lens says of an activation, how sure it is, and what the words are worth."""
