"""Text and codes to integers and back: one file per kind of vocabulary."""
