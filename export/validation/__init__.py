"""Compares the graphs of a bundle with its checkpoint. Only `reference` and `checkpoint_check` need torch."""
