"""Values that change over the optimizer steps of a run."""
