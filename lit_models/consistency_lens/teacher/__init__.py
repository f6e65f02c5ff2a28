"""Text that a verbalizer learns to write in the warm start."""
