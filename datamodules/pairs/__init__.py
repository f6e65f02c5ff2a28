"""Source texts and the target texts that they become."""
