"""Certificates: whether a configuration is the same run on any number of devices."""
