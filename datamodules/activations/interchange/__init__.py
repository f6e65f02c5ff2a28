"""Activations as parquet files that other programs read and write."""
