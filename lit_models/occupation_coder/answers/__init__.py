"""Test scores with confidence intervals."""
