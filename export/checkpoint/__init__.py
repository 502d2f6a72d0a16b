"""Converts any source of a model to one plain record. The differences between checkpoints are handled only here."""
