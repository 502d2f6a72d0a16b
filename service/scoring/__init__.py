"""Offline scoring: writes predictions for the rows of a file, with the tasks and the engine of the service, and without its queue."""
