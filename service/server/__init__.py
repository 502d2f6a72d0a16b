"""Sockets, signals and worker processes."""
