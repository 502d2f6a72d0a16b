"""Offline scoring: writes predictions for the rows of a file, with the same model and scheduler as the service."""
