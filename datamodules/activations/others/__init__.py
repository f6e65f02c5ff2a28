"""Other activations than a sample's own: its partner in a test, wrong ones in training."""
