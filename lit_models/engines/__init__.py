"""Launchers that may start a run again in another world."""
