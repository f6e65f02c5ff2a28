"""The page of `unisono show`: views of runs and models in a browser."""
