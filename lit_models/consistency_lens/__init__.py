"""The consistency lens: an activation in words, and the activation rebuilt from the words."""
