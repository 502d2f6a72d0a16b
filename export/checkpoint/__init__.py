"""Loads a checkpoint, or a user's own module. All functions raise ExportError if a part is missing, invalid or not supported."""
