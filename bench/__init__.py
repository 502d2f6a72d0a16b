"""Measurements of the service over HTTP, and of the engine alone. Nothing in service or export imports this."""
