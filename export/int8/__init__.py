"""Converts a float graph to int8 with fixed scales."""
