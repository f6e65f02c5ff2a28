"""What is told of texts beside their codes: plausible sets, vectors, and all of it from Python."""
