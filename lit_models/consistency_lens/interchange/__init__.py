"""Interchange with other programs: files of activations, released verbalizers."""
