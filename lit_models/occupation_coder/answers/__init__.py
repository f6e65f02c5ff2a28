"""Test scores with confidence intervals; similar training texts."""
