"""Activations in files of other programs, explained; verbalizers and reconstructors of others."""
