"""Offline scoring: the rows of a file to a file with their predictions, by the model and the scheduler that serve."""
